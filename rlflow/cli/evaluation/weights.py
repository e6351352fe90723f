"""Which weights are evaluated: those of a run, a checkpoint, a model directory, or a pipeline.

Says what was named, and writes the weights of a checkpoint as a model directory that every engine
loads: a snapshot, for as long as the evaluation runs.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlflow.cli.export import export_checkpoint
from rlflow.cli.options import read_run
from rlflow.data.paths import shown
from rlflow.errors import CheckpointError, Finding, UsageError, near_names
from rlflow.graph.model import Model
from rlflow.graph.pipeline import Pipeline
from rlflow.modelfiles.directories import cached_models
from rlflow.runtime.record.checkpoint import NAME_FORM, find_checkpoint, list_iterations
from rlflow.runtime.record.manifest import MANIFEST, checkpoint_name
from rlflow.runtime.record.rundir import RUN_FILE, RunDir, words_again
from rlflow.runtime.record.stages import stage

NOTHING = "Nothing was started."
SHOWN = 40
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedWeights:
    """What was named: a checkpoint, or a model's path; neither of a pipeline's own weights.

    `pipeline`, `settings` and `placement` are those of the run that it belongs to, where it
    belongs to one.
    """

    said: str
    checkpoint: Path | None = None
    path: str | None = None
    pipeline: str | Pipeline | None = None
    settings: tuple[str, ...] = ()
    placement: str | None = None

    def text(self, model: str) -> str:
        """What is evaluated, in words."""
        if self.checkpoint is not None:
            done = NAME_FORM.fullmatch(self.checkpoint.name)
            after = f" after {int(done[1])} iterations" if done else ""
            return f"{model}{after}, {shown(self.checkpoint)}"
        return f"{model} of {self.path}" if self.path else f"{model} as {self.said} begins"


def named_weights(said: str, iteration: int | None) -> NamedWeights:
    """What a text names. Raises UsageError E360 for nothing of the kind, E361 for no checkpoint."""
    path = Path(said)
    if not said:  # which is no folder, though a path without parts is this one
        raise UsageError(_nothing("''", path), summary=NOTHING)
    try:
        path.exists()
    except OSError as error:  # a name that no file can have
        what = f"{said[:SHOWN]}... is nothing that has weights"
        raise UsageError(Finding(code="E360", what=what, got=str(error.strerror))) from None
    if (path / RUN_FILE).is_file():
        return _of_run(said, path, _checkpoint_of(path, iteration))
    if iteration is not None:
        raise UsageError(
            Finding(
                code="E361",
                what=f"--iteration {iteration}: {said} is not the directory of a run",
                fix="leave it out",
            ),
            summary=NOTHING,
        )
    if (path / MANIFEST).is_file():
        run = path.resolve().parent.parent
        owned = (run / RUN_FILE).is_file()
        return _of_run(said, run, path) if owned else NamedWeights(said=said, checkpoint=path)
    if path.is_dir() and (path / "config.json").is_file():
        return NamedWeights(said=said, path=str(path.resolve()))
    if said.partition(":")[0].endswith(".py"):
        return NamedWeights(said=said, pipeline=said)
    local = path.parts[:1] in [("runs",), ("evals",)] or Path(*path.parts[:1]).exists()
    if HUB_NAME.fullmatch(said) and not local:
        return NamedWeights(said=said, path=said)
    raise UsageError(_nothing(said, path), summary=NOTHING)


def _of_run(said: str, run: Path, checkpoint: Path) -> NamedWeights:
    words = words_again(RunDir.view(run).read_run())
    options = read_run(words[1:]) if words[:1] == ["run"] else {}
    return NamedWeights(
        said=said,
        checkpoint=checkpoint,
        pipeline=options.get("pipeline"),
        settings=tuple(options.get("settings", ())),
        placement=options.get("placement"),
    )


def _checkpoint_of(run: Path, iteration: int | None) -> Path:
    """A run's newest checkpoint, or that after so many iterations."""
    root = RunDir.view(run).checkpoints
    if iteration is None:
        found = find_checkpoint(root)
        if found is None:
            raise CheckpointError(Finding(code="E754", what=f"{run} has no checkpoint yet"))
        return found.path
    path = root / checkpoint_name(iteration)
    if not path.is_dir():
        known = [str(each) for each in list_iterations(root)]
        raise UsageError(
            Finding(
                code="E361",
                what=f"{run} has no checkpoint after {iteration} iterations",
                got=f"checkpoints after {', '.join(known) or 'none'}",
                fix=f"--iteration {known[-1]}" if known else "",
            ),
            summary=NOTHING,
        )
    return path


def _nothing(said: str, path: Path) -> Finding:
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    names = [each.name for each in beside if each.is_dir()]
    near = [str(path.parent / name) for name in near_names(path.name, names)]
    return Finding(
        code="E360",
        what=f"{said} is nothing that has weights",
        got="a path that is not there" if not path.exists() else "neither run nor model",
        expected="a run directory, one of its checkpoints, a model directory in Hugging Face form, "
        "the name of a hub model, or a pipeline for the weights that it begins with",
        near=tuple([*near, *near_names(said, cached_models())][:3]),
    )


@contextmanager
def snapshot_of(
    named: NamedWeights, model: Model, near: Path | None, parent: Path
) -> Iterator[Model]:
    """The model to sample from, without what training needs.

    A checkpoint's weights are written into a directory below `parent`, which goes at the end.
    Raises CheckpointError where the checkpoint is damaged or has no such model.
    """
    plain = model.model_copy(update={"optimizer": None, "lora": None, "freeze": ()})
    if named.checkpoint is None:
        new = {} if named.path is None else {"path": named.path, "init": "pretrained"}
        yield plain.model_copy(update=new)
        return
    parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".weights-", dir=parent) as folder:
            output = Path(folder).resolve() / model.name
            with stage("reading the checkpoint"):
                export_checkpoint(named.checkpoint, model, near, output)
            yield plain.model_copy(update={"path": str(output), "init": "pretrained"})
    finally:
        with suppress(OSError):  # nothing was written there
            parent.rmdir()
