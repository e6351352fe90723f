"""Turns of rollouts that draft: how many tokens each brings, and by what model it is drafted.

Of acceptance what is said, else what runs have measured, else an assumed one. Knows no seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlflow.graph.roles import Drafted
from rlflow.graph.user.speculative import Speculative
from rlflow.modelfiles.layouts.carrying import NOTHING
from rlflow.scheduler.costs.drafting import frozen_bytes
from rlflow.scheduler.costs.measurement_keys import accepted

if TYPE_CHECKING:
    from rlflow.graph.graph import Node
    from rlflow.scheduler.costs.lengths import Stage
    from rlflow.scheduler.costs.sizes import Sizes
    from rlflow.scheduler.models.shapes import Shape
    from rlflow.scheduler.plan.instance import Instance

# Leviathan et al. 2023 (arXiv:2211.17192), table 3, samples at temperature 1: LaMDA 137B that one
# of 2B drafts for (0.57 by 100M, 0.74 by 8B), and T5-XXL with bigrams in translation (0.16 in
# summaries).
BY_MODEL, BY_NGRAMS = 0.71, 0.19
# A language model that drafts, where its files are not here: so much of the policy (assumed).
SMALLER = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTurn:
    """`drafted` tokens of a row one after the other, `beams` at each place, and one policy pass.

    A token is accepted with probability `acceptance` where those before it were. Turns of more
    than so many live `rows` draft nothing.
    """

    drafted: int
    acceptance: float
    beams: int = 1
    how: str = "assumed"
    rows: float = math.inf

    @property
    def tokens(self) -> float:
        """Expected tokens of a row: 1 + a + ... + a^k (Leviathan et al. 2023, section 3.1)."""
        return float(sum(self.acceptance**place for place in range(self.drafted + 1)))

    @property
    def read(self) -> int:
        """Tokens of a row that the policy reads: what is drafted, and the one before it."""
        return 1 + self.drafted * self.beams

    def begins(self, found: Sequence[Stage]) -> int:
        """The number of the first stage of so few rows; of what is after all if there is none."""
        few = (number for number, stage in enumerate(found) if stage.live <= self.rows)
        return next(few, len(found))


def turn_of(node: Node, instance: Instance, sizes: Sizes) -> DraftTurn | None:
    """A turn of a node's rollout; None where nothing drafts, and on a CPU if nothing is said."""
    engine, said = instance.engine_plan, sizes.graph.acceptance
    own = node.role(Drafted)
    on_cpu = sizes.cluster.kind_of(instance.devices[0]).name == "cpu"
    drafted, beams = drafts_of(node, instance)
    if not beams or (on_cpu and said is None):
        return None
    options = engine.speculative
    by_ngrams = options is not None and options.algorithm == "NGRAM"
    assumed = BY_NGRAMS if by_ngrams else BY_MODEL
    turn = DraftTurn(
        drafted=drafted,
        acceptance=assumed if said is None else said,
        beams=beams,
        how="assumed" if said is None else "given",
        rows=math.inf if own is None or own.most is None else own.most,
    )
    if said is not None or not sizes.cluster.measured.records:
        return turn
    key = accepted(sizes.graph, node, instance, turn.drafted)
    record = sizes.cluster.measured.find(key, sizes.setting)
    if record is None:
        return turn
    return replace(turn, acceptance=record.accepted, how=record.source_for(sizes.setting))


def drafts_of(node: Node, instance: Instance) -> tuple[int, int]:
    """Tokens that a turn of a node's rollout drafts, and how many at each place; 0 where none."""
    engine, own = instance.engine_plan, node.role(Drafted)
    options = engine.speculative
    if not (engine.drafts if engine.own_process else own is not None):
        return 0, 0
    if options is not None:
        return options.draft_tokens, options.topk
    return engine.draft_tokens if engine.own_process or own is None else own.tokens, 1


def acceptance_of(share: float, drafted: int) -> float:
    """The acceptance `a` at which so large a share of all drafted tokens counts.

    `(a + ... + a^k) / k` of k, which grows with a: found by halving.
    """
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        reached = sum(middle**place for place in range(1, drafted + 1)) / drafted
        low, high = (middle, high) if reached < share else (low, middle)
    return (low + high) / 2


def drafting_shape(instance: Instance, policy: Shape, size: int) -> Shape | None:
    """What an engine's options draft with, cut from its policy; None for n-grams.

    Heads on hidden states are a dense layer and a head over the vocabulary (Li et al. 2024, section
    4.1). A smaller language model has the share of layers that its files have of the policy's
    bytes, numbers of `size` bytes.
    """
    said: Speculative | None = instance.engine_plan.speculative
    if said is None or said.algorithm == "NGRAM":
        return None
    head = policy.vocab * policy.hidden
    if said.algorithm != "STANDALONE":
        return _layers(policy, 1, head)
    held = frozen_bytes(instance) * instance.tp
    share = held / (policy.parameters * size) if held else SMALLER
    return _layers(policy, max(1, round(share * policy.layers)), round(share * policy.embedding))


def _layers(policy: Shape, layers: int, embedding: int) -> Shape:
    """So many layers of a policy as a model of its own: of experts those of one token."""
    each = max(policy.active - policy.embedding, 0) // policy.layers
    return replace(
        policy,
        parameters=embedding + layers * each,
        embedding=embedding,
        layers=layers,
        idle=0,
        experts=0,
        routers=0,
        chosen=0,
        routed=0,
        without_attention=0,
        convolved=0,
        recurrent=0,
        carrying=NOTHING,
        matrices=(),
    )
