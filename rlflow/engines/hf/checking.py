"""The check of a loaded model: what it computes against its own, unmodified forward.

A few rows of fixed tokens, packed, decoded, and through the head alone. This file knows no path.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rlflow.batch import lengths as batch_lengths
from rlflow.batch import ragged_rows
from rlflow.contract.engines import ModelConfig
from rlflow.contract.values import Head
from rlflow.engines.hf.forward import attention
from rlflow.engines.hf.forward.attention import PackedAttention
from rlflow.engines.hf.forward.head import Predictor
from rlflow.engines.hf.forward.packed import TREE_WIDTH, pack, pack_prompts
from rlflow.engines.hf.generate.attention import DecodeAttention
from rlflow.engines.hf.generate.cache import KeyValueCache
from rlflow.engines.hf.models import TorchModel, ValueModel
from rlflow.errors import Finding, UsageError

# The largest difference allowed between packed and plain logits, relative to the largest logit.
# The plain forward takes norms and softmax in float32 whatever the dtype.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
CHECK_PROMPTS = (5, 3)
CHECK_RESPONSES = (4, 2, 3, 5)


def check_rows(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Two prompts with two responses each, fixed tokens spread over the vocabulary."""
    made = torch.arange(64).mul(2654435761).remainder(vocabulary).tolist()
    prompts = [made[:size] for size in CHECK_PROMPTS for _ in range(2)]
    starts = [10 + 8 * row for row in range(len(CHECK_RESPONSES))]
    responses = [made[a : a + n] for a, n in zip(starts, CHECK_RESPONSES, strict=True)]
    return ragged_rows(prompts, torch.int64), ragged_rows(responses, torch.int64)


@torch.no_grad()
def plain_outputs(module: nn.Module, config: ModelConfig, head: Head) -> Tensor:
    """What the unmodified module predicts for the checked rows, one row at a time.

    Logits `[tokens, vocabulary]` of a language model, hidden states `[tokens, size]` of a body.
    """
    device = next(module.parameters()).device
    rows = []
    prompts, responses = check_rows(config.get_text_config().vocab_size)
    for prompt, response in zip(prompts.unbind(), responses.unbind(), strict=True):
        tokens = torch.cat([prompt, response])[None].to(device)
        if isinstance(module, ValueModel):
            output = module.body(input_ids=tokens, use_cache=False).last_hidden_state
        else:
            output = module(input_ids=tokens, use_cache=False).logits
        rows.append(output[0, len(prompt) - 1 : -1])
    return torch.cat(rows)


def check_outputs(model: TorchModel, plain: Tensor) -> None:
    """Raise UsageError where a way of computing differs from the plain outputs."""
    for way, (difference, limit) in forward_differences(model, plain).items():
        raise UsageError(
            Finding(
                code="E504",
                what=f"model {model.name!r} computes something else when its rows are {way}",
                got=f"largest difference {difference:.3g}",
                expected=f"at most {limit:.3g}, between packed rows and its own forward",
                fix="use a model with plain causal attention (Llama, Qwen, Mistral, ...)",
            )
        )


def checked_head(
    model: TorchModel, plain: Tensor, predictor: Predictor | None, *, always: bool = False
) -> Predictor | None:
    """The head of a language model, None where chunks through it differ from the plain outputs.

    A CPU, which makes distributions all at once, takes it unchecked but for `always`. All ranks
    that hold the model call it alike, and each compares its part of the vocabulary.
    """
    if predictor is None or (model.device.type == "cpu" and not always):
        return predictor
    difference, limit = head_difference(model, plain)
    return predictor if difference <= limit else None


@torch.no_grad()
def head_difference(model: TorchModel, plain: Tensor) -> tuple[float, float]:
    """The largest difference of logits by the head alone, and the largest allowed."""
    prompts, responses = check_rows(model.config.get_text_config().vocab_size)
    layout = pack(prompts, responses, model.device)
    found, form = model.predicted(
        layout.tokens, layout.positions, PackedAttention(layout), layout.targets,
        lambda predictor, hidden: (predictor.logits(hidden), predictor.form),
    )  # fmt: skip
    part = plain[:, form.start : form.start + found.shape[1]]
    limit = TOLERANCE[model.dtype] * float(plain.abs().max())
    return float((found[: layout.predictions] - part).abs().max()), limit


@torch.no_grad()
def forward_differences(model: TorchModel, plain: Tensor) -> dict[str, tuple[float, float]]:
    """The ways of computing that differ: their largest difference, and the largest allowed."""
    prompts, responses = check_rows(model.config.get_text_config().vocab_size)
    ways: dict[str, Callable[[], Tensor]] = {
        "packed": lambda: packed_outputs(model, prompts, responses, TREE_WIDTH),
        "packed in rows": lambda: packed_outputs(model, prompts, responses, 0),
        "decoded": lambda: decoded_outputs(model, prompts, responses),
    }
    limit = TOLERANCE[model.dtype] * float(plain.abs().max())
    found = {}
    for way, compute in ways.items():
        difference = float((compute() - plain).abs().max())
        if not difference <= limit:
            found[way] = (difference, limit)
    return found


def packed_outputs(model: TorchModel, prompts: Tensor, responses: Tensor, width: int) -> Tensor:
    """The checked rows in one packed forward."""
    layout = pack(prompts, responses, model.device, width)
    state = PackedAttention(layout)
    found = outputs(model, layout.tokens, layout.positions, state, layout.targets)
    return found[: layout.predictions]


def decoded_outputs(model: TorchModel, prompts: Tensor, responses: Tensor) -> Tensor:
    """The checked rows one token at a time on a cache, rows that end dropping out."""
    layout = pack_prompts(prompts, model.device)
    lengths = batch_lengths(prompts)
    cache = KeyValueCache(lengths, 1, max(CHECK_RESPONSES), model.device)
    state = PackedAttention(layout, cache)
    rows = [row.to(model.device) for row in responses.unbind()]
    first = outputs(model, layout.tokens, layout.positions, state, layout.targets)
    found = [[first[row]] for row in range(len(rows))]
    alive = torch.arange(len(rows))
    for column in range(max(CHECK_RESPONSES) - 1):
        live = torch.tensor([len(rows[row]) > column + 1 for row in alive.tolist()])
        alive = alive[cache.keep(live.to(model.device)).cpu()]
        cache.advance()
        tokens = torch.zeros(cache.rows, dtype=torch.int64, device=model.device)
        tokens[: len(alive)] = torch.stack([rows[row][column] for row in alive.tolist()])
        positions = cache.lengths + column
        everyone = torch.arange(len(alive), device=model.device)
        made = outputs(model, tokens, positions, DecodeAttention(cache), everyone)
        for place, row in enumerate(alive.tolist()):
            found[row].append(made[place])
    return torch.stack([output for row in found for output in row])


def outputs(
    model: TorchModel,
    tokens: Tensor,
    positions: Tensor,
    state: attention.AttentionState,
    keep: Tensor,
) -> Tensor:
    """Logits of a language model; hidden states of a value model's body."""
    if not isinstance(model.module, ValueModel):
        return model.logits(tokens, positions, state, keep)
    with attention.attending(state):
        output = model.module.body(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False
        )
    hidden: Tensor = output.last_hidden_state[0, keep]
    return hidden
