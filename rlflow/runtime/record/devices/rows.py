"""What rows cost a model, counted from their lengths: tokens, predictions, pairs of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rlflow.batch import lengths, prompt_groups
from rlflow.graph.fields import PIXELS

if TYPE_CHECKING:
    from torch import Tensor


SIZED_BY = ("prompt_tokens", "response_tokens")


def row_tokens(fields: Mapping[str, Tensor]) -> Tensor | None:
    """Tokens of each row, int64 `[rows]`, where the rows have prompts or responses."""
    found = [lengths(fields[name]) for name in SIZED_BY if name in fields]
    return sum(found[1:], start=found[0]) if found else None


def row_work(fields: Mapping[str, Tensor]) -> dict[str, float]:
    """Figures of rows with ragged int64 `prompt_tokens`, `response_tokens`, or one of them.

    `tokens` are all of the rows'. As rows are packed, equal prompts are computed once: so are the
    `passed` tokens and the `pairs` of a token and one that it attends to, itself included.
    `predicted` are the responses'. Empty where rows have neither.
    """
    found = [name for name in SIZED_BY if name in fields]
    if not found:
        return {}
    sizes = {name: lengths(fields[name]).cpu().numpy().astype(np.float64) for name in found}
    none = np.zeros(len(sizes[found[0]]))
    prompts = sizes.get("prompt_tokens", none)
    responses = sizes.get("response_tokens", none)
    once = prompts
    if "prompt_tokens" in fields:
        first = prompt_groups(fields["prompt_tokens"], fields.get(PIXELS))
        once = prompts[first == np.arange(len(first))]
    within = once * (once + 1) / 2
    of_responses = responses * prompts + responses * (responses + 1) / 2
    return {
        "tokens": float(prompts.sum() + responses.sum()),
        "passed": float(once.sum() + responses.sum()),
        "predicted": float(responses.sum()),
        "pairs": float(within.sum() + of_responses.sum()),
    }
