"""`rlflow export`: the weights of a run's last checkpoint as a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rlflow.errors import CheckpointError, Finding, UsageError, known_names, near_names
from rlflow.scheduler.shapes import model_directory

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
)


def export(run: Path, output: Path, name: str | None) -> tuple[Path, int]:
    """Write config, tokenizer and safetensors; returns the directory and the iterations done.

    Of a critic the body is written; a Hugging Face causal model has no place for its head.
    Adapters are added to the weights that they adapt.

    Raises CheckpointError where the run has no checkpoint that verifies, UsageError
    where the run trains no model of that name.
    """
    from rlflow.engines.loading import save_model
    from rlflow.runtime.checkpoint import load_checkpoint
    from rlflow.runtime.rundir import RunDir

    directory = RunDir.view(run)
    checkpoint = load_checkpoint(directory.checkpoints)
    if checkpoint is None:
        raise CheckpointError(Finding(code="E754", what=f"{run} has no checkpoint yet"))
    trained = [key for key in checkpoint.components if not key.endswith(".optimizer")]
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
    models: list[dict[str, Any]] = json.loads((run / "graph.json").read_text())["models"]
    spec = next(model for model in models if model["name"] == chosen)
    near = Path(str(directory.read_run()["pipeline"]).partition(":")[0])
    source = model_directory(str(spec["path"]), near) or Path(str(spec["path"]))
    model = _model(source, spec, int(checkpoint.identity["seed"]))
    model.load_tensors(checkpoint.components[chosen], checkpoint.iteration)
    output.mkdir(parents=True, exist_ok=True)
    save_model(model, str(output))
    for file in KEPT_FILES:
        if (source / file).is_file() and (source / file).resolve() != (output / file).resolve():
            shutil.copyfile(source / file, output / file)
    return output, checkpoint.iteration


def _model(source: Path, spec: dict[str, Any], seed: int) -> Any:
    """The model that the run began with, where a checkpoint needs what training left as it was."""
    import torch

    from rlflow.engines.loading import load_model
    from rlflow.graph.model import LoRA

    lora = LoRA(**spec["lora"]) if spec.get("lora") else None
    return load_model(
        str(source),
        dtype=getattr(torch, spec["dtype"]),
        device="cpu",
        head=spec["head"],
        seed=seed,
        init="weights" if lora is not None and spec["init"] == "pretrained" else "random",
        lora=lora,
    )
