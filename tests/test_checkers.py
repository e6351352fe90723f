"""Type checkers on what users write: they see every public name, and say typical mistakes."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

import rlflow as rf
from tests.conftest import ROOT

RIGHT = '''
from collections.abc import Mapping, Sequence
from pathlib import Path

import rlflow as rf
from rlflow import ops


class Settings(rf.Config):
    """What the pipeline is told."""

    lr: float = 1e-6
    group_size: int = 8


def length(responses: Sequence[str]) -> list[float]:
    return [float(len(response)) for response in responses]


everything = {"*": rf.on("all")}


@rf.pipeline(
    placements={
        "colocate": rf.Placement(pools={"all": "*"}, assign=everything),
        "split": rf.Placement(
            pools={"train": "3/4", "gen": "1/4"},
            assign={"*": rf.on("train"), "actor.rollout": rf.on("gen")},
        ),
    },
    track="none",
    record="actor.rollout=every:10",
)
def mine(config: Settings) -> None:
    actor = rf.Model("actor", "models/mine", optimizer=rf.AdamW(lr=config.lr), lora=rf.LoRA(rank=8))
    rf.Model("critic", "models/mine", head="value", dtype="bfloat16", init="random")
    prompts = ops.prompts(rf.data.jsonl("mine.jsonl"), batch=16)
    samples: rf.Handle = ops.rollout(actor, prompts, n=config.group_size, max_new_tokens=64)
    adv = ops.advantage("grpo", samples, ops.reward(length, samples))
    loss = rf.PolicyLoss("ppo_clip", clip=0.2, kl_coef=rf.AdaptiveKL(0.1, init=0.01), constant=None)
    ops.update(actor, samples, adv, loss=loss)


def looks(done: rf.IterationDone) -> None:
    metrics: Mapping[str, float] = done.metrics
    print(done.iteration, metrics["reward/mean"])


plan: rf.CompiledPlan = rf.compile(mine, placement="split", devices="h100:8", config={"lr": 1e-5})
page: str = plan.explain("actor.update") + plan.compare(plan) + plan._repr_html_()
played: rf.Simulated = rf.simulate(plan)
best: rf.Placement = rf.tune(Path("mine.py"), devices="h100:8", top=3).placement
part = rf.compile(mine, only="actor.rollout", from_=["runs/a:prompts"])
run: rf.RunHandle = rf.run(mine, placement=best, callbacks=[looks], record="none", track=["none"])
where: Path = run.wait().report()
found: rf.Evaluation = rf.eval(where.parent, samples=4, k=[1, 4], answer=str.strip)
score: float = found.pass_at[4].low + found.mean.value
'''
# A mistake a line, each where it stands, from the third on.
MISTAKES = """import rlflow as rf
from rlflow import ops
rf.compile("grpo.py", device="h100:8")
rf.compile("grpo.py").explain(3)
rf.run("grpo.py", iterations="ten")
rf.run("grpo.py", only=3)
rf.tune("grpo.py").plcement
rf.tune("grpo.py", staleness=2)
rf.Placment
rf.AdamW(learning_rate=1e-5)
rf.on(1)
rf.data.jsonl()
ops.rollout(n=8)
ops.rolout
rf.PolicyLoss("ppo_clip", kl_coeff=0.1)
rf.PolicyLoss("ppo_clip", old="rolout")
rf.DPOLoss("sigmoid", betta=0.1)
rf.Rejection("k1", hihg=2)
rf.AdaptiveKL(0.1, horizont=1e4)
rf.Model("actor", "models/mine", optimiser=rf.AdamW(lr=1e-5))
rf.Model("actor", "models/mine", optimizer="adamw")
rf.Model("actor", "models/mine", dtype="float16")
rf.Model("actor", "models/mine", lora=8)
"""
MARKED = [*range(3, 24)]


def checked_by_mypy(folder):
    """The lines with an error, as mypy prints them."""
    words = ["--strict", "--follow-imports=silent", "--no-error-summary", "mine.py"]
    made = subprocess.run(
        [sys.executable, "-m", "mypy", *words, "--cache-dir", str(folder / "cache")],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment(),
    )
    found = [line.split(":") for line in made.stdout.splitlines() if ": error:" in line]
    return sorted({int(parts[1]) for parts in found if parts[0] == "mine.py"}), made.stdout


def checked_by_pyright(folder):
    """The lines with an error, as pyright says them."""
    if importlib.util.find_spec("pyright") is None or shutil.which("node") is None:
        pytest.skip("no pyright, or no Node.js that it could run on")
    settings = {"extraPaths": [str(ROOT)], "include": ["mine.py"], "reportMissingImports": "error"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    made = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment(),
    )
    said = json.loads(made.stdout)["generalDiagnostics"]
    errors = [each for each in said if each["severity"] == "error"]
    return sorted({each["range"]["start"]["line"] + 1 for each in errors}), made.stdout


def environment():
    """This process's, with this rlflow to import, and pyright kept from asking for a newer one."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("checked", [checked_by_mypy, checked_by_pyright])
@pytest.mark.parametrize(("text", "errors"), [(RIGHT, []), (MISTAKES, MARKED)])
def test_a_users_file_is_understood(tmp_path, checked, text, errors):
    (tmp_path / "mine.py").write_text(text)
    found, printed = checked(tmp_path)

    assert errors == found, printed


@pytest.mark.slow
@pytest.mark.parametrize("checked", [checked_by_mypy, checked_by_pyright])
def test_every_public_name_has_a_type(tmp_path, checked):
    names = [f"rf.{name}" for name in rf.__all__] + [f"rf.ops.{name}" for name in rf.ops.__all__]
    names = [f"{name}[float]" if name in ("rf.Row", "rf.Token") else name for name in names]
    lines = [f"seen_{number} = {name}" for number, name in enumerate(names)]
    (tmp_path / "mine.py").write_text("\n".join(["import rlflow as rf", *lines, ""]))
    found, printed = checked(tmp_path)

    assert [] == found, printed
