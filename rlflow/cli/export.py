"""`rlflow export`: the weights of a run's last checkpoint as a Hugging Face directory."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import CheckpointError, Finding, UsageError, known_names, near_names
from rlflow.modelfiles.directories import model_directory

if TYPE_CHECKING:
    from rlflow.graph.model import Model
    from rlflow.runtime.record.checkpoint import Found

KEPT_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)


def export_run(run: Path, output: Path, name: str | None) -> tuple[Path, int]:
    """Write config, tokenizer and safetensors; returns the directory and the iterations done.

    A value head is written beside the body, as `engines.writing` says. Adapters are added to the
    weights that they adapt; frozen parts are those that the run began with.

    Raises CheckpointError where the run has no checkpoint that verifies, UsageError
    where the run trains no model of that name.
    """
    from rlflow.runtime.record.checkpoint import find_checkpoint
    from rlflow.runtime.record.identity.documents import damaged, read_document
    from rlflow.runtime.record.rundir import RunDir

    directory = RunDir.view(run)
    checkpoint = find_checkpoint(directory.checkpoints)
    if checkpoint is None:
        raise CheckpointError(Finding(code="E754", what=f"{run} has no checkpoint yet"))
    for text in checkpoint.warnings():
        sys.stderr.write(f"warning: {text}\n")
    chosen = _chosen(run, name, [key for key in checkpoint.files if not key.endswith(".optimizer")])
    models = (read_document(run / "graph.json") or {}).get("models", [])
    spec = next((model for model in models if model["name"] == chosen), None)
    if spec is None:
        raise damaged(run / "graph.json", f"no model {chosen!r}, of which there are weights")
    near = Path(str(directory.read_run()["pipeline"]).partition(":")[0])
    _write_directory(spec, checkpoint, near, output)
    return output, checkpoint.iteration


def export_checkpoint(path: Path, model: Model, near: Path | None, output: Path) -> None:
    """Write one model of a checkpoint directory; `near` is the file of the pipeline.

    Raises CheckpointError where the checkpoint does not verify, or has not that model.
    """
    from rlflow.runtime.record.resuming import checkpoint_at

    checkpoint = checkpoint_at(path)
    if model.name not in checkpoint.files:
        trained = [key for key in checkpoint.files if not key.endswith(".optimizer")]
        raise CheckpointError(
            Finding(
                code="E369",
                what=f"checkpoint {path} has no model {model.name!r}",
                got=", ".join(trained),
                fix=f"--model {trained[0]}" if trained else "",
            )
        )
    _write_directory(model.model_dump(mode="json"), checkpoint, near, output)


def _write_directory(
    spec: dict[str, Any], checkpoint: Found, near: Path | None, output: Path
) -> None:
    """Write a model of a checkpoint, and beside it what its own directory has of a tokenizer."""
    source = model_directory(str(spec["path"]), near) or Path(str(spec["path"]))
    _write(source, spec, checkpoint, output)
    for file in _kept_files(source, valued=spec["head"] == "value"):
        if file.is_file() and file.resolve() != (output / file.name).resolve():
            shutil.copyfile(file, output / file.name)


def _chosen(run: Path, name: str | None, trained: list[str]) -> str:
    """The model to write: the one that is named, or the only one."""
    chosen = name or trained[0]
    if chosen not in trained or (name is None and len(trained) > 1):
        raise UsageError(
            Finding(
                code="E208",
                what=f"{run} trains {known_names(trained)}",
                got=name or "no --model",
                near=near_names(chosen, trained),
                fix=f"--model {trained[0]}",
            )
        )
    return chosen


def _kept_files(source: Path, *, valued: bool) -> list[Path]:
    """What goes beside the weights as it is; the config of a value model says more than it did."""
    names = [name for name in KEPT_FILES if not (valued and name == "config.json")]
    return [*(source / name for name in names), *(sorted(source.glob("*.py")) if valued else ())]


def _write(source: Path, spec: dict[str, Any], checkpoint: Found, output: Path) -> None:
    """Write config and weights; torch is imported here and no sooner."""
    from rlflow.engines.hf.writing import save_model
    from rlflow.runtime.record.shards.exporting import stream_model
    from rlflow.runtime.record.shards.reading import open_component

    files = checkpoint.files[str(spec["name"])]
    output.mkdir(parents=True, exist_ok=True)
    if stream_model(str(source), spec, files, output):
        return
    with open_component(files) as stored:
        weights = {name: tensor[...] for name, tensor in stored.items()}
    model = _model(source, spec, int(checkpoint.identity["seed"]))
    model.load_tensors(weights, checkpoint.iteration)
    save_model(model, str(output))


def _model(source: Path, spec: dict[str, Any], seed: int) -> Any:
    """What the run began with; its weights are read where a checkpoint has not all of them."""
    import torch

    from rlflow.engines.hf.loading import load_model
    from rlflow.graph.model import LoRA

    lora = LoRA(**spec["lora"]) if spec.get("lora") else None
    freeze = tuple(spec.get("freeze", ()))
    partly = lora is not None or freeze or spec["head"] == "value"
    files = partly and spec["init"] == "pretrained"
    return load_model(
        str(source),
        dtype=getattr(torch, spec["dtype"]),
        device="cpu",
        head=spec["head"],
        seed=seed,
        init="weights" if files else "random",
        lora=lora,
        freeze=freeze,
    )
