"""Experts that tokens chose, as fields of rows and as a flat sequence of tokens has them.

`prompt_experts` ragged int16 `[rows, j, layers * k]` are of the tokens of prompts, `routed_experts`
of those of responses, of which the last is read by nobody: -1. This file runs no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.batch import Batch, flat, lengths, prompt_groups, ragged_like, to_device
from rlflow.engines.hf.forward.packed import PackedLayout
from rlflow.engines.hf.routing.passes import Pass

PROMPTS, RESPONSES = "prompt_experts", "routed_experts"
NONE = -1


def replayed_of(batch: Batch, layout: PackedLayout, layers: int) -> Tensor | None:
    """What flat tokens are to choose, int64 `[tokens, layers, k]`; None where rows do not say."""
    prompts, responses = batch.get(PROMPTS, None), batch.get(RESPONSES, None)
    if prompts is None or responses is None or layout.rows is None:
        return None
    values = torch.cat([flat(prompts), flat(responses)])
    whole = layout.of_all
    found = values.new_full((len(whole.tokens), values.shape[1]), NONE)
    found[: whole.real] = values[torch.from_numpy(layout.rows.source)]
    chosen = to_device(found.view(len(found), layers, -1).long(), layout.tokens.device)
    return layout.taken(chosen, NONE)


def flat_experts(done: Pass) -> Tensor:
    """What a pass has recorded of flat tokens, int16 `[tokens, layers * k]`."""
    return torch.cat([done.chosen[layer] for layer in sorted(done.chosen)], -1)


def recorded_of(chosen: Tensor, layout: PackedLayout, batch: Batch) -> dict[str, Tensor]:
    """What all flat tokens chose, as flat values of the fields of rows, in their order, on the CPU.

    Rows that share a token's place have all what was chosen there.
    """
    assert layout.rows is not None
    chosen = chosen.cpu()
    sizes = [lengths(batch[name]) for name in ("prompt_tokens", "response_tokens")]
    prompts, responses = (int(size.sum()) for size in sizes)
    values = chosen.new_full((prompts + responses, chosen.shape[1]), NONE)
    values[torch.from_numpy(layout.rows.source)] = chosen[: layout.real]
    # What predicts a response token is the one before: of the first that is the prompt's last.
    later = torch.ones(responses, dtype=torch.bool)
    later[(sizes[1].cumsum(0) - sizes[1])[sizes[1] > 0]] = False
    after = later.nonzero()[:, 0]
    values[prompts + after - 1] = chosen[layout.targets.cpu()[after]]
    return {PROMPTS: _of_all_prompts(values[:prompts], batch), RESPONSES: values[prompts:]}


def prompts_of(done: Pass, layout: PackedLayout, prompts: Tensor) -> Tensor:
    """What a pass over prompts alone has recorded, ragged int16 `[prompts, j, layers * k]`."""
    assert layout.rows is not None
    chosen = flat_experts(done).cpu()
    values = chosen.new_empty(len(flat(prompts)), chosen.shape[1])
    values[torch.from_numpy(layout.rows.source)] = chosen[: layout.real]
    return ragged_like(values, prompts)


def never_read(batch: Batch, width: int) -> dict[str, Tensor]:
    """The same of rows that no model has read."""
    prompts, responses = (len(flat(batch[n])) for n in ("prompt_tokens", "response_tokens"))
    return {
        name: torch.full((size, width), NONE, dtype=torch.int16)
        for name, size in ((PROMPTS, prompts), (RESPONSES, responses))
    }


def _of_all_prompts(values: Tensor, batch: Batch) -> Tensor:
    """Experts of every row's prompt, of those of the first row with the same one."""
    sizes = lengths(batch["prompt_tokens"])
    starts = sizes.cumsum(0) - sizes
    first = torch.from_numpy(prompt_groups(batch["prompt_tokens"]))
    shift = torch.repeat_interleave(starts[first] - starts, sizes)
    return values[torch.arange(len(values)) + shift]
