"""Layers that carry a state from token to token, called on packed rows and on single tokens.

A convolution sees the last tokens, a recurrence all of them, through a state (gated delta rule:
Yang et al., arXiv:2412.06464; Mamba-2: Dao and Gu, arXiv:2405.21060). Transformers calls such
layers alike: with hidden states `[rows, tokens, size]` and a cache that is asked for states and
given them. Packed tokens are handed to them as rows: every prompt once, those of one length
together, from a state of zeros; then what rows have beyond it, like lengths together and filled up
at the end, each from its prompt's state, through which gradients come back. So nothing crosses from
row to row. A step of decoding hands on one token of each row with the state of its cache. This
file knows what such layers ask of a cache, not what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlflow.batch import to_device
from rlflow.engines.hf.context.attention import HeadsAttention
from rlflow.engines.hf.context.carrying import SharedHeads, parts_of
from rlflow.engines.hf.forward.attention import PackedAttention, current_state
from rlflow.engines.hf.forward.packed import PackedLayout, alike_lengths
from rlflow.engines.hf.generate.attention import DecodeAttention
from rlflow.engines.hf.generate.cache import States
from rlflow.engines.hf.generate.paged import PagedAttention
from rlflow.errors import RunError
from rlflow.modelfiles.families import undrafted

Call = Callable[[Tensor, "RowStates"], Tensor]
# What such a layer calls the cache that it is given.
CACHES = ("cache_params", "past_key_values")
# A recurrence writes over the state that it is given where rows have a single token.
LEAST_TOKENS = 2


class RowStates:
    """The states of the rows of one call of one layer, asked for as transformers' caches are."""

    def __init__(self, states: Mapping[tuple[str, int], Tensor] | None = None) -> None:
        self.states: States = dict(states or {})

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution, `[rows, channels, kernel]`; None at first."""
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """What a recurrence has come to, rows first; None at first."""
        return self.states.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> Tensor:
        """Inputs of a convolution behind those that came before; the last ones are kept."""
        width = conv_kernel_size or conv_states.shape[-1]
        before = self.states.get(("conv", state_idx))
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:-1], width)
        both = torch.cat([before, conv_states], -1)
        self.states["conv", state_idx] = both[..., -width:]
        return both

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Keep what a recurrence has come to."""
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """True, so that a convolution of one token changes nothing in place."""
        return True


def use_states(module: nn.Module) -> None:
    """Let the layers of a model that carry states, where it has such, be called row by row."""
    for layer in module.modules():
        convolves = any(isinstance(part, nn.Conv1d) for part in layer.children())
        if convolves and hasattr(layer, "layer_idx"):
            carrying: Any = layer
            carrying.forward = partial(mixed, carrying, carrying.forward)
            carrying.carries_state = True


def mixed(
    layer: Any, own: Callable[..., Tensor], hidden_states: Tensor, **options: object
) -> Tensor:
    """The output of a layer for flat `hidden_states [1, tokens, size]`, as the state has rows."""
    name = next(name for name in CACHES if name in options)
    state, at = current_state(), layer.layer_idx

    if isinstance(state, HeadsAttention):
        return over_heads(state, layer, name, options, hidden_states[0])[None]

    def call(rows: Tensor, carried: RowStates) -> Tensor:
        return own(rows, **{**options, name: carried})

    if isinstance(state, PackedAttention):
        return over_layout(state, at, call, hidden_states[0])[None]
    if isinstance(state, DecodeAttention):
        return over_rows(state.cache.states[at], state.cache.rows, call, hidden_states[0])[None]
    if isinstance(state, PagedAttention):
        return over_slots(state, at, call, hidden_states[0])[None]
    raise RunError(undrafted(type(layer).__name__))


@dataclass(frozen=True, slots=True)
class RowRuns:
    """Which flat tokens are called together; all int64.

    `prompts` have tokens `[prompts, length]`, one of each length. `rows` have places of their
    prompts in those joined `[rows]`, and tokens `[rows, width]`, filled up with token 0. `slots
    [tokens]` are the places of flat tokens in all outputs joined, `order [groups]` those of prompts
    among prompts.
    """

    prompts: tuple[Tensor, ...]
    rows: tuple[tuple[Tensor, Tensor], ...]
    slots: Tensor
    order: Tensor


