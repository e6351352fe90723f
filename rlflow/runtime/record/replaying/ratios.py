"""What an update made of each token that it learnt from: its probability after it, over before.

Computed here, by the embedded engine on the CPU, from the checkpoints that run and replay have left
and the rows that were recorded; so whatever wrote the weights, both sides have one arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlflow.batch import flat, lengths, make_batch, select_rows
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine
from rlflow.graph.model import Model
from rlflow.modelfiles.directories import model_directory
from rlflow.runtime.record.checkpoint import stored_files
from rlflow.runtime.record.edges.reading import read_edge, recorded_tensors
from rlflow.runtime.record.manifest import read_manifest
from rlflow.runtime.record.shards.reading import open_component

if TYPE_CHECKING:
    from torch import Tensor

# Tokens of one forward pass, and of all rows that are looked at: prompts and responses.
MICRO_TOKENS = 8192
MOST_TOKENS = 65536
FIELDS = ("prompt_tokens", "response_tokens", "response_mask", "rollout_log_probs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RatiosOfOne:
    """Ratios of the probabilities of tokens, after an update over when they were sampled."""

    mean: float
    least: float
    most: float
    beyond: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRatios:
    """Ratios of a model's tokens in run and replay, and how far the logs of both are apart.

    `beyond` is the share of ratios outside of 1 +- `band`. `apart` are mean and maximum over the
    tokens of |log ratio - log ratio|; the maximum is at token `token` of row `row`, from 0.
    """

    model: str
    tokens: int
    rows: int
    of_rows: int
    band: float
    run: RatiosOfOne
    replay: RatiosOfOne
    apart: tuple[float, float]
    row: int
    token: int

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def token_ratios(
    models: tuple[Model, Model],
    places: Mapping[str, tuple[Path, str, str]],
    iteration: int,
    checkpoints: tuple[Path, Path],
    *,
    near: Path | None,
    seed: int,
    temperature: float,
    band: float,
) -> TokenRatios | None:
    """Compare what two updates made of the tokens of one iteration.

    `models` are the model as run and replay declare it, `checkpoints` those from after the update.
    `places` says where the fields `FIELDS` are recorded: run, node, and the field's name there.
    None where the update learnt from no token.
    """
    fields = {}
    for name, (run, node, field) in places.items():
        fields[name] = recorded_tensors(read_edge(run, node, iteration, columns=[field]))[field]
    whole = make_batch(fields, len(lengths(fields["response_tokens"])))
    sizes = lengths(fields["prompt_tokens"]) + lengths(fields["response_tokens"])
    rows = max(sum(total <= MOST_TOKENS for total in accumulate(sizes.tolist())), 1)
    batch = select_rows(whole, torch.arange(rows))
    mask = flat(batch["response_mask"]).bool()
    if not bool(mask.any()):
        return None
    before = flat(batch["rollout_log_probs"]).double()
    logs = [
        _log_probs(spec, path, batch, near, seed, temperature) - before
        for spec, path in zip(models, checkpoints, strict=True)
    ]
    gap = (logs[0] - logs[1]).abs().masked_fill(~mask, 0.0)
    at = int(gap.argmax())
    bounds = list(accumulate(lengths(batch["response_tokens"]).tolist(), initial=0))
    row = sum(start <= at for start in bounds) - 1
    one, other = (_ratios(each[mask], band) for each in logs)
    return TokenRatios(
        model=models[0].name,
        tokens=int(mask.sum()),
        rows=rows,
        of_rows=len(sizes),
        band=band,
        run=one,
        replay=other,
        apart=(float(gap.sum() / mask.sum()), float(gap.max())),
        row=row,
        token=at - bounds[row],
    )


def _ratios(logs: Tensor, band: float) -> RatiosOfOne:
    ratios = logs.exp()
    return RatiosOfOne(
        mean=float(ratios.mean()),
        least=float(ratios.min()),
        most=float(ratios.max()),
        beyond=float(((ratios - 1.0).abs() > band).double().mean()),
    )


def _log_probs(
    spec: Model, checkpoint: Path, batch: Any, near: Path | None, seed: int, temperature: float
) -> Tensor:
    """Log-probs of the response tokens under a checkpoint's weights: flat float64 `[total]`."""
    source = model_directory(spec.path, near)
    files = stored_files(checkpoint, read_manifest(checkpoint))[spec.name]
    loaded = load_model(
        spec.path if source is None else str(source),
        dtype=getattr(torch, spec.dtype),
        device="cpu",
        seed=seed,
        init="random" if spec.init == "random" else "weights",
        lora=spec.lora,
        freeze=spec.freeze,
    )
    with open_component(files) as stored:
        loaded.load_tensors({name: tensor[...] for name, tensor in stored.items()}, 0)
    engine = TrainEngine(loaded, None, micro_tokens=MICRO_TOKENS)
    made = engine.forward(batch, outputs=("log_probs",), temperature=temperature)
    return made["log_probs"].double()
