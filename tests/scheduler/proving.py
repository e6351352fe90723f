"""What every compiled pipeline has to hold: the verifier accepts it, and notices each mutant."""

from __future__ import annotations

from rlflow.scheduler.compile import Compiled
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.verify.verify import verify
from tests.scheduler.mutants import mutants
from tests.scheduler.player import play


def holds_and_plays(compiled: Compiled) -> None:
    """The plan holds after every pass, and plays without a violation in whatever order."""
    for stage, plan in compiled.stages:
        assert [] == verify(plan, stage)
    for seed in range(6):
        assert [] == play(compiled.plan, seed)


def unnoticed(plan: Plan) -> list[str]:
    """The mutants of a finished plan that the verifier accepts."""
    return [name for name, wrong in mutants(plan) if not verify(wrong, "timing")]