def row_runs(layout: PackedLayout) -> RowRuns:
    """The runs of a layout."""
    flat, device = layout.rows, layout.tokens.device
    assert flat is not None, "a layout of rows"
    slots = np.zeros(len(layout.tokens), dtype=np.int64)
    order = np.empty_like(flat.prompt_length)
    prompts: list[Tensor] = []
    rows: list[tuple[Tensor, Tensor]] = []
    filled = ended = 0
    for length in np.unique(flat.prompt_length):
        group = np.flatnonzero(flat.prompt_length == length)
        tokens = flat.group_start[group][:, None] + np.arange(length)
        slots[tokens] = filled + np.arange(tokens.size).reshape(tokens.shape)
        order[group] = ended + np.arange(len(group))
        filled, ended = filled + tokens.size, ended + len(group)
        prompts.append(to_device(torch.from_numpy(tokens), device))
    whole = flat.row_length + flat.row_shared
    starts = np.cumsum(whole) - whole
    for chosen in alike_lengths(whole):
        column = np.arange(max(int(whole[chosen].max()), LEAST_TOKENS))
        there = column < whole[chosen][:, None]
        tokens = np.zeros(there.shape, dtype=np.int64)
        tokens[there] = flat.path[(starts[chosen][:, None] + column)[there]]
        own = there & (column >= flat.row_shared[chosen][:, None])
        places = filled + np.arange(tokens.size).reshape(tokens.shape)
        slots[tokens[own]] = places[own]
        filled += tokens.size
        given = torch.from_numpy(order[flat.row_group[chosen]]), torch.from_numpy(tokens)
        rows.append((to_device(given[0], device), to_device(given[1], device)))
    on_device = (to_device(torch.from_numpy(each), device) for each in (slots, order))
    return RowRuns(tuple(prompts), tuple(rows), *on_device)


def over_layout(state: PackedAttention, layer: int, call: Call, hidden: Tensor) -> Tensor:
    """The output for the flat tokens `[tokens, size]` of a layout; its cache gets the states."""
    if state.runs is None:
        state.runs = row_runs(state.layout)
    runs: RowRuns = state.runs
    outputs: list[Tensor] = []
    ended: list[States] = []
    for tokens in runs.prompts:
        carried = RowStates()
        outputs.append(call(hidden[tokens], carried).flatten(0, 1))
        ended.append(carried.states)
    if not ended:
        return hidden
    states = {name: torch.cat([each[name] for each in ended]) for name in ended[0]}
    if state.cache is not None:
        by_group = {name: each.index_select(0, runs.order) for name, each in states.items()}
        state.cache.fill_states(layer, by_group)
    for place, tokens in runs.rows:
        begun = {name: each.index_select(0, place) for name, each in states.items()}
        outputs.append(call(hidden[tokens], RowStates(begun)).flatten(0, 1))
    return torch.cat(outputs).index_select(0, runs.slots)


def over_heads(
    state: HeadsAttention, layer: Any, name: str, options: Mapping[str, object], hidden: Tensor
) -> Tensor:
    """The output for own tokens `[tokens, size]` of a rank that computes a part of the heads.

    Of all tokens of the rows: none of them has to wait for another rank's state.
    """
    whole = state.layout.whole
    if whole.rows is None or not len(whole.rows.prompt_length):
        return hidden
    shared = SharedHeads(layer, parts_of(layer), state.group)
    standing = shared.standing()

    def call(rows: Tensor, carried: RowStates) -> Tensor:
        made: Tensor = type(layer).forward(standing, rows, **{**options, name: carried})
        return made

    entered, gates = shared.entered(hidden, state.layout.cut.total)
    made = over_layout(state.inner, layer.layer_idx, call, entered)
    return shared.left(made, gates, len(hidden))


def over_rows(states: States, rows: int, call: Call, hidden: Tensor) -> Tensor:
    """The output for one token of each of the first `rows` rows, whose states go on."""
    held = {name: each[:rows] for name, each in states.items()}
    carried = RowStates(held)
    output = call(hidden[:, None], carried)[:, 0]
    for name, each in carried.states.items():
        if each is not held[name]:
            held[name].copy_(each)
    return output


def over_slots(state: PagedAttention, layer: int, call: Call, hidden: Tensor) -> Tensor:
    """The output for one token of each slot's row; those that are live go on."""
    states, row = state.cache.states[layer], state.row
    carried = RowStates({name: each.index_select(0, row) for name, each in states.items()})
    output = call(hidden[:, None], carried)[:, 0]
    for name, each in carried.states.items():
        states[name].index_copy_(0, state.kept_row, each.to(states[name].dtype))
    return output
