"""Seconds of a model's vision tower on a rank, which each picture of a prompt passes once.

A backward of a trained part takes twice its forward; a frozen tower has none. Knows widths and
rates; neither rows nor a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlflow.scheduler.costs.lengths import Load
from rlflow.scheduler.costs.ranks.head_seconds import HeadSeconds
from rlflow.scheduler.costs.ranks.operators import LAYER
from rlflow.scheduler.models.flops import TRAINED_FORWARDS


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSeconds(HeadSeconds):
    """Seconds of the tower of a model on its ranks; what they are and hold, `RankMemory` says."""

    def seen(self, load: Load, passes: int = 1, *, learning: bool = False) -> float:
        """Seconds in which the pictures of all prompts pass the tower, in so many passes.

        No less than the launches of its layers, as many as the language model's.
        """
        tower, pictures = self.shape.eyes, load.pictures
        if tower is None or pictures is None or not pictures.mean:
            return 0.0
        prompts = load.prompts / self.cp.ranks
        tokens, squares = (prompts * each for each in (pictures.mean, pictures.squares))
        if tower.joined:
            squares = tokens**2 / passes
        vision, projector = tower.forward(tokens, squares)
        trained = {part: learning and self.shape.trains(part) for part in ("vision", "projector")}
        if trained["vision"]:
            vision *= TRAINED_FORWARDS
        if trained["vision"] or trained["projector"]:
            projector *= TRAINED_FORWARDS
        computed = (vision + projector) / (self.kind.rate(self.size) * self.kind.sustained)
        if self.on_cpu:
            return computed
        operators = LAYER[0] + (LAYER[1] if trained["vision"] else 0)
        return max(computed, passes * tower.layers * operators * self.kind.launch)
