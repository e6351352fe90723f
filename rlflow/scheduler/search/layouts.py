"""Layouts that `tune` tries: how a role's ranks share its model, and other ways to train in one.

Knows options and counts; neither devices nor seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlflow.graph.placement import Recompute
from rlflow.modelfiles.layouts.contexts import context_finding
from rlflow.modelfiles.layouts.stages import staging_finding
from rlflow.scheduler.models.mixtures import apart_on
from rlflow.scheduler.models.shapes import Shape

TENSOR_PARALLEL = (1, 2, 4, 8)
# Of engines in processes of their own, which repeat key-value heads and share layers over hosts.
ENGINE_PARALLEL = (*TENSOR_PARALLEL, 16, 32)
CONTEXT_PARALLEL = (2, 4, 8)
PIPELINE_PARALLEL = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """How a role's ranks share its model; `own` is a rollout's copy where it could share.

    `engine` describes the one that generates in a process of its own; empty for the embedded one.
    Of training all layers may be computed again, or all but attention where that is `selective`;
    layers `kept_whole` from forward to backward, and the optimizer's state `hosted`.
    """

    fsdp: int = 1
    tp: int = 1
    recompute: bool = False
    offload: bool = False
    own: bool = False
    engine: str = ""
    selective: bool = False
    kept_whole: bool = False
    hosted: bool = False
    ep: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Ranks that share parameters, each layer, experts and tokens of rows; and stages."""
        return self.fsdp, self.tp, self.ep, self.cp, self.pp

    @property
    def whole_rows(self) -> bool:
        """Whether a rank has rows whole, in all layers, as rollouts want them."""
        return self.cp == self.pp == 1

    @property
    def recomputes(self) -> Recompute:
        """What is computed again; whatever does not fit otherwise where that is False."""
        return "selective" if self.selective else self.recompute

    def describe(self) -> str:
        """The printed form."""
        apart = f" ep={self.ep}" if self.ep > 1 else ""
        apart += f" cp={self.cp}" if self.cp > 1 else ""
        stages = f"pp={self.pp} " if self.pp > 1 else ""
        sizes = f"{stages}fsdp={self.fsdp}{apart} tp={self.tp}"
        said = {
            "recompute": self.recompute,
            "recompute=selective": self.selective,
            "reshard_after_forward=False": self.kept_whole,
            "offload=layers": self.offload,
            "offload=optimizer": self.hosted,
            "own": self.own,
        }
        said |= {self.engine: True} if self.engine else {}
        return " ".join([sizes, *(word for word, holds in said.items() if holds)])


def ways_to_train(layout: Layout, *, on_host: bool) -> Iterator[Layout]:
    """Other ways to train in a layout: what is recomputed, kept whole, and where the state lies.

    A number of layers is none of them: where an update does not fit the compiler finds the fewest.
    Nor are layers kept whole where memory is made beside: all weights, for one all-gather less.
    Devices whose memory is the host's, `on_host`, have no state to send there.
    """
    if layout.fsdp > 1:
        yield replace(layout, kept_whole=True)
    for hosted in (False,) if on_host else (False, True):
        if hosted:
            yield replace(layout, hosted=True)
        yield replace(layout, hosted=hosted, selective=True)
        yield replace(layout, hosted=hosted, recompute=True)


def contexts_on(shape: Shape | None, ranks: int, tp: int, host: int) -> Iterator[int]:
    """Numbers of ranks of a `host` that tokens of rows may lie apart on, each `tp` ranks."""
    for cp in CONTEXT_PARALLEL:
        if shape is None or ranks % cp or cp > host:
            continue
        how = shape.family, shape.heads, cp, tp
        if context_finding("", *how, windows=shape.windows, carrying=shape.carrying) is None:
            yield cp


def stages_on(shape: Shape | None, count: int, tp: int, host: int) -> Iterator[Layout]:
    """Layouts of `count` devices in stages, each on whole hosts of `host` devices.

    Ranks of a stage share it. Experts lie apart on those of a host, or on all of them.
    """
    for pp in PIPELINE_PARALLEL:
        each = count // pp
        if shape is None or count % pp or each % host or each % tp:
            continue
        if staging_finding("", shape.family, shape.layers, pp) is not None:
            continue
        fsdp = each // tp
        eps = list(apart_on(shape, fsdp, tp, max(1, host // tp)))
        yield from (Layout(fsdp, tp, ep=ep, pp=pp) for ep in dict.fromkeys((*eps[:1], *eps[-1:])))
        if not eps:
            yield Layout(fsdp, tp, pp=pp)
