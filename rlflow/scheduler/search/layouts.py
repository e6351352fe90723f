"""Layouts that `tune` tries: how a role's ranks share its model, and other ways to train in one.

Knows options and counts; neither devices nor seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlflow.graph.placement import Recompute
from rlflow.modelfiles.layouts.contexts import context_finding
from rlflow.scheduler.models.shapes import Shape

CONTEXT_PARALLEL = (2, 4, 8)


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

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Ranks that share the parameters, each layer, the experts, and the tokens of rows."""
        return self.fsdp, self.tp, self.ep, self.cp

    @property
    def recomputes(self) -> Recompute:
        """What is computed again; whatever does not fit otherwise where that is False."""
        return "selective" if self.selective else self.recompute

    def describe(self) -> str:
        """The printed form."""
        apart = f" ep={self.ep}" if self.ep > 1 else ""
        apart += f" cp={self.cp}" if self.cp > 1 else ""
        sizes = f"fsdp={self.fsdp}{apart} tp={self.tp}"
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
