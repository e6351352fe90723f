"""Batches cut into micro-batches of bounded tokens, and what was computed of them put together.

And what passes over them may be asked for. This file knows neither models nor optimizers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.batch import (
    Batch,
    column_index,
    flat,
    lengths,
    make_batch,
    ragged,
    ragged_like,
    ragged_rows,
)
from rlflow.contract.values import Head, Temperature
from rlflow.engines.hf.forward.vocabulary import CHOSEN, IDS, SUMS, TOP
from rlflow.engines.hf.routing.replays import PROMPTS, RESPONSES
from rlflow.errors import Finding, RunError
from rlflow.graph.fields import PICTURES, PIXELS

# What torch says where the host has no memory, as an error of no type of its own.
HOST = "can't allocate memory"
# What oneDNN says where a product has no room; where it knows none, it names a descriptor.
NO_PRODUCT = "could not create a primitive"
SCORES = ("log_probs", "entropy")
EXPERTS = {PROMPTS, RESPONSES}
OUTPUTS: dict[Head, tuple[str, ...]] = {
    "lm": (*SCORES, *SUMS, *TOP, *CHOSEN, PROMPTS, RESPONSES),
    "value": ("values",),
}


@dataclass(frozen=True, slots=True)
class WantedOutputs:
    """What a pass is asked for: outputs by name, see `TrainEngine.forward`."""

    outputs: tuple[str, ...]
    temperature: Temperature = 1.0
    top_k: int = 0


def require_outputs(outputs: Collection[str], model: str, head: Head) -> None:
    """Raise RunError for an output that a model's head does not give."""
    known = OUTPUTS[head]
    for name in outputs:
        if name not in known:
            raise RunError(
                Finding(
                    code="E510",
                    what=f"model {model!r} has no output {name!r}",
                    got=f"a model with a {head!r} head",
                    expected=", ".join(known),
                )
            )


def ran_out(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, has no memory left."""
    said = str(error)
    unmade = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return unmade or HOST in said or said == NO_PRODUCT


def chosen_ids(batch: Batch) -> Tensor | None:
    """At which ids of each response token log-probs may be asked for, int64 `[total, k]`."""
    ids = batch.get(IDS, None)
    return None if ids is None else flat(ids)


def blank_outputs(
    batch: Batch,
    asked: WantedOutputs,
    tokens: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """Zeros of the shapes and dtypes of what a forward makes of so many response tokens.

    `dtype` is that of numbers; ids are int64.
    """
    several = (len(asked.temperature),) if isinstance(asked.temperature, tuple) else ()
    ids = chosen_ids(batch)
    width: dict[str, tuple[int, ...]] = dict.fromkeys(("top_log_probs", "top_ids"), (asked.top_k,))
    width["log_probs_at"] = () if ids is None else tuple(ids.shape[1:])
    return {
        name: torch.zeros(
            (tokens, *width.get(name, several)),
            dtype=torch.int64 if name == "top_ids" else dtype,
            device=device,
        )
        for name in asked.outputs
    }


def one_token(like: Batch) -> Batch:
    """The smallest row that a model can be asked about, with ids where another batch has them.

    Where that has pictures this row has none of them.
    """
    token = ragged_rows([[0]], torch.int64)
    fields = {"prompt_tokens": token, "response_tokens": token}
    ids = chosen_ids(like)
    for name in (PIXELS, PICTURES):
        if name in like:
            fields[name] = ragged(flat(like[name])[:0], torch.zeros(1, dtype=torch.int64))
    if ids is not None:
        fields[IDS] = ragged_like(torch.arange(ids.shape[1])[None], token)
    return make_batch(fields, 1)


def numbers_of(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """0-d metrics as numbers, brought from their device all at once."""
    if not metrics:
        return {}
    read = torch.stack([value.double() for value in metrics.values()]).tolist()
    return dict(zip(metrics, read, strict=True))


def add_metrics(total: dict[str, Tensor], metrics: Mapping[str, Tensor]) -> None:
    """Add the metrics of a micro-batch to those of the batch."""
    for name, value in metrics.items():
        now = value.detach()
        if name not in total:
            total[name] = now
        elif name.endswith("_max"):
            total[name] = torch.maximum(total[name], now)
        else:
            total[name] = total[name] + now


def in_batch_order(
    batch: Batch, cuts: list[Tensor | None], computed: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Outputs of micro-batches, whose rows `cuts` has, in the batch's order, on the CPU."""
    if len(cuts) == 1:
        return {name: values.cpu() for name, values in computed[0].items()}
    places = {
        kind: torch.cat([flat_places(lengths(batch[f"{kind}_tokens"]), rows) for rows in cuts])
        for kind in ("prompt", "response")
    }
    whole = {}
    for name in computed[0]:
        of = places["prompt" if name.startswith("prompt") else "response"]
        joined = torch.cat([values[name].cpu() for values in computed])
        whole[name] = torch.empty_like(joined).index_copy_(0, of, joined)
    return whole


def flat_places(size: Tensor, rows: Tensor | None) -> Tensor:
    """Where the flat values of `rows` lie among all rows' of lengths `size`, int64."""
    if rows is None:
        return torch.arange(int(size.sum()))
    picked = size[rows]
    starts = (size.cumsum(0) - size)[rows]
    return torch.repeat_interleave(starts, picked) + column_index(picked)


def cut_by_tokens(
    groups: np.ndarray[Any, np.dtype[np.int64]],
    prompts: np.ndarray[Any, np.dtype[np.int64]],
    responses: np.ndarray[Any, np.dtype[np.int64]],
    budget: int,
) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Cut rows into micro-batches of at most `budget` tokens, int64 row numbers each.

    Rows of one prompt (`groups` has its first row) stand together and count it once; a row
    beyond the budget is a micro-batch of its own. Order within the batch is kept otherwise.
    """
    cuts: list[list[int]] = []
    room, last = 0, -1
    for row in np.argsort(groups, kind="stable").tolist():
        own = int(responses[row])
        whole = own + int(prompts[row])
        needed = own if groups[row] == last else whole
        if not cuts or needed > room:
            cuts.append([])
            room, needed = budget, whole
        cuts[-1].append(row)
        room -= needed
        last = groups[row]
    return [np.array(cut, dtype=np.int64) for cut in cuts]


def half_of_largest(
    groups: np.ndarray[Any, np.dtype[np.int64]],
    prompts: np.ndarray[Any, np.dtype[np.int64]],
    responses: np.ndarray[Any, np.dtype[np.int64]],
    budget: int | None,
) -> int | None:
    """A budget that cuts the largest micro-batch in two; None where that is a single row."""
    every = int(prompts.sum() + responses.sum())
    cuts = cut_by_tokens(groups, prompts, responses, every if budget is None else budget)
    sizes = [int(responses[c].sum() + prompts[np.unique(groups[c])].sum()) for c in cuts]
    largest = int(np.argmax(sizes)) if sizes else 0
    return sizes[largest] // 2 if sizes and len(cuts[largest]) > 1 else None
