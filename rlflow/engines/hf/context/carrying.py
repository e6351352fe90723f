"""Layers that carry states, of whose heads every rank along `cp` computes a part, of all tokens.

What a layer makes of each token by itself, its projections, a rank makes of its own tokens; heads
are then exchanged for tokens as those of attention are (`exchange`), and each rank convolves and
recurs through whole rows with its heads' part of the weights, by the layer's own forward. A
recurrence of a head depends on no other, so this is one rank's computation, cut. Gradients of
weights that ranks cut are zero but for their part: ranks add them up like all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlflow.engines.hf.context.exchange import ToHeads, heads_of_own
from rlflow.engines.hf.sharded.tensor_parallel import Standing

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """How the heads of a layer can be cut: everything in `counts`, by name, in equal parts.

    `projections` are layers that tokens pass before, by the sizes of the runs of their outputs of
    which each head has a part; `channels` those of the convolution `convolves`. `vectors` are
    parameters with as many numbers for each head, and `back` is the layer after all. Runs of
    `grouped` places, of projections and channels, are of `groups` that heads have in common,
    repeated where ranks are more. The first run of what is `gated` is for that norm of all heads
    alone, with which it stays where the tokens are.
    """

    projections: Mapping[str, Sizes]
    channels: Sizes
    counts: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    grouped: tuple[int, ...] = ()
    groups: str = ""
    gated: str = ""
    back: str = "out_proj"
    convolves: str = "conv1d"


def of_fused_pairs(layer: Any) -> HeadParts:
    """Qwen3-Next: each head of keys has its queries, keys, values and gates side by side."""
    wide, heads = 2 * (layer.key_dim + layer.value_dim), 2 * layer.num_v_heads
    return _delta(layer, {"in_proj_qkvz": (wide,), "in_proj_ba": (heads,)})


def of_fused_inputs(layer: Any) -> HeadParts:
    """Qwen3.5: queries, keys and values one after the other, the rest apart."""
    keys, values, heads = layer.key_dim, layer.value_dim, layer.num_v_heads
    return _delta(layer, {
        "in_proj_qkv": (keys, keys, values),
        "in_proj_z": (values,),
        "in_proj_b": (heads,),
        "in_proj_a": (heads,),
    })  # fmt: skip


def of_inputs_apart(layer: Any) -> HeadParts:
    """OLMo hybrid: every projection by itself."""
    sizes = dict.fromkeys(("q_proj", "k_proj"), layer.key_dim)
    sizes |= dict.fromkeys(("v_proj", "g_proj"), layer.value_dim)
    sizes |= dict.fromkeys(("a_proj", "b_proj"), layer.num_v_heads)
    return _delta(layer, {name: (size,) for name, size in sizes.items()}, back="o_proj")


def _delta(layer: Any, projections: Mapping[str, Sizes], back: str = "out_proj") -> HeadParts:
    """The parts of a gated delta rule."""
    return HeadParts(
        projections=projections,
        channels=(layer.key_dim, layer.key_dim, layer.value_dim),
        counts=("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"),
        vectors=("A_log", "dt_bias"),
        back=back,
    )


def of_groups(layer: Any) -> HeadParts:
    """Mamba-2: heads of a group have its two states in common, and one norm after a gate."""
    wide, states = layer.intermediate_size, layer.n_groups * layer.ssm_state_size
    channels = (wide, states, states)
    return HeadParts(
        projections={"in_proj": (wide, *channels, layer.num_heads)},
        channels=channels,
        counts=("num_heads", "intermediate_size"),
        vectors=("A_log", "D", "dt_bias"),
        grouped=(1, 2),
        groups="n_groups",
        gated="norm",
    )


def of_channels(layer: Any) -> HeadParts:
    """A short convolution between two gates, channel by channel."""
    wide = layer.conv.out_channels
    return HeadParts(projections={"in_proj": (wide,) * 3}, channels=(wide,), convolves="conv")


# By what a layer has that no other form has.
_FORMS: dict[str, Callable[[Any], HeadParts]] = {
    "in_proj_qkvz": of_fused_pairs,
    "in_proj_qkv": of_fused_inputs,
    "g_proj": of_inputs_apart,
    "ssm_state_size": of_groups,
    "conv": of_channels,
}


def parts_of(layer: Any) -> HeadParts:
    """How the heads of a layer can be cut, of a family of which they can."""
    return next(form for name, form in _FORMS.items() if hasattr(layer, name))(layer)


@dataclass(frozen=True, slots=True)
class SharedHeads:
    """A rank's heads of a `layer`, of which the ranks of a `group` have a part each."""

    layer: nn.Module
    parts: HeadParts
    group: dist.ProcessGroup

    @property
    def ranks(self) -> int:
        """How many there are."""
        return dist.get_world_size(self.group)

    @property
    def groups(self) -> int:
        """Of groups that heads have in common, how many this rank's have."""
        groups: int = getattr(self.layer, self.parts.groups)
        return max(groups // self.ranks, 1)

    def entered(self, hidden: Tensor, total: int) -> tuple[Tensor, Tensor | None]:
        """What own heads get of all `total` tokens `[total, width]`, of own `[tokens, size]`.

        And the gates of own tokens, where they stay.
        """
        runs = [
            run
            for name, sizes in self.parts.projections.items()
            for run in torch.split(getattr(self.layer, name)(hidden[None])[0], list(sizes), -1)
        ]
        gates = runs.pop(0) if self.parts.gated else None
        made = [self._by_rank(run, place) for place, run in enumerate(runs)]
        found: Tensor = ToHeads.apply(torch.cat(made, -1), self.group)  # type: ignore[no-untyped-call]
        return found[:total], gates

    def left(self, made: Tensor, gates: Tensor | None, tokens: int) -> Tensor:
        """The layer's output for own `tokens`, of what own heads make of all `[total, width]`."""
        joined = heads_of_own(made[:, None], tokens, self.group).flatten(1)[None]
        if gates is not None:
            joined = getattr(self.layer, self.parts.gated)(joined, gates[None]).to(made.dtype)
        output: Tensor = getattr(self.layer, self.parts.back)(joined)[0]
        return output

    def standing(self) -> Standing:
        """The layer as its forward is to see it: own heads of what has been projected."""
        layer, parts = self.layer, self.parts
        convolution = getattr(layer, parts.convolves)
        weights = {
            name: None if whole is None else self._channels(whole)
            for name in ("weight", "bias")
            for whole in (getattr(convolution, name),)
        }
        own: dict[str, Any] = {parts.convolves: SimpleNamespace(**weights), parts.back: _same}
        own |= {name: self._part(getattr(layer, name)) for name in parts.vectors}
        own |= {name: getattr(layer, name) // self.ranks for name in parts.counts}
        if parts.gated:
            own |= {parts.groups: self.groups, parts.gated: _ungated}
            own["conv_dim"] = len(own[parts.convolves].weight)
            (name,) = parts.projections
            return Standing(layer, own | {name: _Projected(own["intermediate_size"])})
        start = 0
        for name, sizes in parts.projections.items():
            size = sum(sizes) // self.ranks
            own[name] = _Columns(start, start + size)
            start += size
        return Standing(layer, own)

    def _by_rank(self, run: Tensor, place: int) -> Tensor:
        """A run of columns `[tokens, size]` by who has which heads, `[tokens, ranks, part]`."""
        if place in self.parts.grouped:
            groups = getattr(self.layer, self.parts.groups)
            run = self._repeated(run.reshape(len(run), groups, -1), 1)
        return run.reshape(len(run), self.ranks, -1)

    def _repeated(self, groups: Tensor, dim: int) -> Tensor:
        """Groups along a dimension, each as often as ranks have heads of it."""
        missing = self.groups * self.ranks // groups.shape[dim]
        return groups if missing == 1 else groups.repeat_interleave(missing, dim)

    def _part(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.ranks)[dist.get_rank(self.group)]

    def _channels(self, whole: Tensor) -> Tensor:
        runs = list(torch.split(whole, list(self.parts.channels)))
        for place in self.parts.grouped:
            groups = getattr(self.layer, self.parts.groups)
            apart = runs[place].reshape(groups, -1, *whole.shape[1:])
            runs[place] = self._repeated(apart, 0).flatten(0, 1)
        return torch.cat([self._part(run) for run in runs])


@dataclass(frozen=True, slots=True)
class _Columns:
    """A projection of what has been projected: columns of it."""

    start: int
    stop: int

    def __call__(self, x: Tensor) -> Tensor:
        return x[..., self.start : self.stop]


@dataclass(frozen=True, slots=True)
class _Projected:
    """A projection of what has been projected, behind columns in the place of the gates."""

    gates: int

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., : self.gates], x], -1)


def _ungated(made: Tensor, gates: Tensor) -> Tensor:
    return made


def _same(x: Tensor) -> Tensor:
    return x
