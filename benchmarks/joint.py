"""How far order and residency together are from the best there is, where memory is short.

    python benchmarks/joint.py

Draws iterations of reinforcement learning on one or two pools (3 to 6 actions, staleness 0 or 1)
with memory for less than all of their parts, plans them as `rlflow plan` does, and lets CP-SAT
find the shortest period of any order and any residency (`joint_exact.py`, which shares nothing
with the passes). The target is a mean gap of at most 1 %, and no bytes moved where another order
of that period moves none. Needs `rlflow-engine[optimize]`; writes benchmarks/results/joint.json
and .md.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

from common import say
from gaps import asked, rows_of, told
from joint_exact import Job, Part, Turn, shortest

import rlflow as rf
from rlflow.graph.graph import Graph
from rlflow.scheduler.passes.order import chain, order, timing
from rlflow.scheduler.passes.residency import residency
from rlflow.scheduler.plan import plan as planned
from rlflow.scheduler.plan.plan import HOST, Action, Cost, Dep, Instance, Plan, Reason

MEAN_TARGET = 0.01
UNIT = 1e-3
CLOSE = 1e-3
ROUNDING = 1e-6
HEADER = (
    "pools, staleness", "instances", "proven", "mean gap", "worst", "at the optimum",
    "moved", "moved at the optimum", "needless", "plan ms",
    "solver s",
)  # fmt: skip
NOTES = (
    "A gap is the period planned over the shortest of any order with any residency, less 1: over "
    "the least that the solver has not excluded where its time was up before a proof. Periods are "
    "compared in whole thousandths of a second. At the optimum: within 0.1 % of it.",
    "Moved: instances in which bytes move, as planned and at the optimum. Needless: those in which "
    "bytes move and the optimum, no longer, moves none.",
    "An instance: rollout, forwards of up to two frozen models or, in half of them, a critic that "
    "is trained, an update and, four of five, a rollout's own weights, which a reshard fills. "
    "Times, sizes and budgets are drawn; a budget is what the largest action needs and up to 0.6 "
    "of what else there is.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """One instance: periods in seconds as planned, and the shortest there is.

    Bytes a turn as planned and at the optimum, and how long both took.
    """

    kind: str
    jobs: int
    parts: int
    period: float
    optimum: float
    proven: bool
    moved: int
    fewest: int | None
    planning: float
    solving: float

    @property
    def gap(self) -> float:
        """By what part of the optimum the period is longer."""
        return self.period / self.optimum - 1

    @property
    def needless(self) -> bool:
        """Whether bytes move where a period as short moves none."""
        return self.moved > 0 and self.fewest == 0 and self.gap > -CLOSE


def main() -> None:
    """Solve them all, print the table, write the results."""
    options = asked("The gap to the joint optimum.", instances=50, seconds=20.0)
    solved: list[Solved] = []
    for pools in (1, 2):
        for staleness in (0, 1):
            say(f"{pools} pools, staleness {staleness}")
            kind = f"{pools}, {staleness}"
            for number in range(options.instances):
                turn = drawn(Random(f"{kind} {number}"), pools, staleness)
                solved.append(solve(kind, turn, options.seconds))
    told(
        options,
        "joint",
        "Order and residency against the joint optimum",
        solved,
        header=HEADER,
        rows=rows_of(solved, lambda one: one.kind, row),
        verdict=verdict_of(solved),
        notes=NOTES,
    )


def verdict_of(solved: Sequence[Solved]) -> str:
    """The gaps and the bytes moved for nothing, and whether they are on target."""
    gaps = [one.gap for one in solved]
    mean, needless = statistics.fmean(gaps), sum(one.needless for one in solved)
    met = mean <= MEAN_TARGET and not needless
    return (
        f"{len(solved)} instances, {sum(not one.proven for one in solved)} of them not proven: "
        f"mean gap {mean:.3%} (target {MEAN_TARGET:.0%}), worst {max(gaps):.2%}; bytes moved for "
        f"nothing in {needless} (target 0): {'met' if met else 'NOT MET'}."
    )


def solve(kind: str, turn: Turn, seconds: float) -> Solved:
    """Plan a turn, and find the best there is."""
    plan, context = plan_of(turn), context_of(turn)
    ordered = order(plan, context)
    began = time.process_time()
    made = finished(ordered, context)
    between = time.process_time()
    answer = shortest(turn, math.ceil(made.timing.period / UNIT - ROUNDING), seconds)
    return Solved(
        kind=kind,
        jobs=len(turn.jobs),
        parts=len(turn.parts),
        period=made.timing.period,
        optimum=min(answer.bound * UNIT, made.timing.period),
        proven=answer.bound == answer.period,
        moved=moved(made),
        fewest=answer.moved,
        planning=between - began,
        solving=time.process_time() - between,
    )


def moved(plan: Plan) -> int:
    """Bytes that sleeps and wakes move in a turn."""
    return sum(a.cost.moved or 0 for a in plan.actions if a.part is not None)


def finished(plan: Plan, context: Any) -> Any:
    """The plan after the passes that follow its order."""
    for run in (residency, chain, timing):
        plan = run(plan, context)
    return plan


def row(name: str, group: Sequence[Solved]) -> tuple[str, ...]:
    """The figures of some instances."""
    gaps = [one.gap for one in group]
    return (
        name,
        str(len(group)),
        str(sum(one.proven for one in group)),
        f"{statistics.fmean(gaps):.3%}",
        f"{max(gaps):.2%}",
        f"{sum(gap <= CLOSE for gap in gaps) / len(group):.1%}",
        str(sum(one.moved > 0 for one in group)),
        str(sum(bool(one.fewest) for one in group)),
        str(sum(one.needless for one in group)),
        f"{statistics.median(one.planning for one in group) * 1e3:.0f}",
        f"{statistics.median(one.solving for one in group):.1f}",
    )


def drawn(random: Random, pools: int, staleness: int) -> Turn:
    """An iteration that has less memory than all parts take."""
    while True:
        turn = iteration(random, pools, staleness)
        for device, budget in turn.budgets.items():
            if budget < sum(part.size for part in turn.parts if device in part.devices):
                return turn


def iteration(random: Random, pools: int, staleness: int) -> Turn:
    """An iteration of PPO or GRPO on pools that are drawn."""
    made = Draft(random, pools)
    train = made.pool()
    actor = made.model("actor", train, trained=True)
    own = random.random() < 0.8
    gen = made.pool() if own else train
    sampler = [made.part("sampler", random.choice((6, 8)), gen)] if own else actor[:1]
    rollout = made.job("rollout", 300, gen, sampler, random.randint(0, 6))
    advantage = made.job("advantage", 5, (), (), 0)
    judged = random.random() < 0.5
    for n in range(0 if judged else random.randint(0, 2)):
        at = made.pool()
        forward = made.job(f"forward{n}", 90, at, made.model(f"ref{n}", at), random.randint(0, 6))
        made.waits += [(rollout, forward, 0), (forward, advantage, 0)]
    update = made.job("update", 200, train, actor, random.randint(0, 6))
    made.waits += [(rollout, advantage, 0), (advantage, update, 0), (update, update, 1)]
    if own:
        devices = tuple(sorted({*gen, *train}))
        needs = [actor[0], sampler[0]]
        reshard = made.job("reshard", 40, devices, needs, 1, makes=("sampler",))
        made.waits += [(update, reshard, 0), (reshard, update, 1)]
        made.waits += [(reshard, rollout, 1 + staleness), (rollout, reshard, -staleness)]
    else:
        made.waits += [(update, rollout, 1 + staleness), (rollout, update, -staleness)]
    if judged:
        at = made.pool()
        critic = made.model("critic", at, trained=True)
        values = made.job("values", 90, at, critic[:1], random.randint(0, 6))
        learn = made.job("critic update", 200, at, critic, random.randint(0, 6))
        made.waits += [(rollout, values, 0), (values, advantage, 0)]
        made.waits += [(advantage, learn, 0), (learn, values, 1)]
    return made.turn()


class Draft:
    """A turn being drawn."""

    def __init__(self, random: Random, pools: int) -> None:
        self.random = random
        self.pools = pools
        self.rate = random.randint(2, 12)
        self.jobs: list[Job] = []
        self.parts: list[Part] = []
        self.waits: list[tuple[int, int, int]] = []

    def pool(self) -> tuple[int, ...]:
        """One of the pools, a device each."""
        return (self.random.randrange(self.pools),)

    def part(self, name: str, size: int, devices: tuple[int, ...], **more: bool) -> str:
        """Add a part."""
        copy = size * self.rate
        self.parts.append(Part(name=name, size=size, devices=devices, copy=copy, **more))
        return name

    def model(self, name: str, at: tuple[int, ...], *, trained: bool = False) -> list[str]:
        """The parts of a model."""
        size = self.random.choice((4, 6, 8))
        parts = [self.part(name, size, at)]
        if trained:
            parts.append(self.part(f"{name}_gradients", size, at, thrown_away=True))
            parts.append(self.part(f"{name}_optimizer", 2 * size, at))
        return parts

    def job(
        self,
        name: str,
        scale: int,
        devices: tuple[int, ...],
        needs: Sequence[str],
        transient: int,
        makes: tuple[str, ...] = (),
    ) -> int:
        """Add a job of about `scale` units; its number."""
        time = max(round(scale * self.random.lognormvariate(0, 0.5)), 1)
        self.jobs.append(
            Job(
                name=name,
                time=time,
                devices=devices,
                needs=tuple(needs),
                makes=makes,
                transient=transient,
                on_host=not devices,
            )
        )
        return len(self.jobs) - 1

    def turn(self) -> Turn:
        """What was drawn, with budgets."""
        size = {part.name: part.size for part in self.parts}
        budgets = {}
        for device in range(self.pools):
            here = {part.name for part in self.parts if device in part.devices}
            needed = [
                sum(size[name] for name in here.intersection(job.needs)) + job.transient
                for job in self.jobs
                if device in job.devices
            ]
            least, most = max(needed, default=0), sum(size[name] for name in here)
            share = self.random.choice((0.0, 0.0, 0.1, 0.2, 0.4, 0.6))
            budgets[device] = least + round(share * max(most - least, 0))
        return Turn(
            jobs=tuple(self.jobs),
            waits=tuple(self.waits),
            parts=tuple(self.parts),
            budgets=budgets,
        )


def context_of(turn: Turn) -> Any:
    """What the passes look up: the cost of a copy."""
    rate = turn.parts[0].copy / turn.parts[0].size * UNIT

    def copy(moved: int, devices: tuple[int, ...], kind: str) -> Cost:
        return Cost(seconds=moved / len(devices) * rate, moved=moved)

    return SimpleNamespace(optimize=0.0, rough=False, costs=SimpleNamespace(copy=copy))


def plan_of(turn: Turn) -> Plan:
    """The turn as a plan before its order is known; every part is an instance of its own."""
    after: list[list[Dep]] = [[] for _ in turn.jobs]
    for source, target, distance in turn.waits:
        dep = Dep(action=turn.jobs[source].name, distance=distance, kind="order")
        after[target].append(dep)
    actions = [
        Action(
            id=job.name,
            kind="run",
            reason=Reason(rule="drawn", text="drawn"),
            devices=job.devices or (HOST,),
            pool="pool",
            needs=job.needs,
            targets=job.makes,
            after=tuple(deps),
            cost=Cost(seconds=job.time * UNIT, transient=job.transient),
        )
        for job, deps in zip(turn.jobs, after, strict=True)
    ]
    parts = tuple(
        planned.Part(
            name=part.name,
            instance=part.name,
            kind="gradients" if part.thrown_away else "weights",
            size=part.size,
            devices=part.devices,
        )
        for part in turn.parts
    )
    return Plan(
        graph=Graph(
            name="drawn",
            nodes=(),
            models=tuple(rf.Model(part.name, "nowhere") for part in turn.parts),
        ),
        placement="drawn",
        cluster="drawn",
        budgets={HOST: 10**9, **turn.budgets},
        backend="ray",
        staleness=0,
        pools={"pool": tuple(turn.budgets)},
        instances=tuple(
            Instance(
                name=part.name,
                model=part.name,
                pool="pool",
                devices=part.devices,
                uses=(),
                trained=False,
            )
            for part in turn.parts
        ),
        parts=parts,
        actions=tuple(actions),
    )


if __name__ == "__main__":
    main()
