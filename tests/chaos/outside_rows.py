"""Rows of what comes from outside: files that run code, links, text that drives a terminal."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.chaos.faulted import ACT, TINY
from tests.chaos.matrix import Row
from tests.chaos.scene import Scene
from tests.conftest import ROOT

# What no line of the package says, and where it may all the same.
NEVER = (
    r"trust_remote_code\s*=\s*True",
    r"weights_only\s*=\s*False",
    r"yaml\.load\(",
    "shell=True",
)


class Canary:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path(self.path),)


def pickled_model(scene: Scene) -> None:
    """A model whose only weights are a pickle, and one whose config names code of its own."""
    canary = scene.folder / "canary"
    for kind in ("pickle", "code"):
        model = scene.folder / kind
        shutil.copytree(TINY, model)
        if kind == "pickle":
            for file in model.glob("*.safetensors"):
                file.unlink()
            (model / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(canary)))
        else:
            config = json.loads((model / "config.json").read_text())
            config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own"}
            (model / "config.json").write_text(json.dumps(config))
            (model / "modeling_own.py").write_text(f"open({str(canary)!r}, 'w')\nclass Own: pass\n")
        scene.run_dir = scene.folder / f"run-{kind}"
        result = scene.run("--set", f"model={model}", "--iterations", 1)
        assert "error[E900]" not in result.err, result.err
        assert kind == "code" or result.code != 0, result.err
        scene.fired += 1
    assert not canary.exists(), "code of the model was run"


def scanned(scene: Scene) -> None:
    """No line of the package asks for what runs code from files or shells."""
    found = [
        f"{path}: {said}"
        for path in (ROOT / "rlflow").rglob("*.py")
        for said in NEVER
        if re.search(said, path.read_text())
    ]
    scene.fired += 1
    assert [] == found


def linked(name: str, scene: Scene) -> None:
    """A link in the place of a file that a run appends to: refused, and what it leads to stays."""
    assert 0 == scene.run("--iterations", 2).code
    outside = scene.folder / "precious"
    outside.write_text("precious")
    own = scene.run_dir / name
    kept = own.read_bytes()
    own.unlink()
    own.symlink_to(outside)
    scene.fired += 1
    result = scene.run(resume=True)
    assert (2, True) == (result.code, "error[E715]" in result.err), result.err
    shown = scene.ended(scene.rlflow("report", scene.run_dir), 60)
    assert (2, True) == (shown.code, "error[E715]" in shown.err), shown.err
    assert "precious" == outside.read_text()
    own.unlink()
    own.write_bytes(kept)
    scene.continues()


def forged(scene: Scene) -> None:
    """An answer with control characters and a line of ours, in an error: neither gets through."""
    result = scene.run(**{ACT: "forges_an_error@20"})
    scene.acted()
    assert 1 == result.code, result.err
    assert "\x1b" not in result.err
    lines = result.err.splitlines()
    assert ["E640"] == [line[6:10] for line in lines if line.startswith("error[")], result.err
    assert "\\x1b[2J" in result.err
    assert "\x1b" not in (scene.run_dir / "logs" / "error.txt").read_text()
    scene.continues()


def outside_rows() -> Iterator[Row]:
    """All rows of this file."""

    def row(name: str, fault: str, expect: str, inject: object) -> Row:
        return Row(id=name, fault=fault, expect=expect, inject=inject)  # type: ignore[arg-type]

    yield row("X1", "pickles and code in a model's directory", "refused", pickled_model)
    yield row("X2", "lines that would run what comes from outside", "refused", scanned)
    for name in ("metrics.jsonl", "spans/main.jsonl"):
        yield row(f"X5 {name}", f"{name} is a link", "refused", partial(linked, name))
    yield row("X6", "an answer that forges an error", "error", forged)
