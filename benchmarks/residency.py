"""Bytes that sleeps and wakes move, and what they cost of an iteration.

    python benchmarks/residency.py

Random cyclic traces, of equal and of unequal parts: what the planner moves, what demand-driven
LRU moves, and the fewest bytes there are (CP-SAT, proven). Then PPO and GRPO of a 7B model on
tight memory: bytes, and the seconds that copies add to an iteration with and without prefetch.
The targets: never above LRU, and the fewest where sizes are equal. Needs
`rlflow-engine[optimize]`; writes benchmarks/results/residency.json and .md.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from random import Random

from common import (
    RESULTS,
    ROOT,
    machine,
    markdown_report,
    markdown_table,
    say,
    text_table,
    write_results,
)
from ortools.sat.python import cp_model

import rlflow as rf
from rlflow.cli.commands import Declared, Target, declare, plan_declared
from rlflow.scheduler.context import Context
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.memory.demand import demand_of
from rlflow.scheduler.memory.eviction import choose_residents, lru
from rlflow.scheduler.memory.intervals import Gap, Ring, Trace
from rlflow.scheduler.memory.prefetch import placed, whole_gap
from rlflow.scheduler.memory.profile import Memories
from rlflow.scheduler.passes.order import chain, timing
from rlflow.scheduler.passes.sleep_wake import with_moves
from rlflow.scheduler.plan.plan import Plan

TRACES = ("trace", "traces", "moved / fewest", "worst", "at the fewest", "LRU / fewest",
          "above LRU", "ms")  # fmt: skip
PLANS = ("plan", "memory", "GB moved", "by LRU", "fewest", "iteration", "stall", "no prefetch")
NOTES = (
    "A trace is 6 to 40 actions on one memory, each with up to two of 3 to 12 parts and a need of "
    "its own; a fifth of the gaps end in parts that are made anew and move nothing.",
    "Fewest: the optimum of the offline problem, proven by CP-SAT. Ratios are of sums of bytes.",
    "Stall: seconds by which the estimated iteration is longer than with memory for everything. "
    "No prefetch: the same where every copy is waited for and runs alone on its devices.",
    "Plans: a 7B model (qwen2.5-7b, bfloat16) in every role, on devices of the memory named. "
    "Seconds are the cost model's.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paged:
    """One trace: bytes moved a turn, and CPU seconds to choose."""

    kind: str
    gaps: int
    moved: int
    lru: int
    fewest: int
    proven: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressed:
    """One plan: bytes moved an iteration, and seconds of an iteration."""

    name: str
    memory: float
    moved: int
    lru: int
    fewest: int
    roomy: float
    period: float
    waiting: float


def main() -> None:
    """Choose for all traces and plans, print the tables, write the results."""
    parser = argparse.ArgumentParser(description="Bytes moved and seconds stalled.")
    parser.add_argument("--traces", type=int, default=150, help="of each kind")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    facts = machine()
    paged = []
    for kind in ("equal", "unequal"):
        say(f"{options.traces} traces, {kind}")
        paged += [solve(kind, Random(f"{kind} {n}")) for n in range(options.traces)]
    say("plans")
    pressed = [found for name in CASES for found in plans(name)]
    rows, plan_rows = table(paged), [plan_row(one) for one in pressed]
    print(text_table(TRACES, rows))
    print(text_table(PLANS, plan_rows))
    above = sum(one.moved > one.lru for one in (*paged, *pressed))
    equal = [one for one in paged if one.kind == "equal"]
    short = sum(one.moved > one.fewest for one in equal)
    met = not above and not short
    verdict = (
        f"Above LRU: {above} of {len(paged) + len(pressed)}. Above the fewest where sizes are "
        f"equal: {short} of {len(equal)}. {'Met' if met else 'NOT MET'}."
    )
    print(verdict)
    if not options.no_write:
        parts = [verdict, markdown_table(TRACES, rows), markdown_table(PLANS, plan_rows)]
        page = markdown_report("Residency: bytes moved, seconds stalled", facts, parts, NOTES)
        data = {
            "machine": facts,
            "traces": [asdict(one) for one in paged],
            "plans": [asdict(one) for one in pressed],
        }
        write_results(RESULTS, "residency", data, page)


def solve(kind: str, random: Random) -> Paged:
    """Draw a trace, choose what stays, and find the fewest bytes."""
    trace = drawn(random, equal=kind == "equal")
    began = time.process_time()
    choice = choose_residents(trace)
    seconds = time.process_time() - began
    return Paged(
        kind=kind,
        gaps=len(trace.gaps),
        moved=trace.moved(choice.stay),
        lru=trace.moved(lru(trace)),
        fewest=fewest(trace),
        proven=choice.proven,
        seconds=seconds,
    )


def drawn(random: Random, *, equal: bool) -> Trace:
    """A trace on one memory, each action of which fits."""
    count, length = random.randint(3, 12), random.randint(6, 40)
    sizes = [100 if equal else random.randint(20, 400) for _ in range(count)]
    needs = [random.sample(range(count), random.randint(0, 2)) for _ in range(length)]
    extra = [random.choice((0, 0, 50, 150, 300)) for _ in needs]
    held = sum(sizes[part] for part in {part for need in needs for part in need})
    alone = max(sum(sizes[p] for p in n) + e for n, e in zip(needs, extra, strict=True))
    budget = alone + round(random.random() * max(held + max(extra) - alone, 0))
    rooms = tuple(budget - e - sum(sizes[p] for p in n) for n, e in zip(needs, extra, strict=True))
    gaps = []
    for part, size in enumerate(sizes):
        places = [place for place, need in enumerate(needs) if part in need]
        for since, until in zip(places, [*places[1:], *places[:1]], strict=True):
            between = (until - since - 1) % length
            cost = 0 if random.random() < 0.2 else 2 * size
            rows = tuple((0, (since + 1 + n) % length) for n in range(between))
            gaps.append(Gap(size=size, cost=cost, since=since, until=until, rings=(0,), rows=rows))
    ring = Ring(rooms=rooms, places=tuple(range(length)), spare=budget - held)
    return Trace(length=length, rings=(ring,), gaps=tuple(gaps))


def fewest(trace: Trace) -> int:
    """The least that any choice moves, proven by CP-SAT."""
    model = cp_model.CpModel()
    stays = [model.new_bool_var(f"stays{number}") for number in range(len(trace.gaps))]
    for row, held in trace.tight.items():
        model.add(sum(trace.gaps[n].size * stays[n] for n in held) <= trace.room(row))
    model.maximize(sum(gap.cost * stay for gap, stay in zip(trace.gaps, stays, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    if solver.solve(model) != cp_model.OPTIMAL:
        raise SystemExit("CP-SAT proved no optimum")
    return sum(gap.cost for gap in trace.gaps) - round(solver.objective_value)


CASES = {
    "PPO, colocated": ("ppo_arithmetic.py", {"*": rf.on("all")}),
    "GRPO, rollout of its own": (
        "grpo_arithmetic.py",
        {"*": rf.on("all"), "actor.rollout": rf.on("all", tp=2, weights="own")},
    ),
    "PPO, sharded 8": ("ppo_arithmetic.py", {"*": rf.on("all")}),
    "GRPO of long answers": ("grpo_gsm8k.py", {"*": rf.on("all")}),
}
DEVICES = {
    "PPO, colocated": 1,
    "GRPO, rollout of its own": 2,
    "PPO, sharded 8": 8,
    "GRPO of long answers": 8,
}


SETTINGS = {
    "GRPO of long answers": (
        "kl_coef=0.05",
        "prompts_per_iteration=8",
        "group_size=4",
        "eval_limit=16",
    )
}


def plans(name: str) -> list[Pressed]:
    """A pipeline with plenty of memory, and with less and less of it."""
    file, assign = CASES[name]
    count = DEVICES[name]
    settings = SETTINGS.get(name, ("kl_coef=0.05", "prompts_per_iteration=64"))
    shape = "qwen2.5-7b"
    target = Target(pipeline=str(ROOT / "pipelines" / file), settings=settings, model_shape=shape)
    declared = declare(target)
    graph = replace(
        declared.graph,
        models=tuple(m.model_copy(update={"dtype": "bfloat16"}) for m in declared.graph.models),
    )
    placement = rf.Placement(pools={"all": count}, assign=assign)
    pipeline = replace(declared.pipeline, placements={"bench": placement})
    declared = replace(declared, pipeline=pipeline, graph=graph)
    target = replace(target, placement="bench")
    roomy = planned(declared, target, 4000.0)
    most = max(size for device, size in roomy.peaks.items() if device >= 0)
    alone = max(
        (a.cost.transient or 0) + sum(roomy.part(need).size or 0 for need in a.needs)
        for a in roomy.actions
    )
    found = []
    for share in (0.02, 0.2, 0.5, 0.8):
        memory = (alone + share * (most - alone)) / 1e9
        found.append(pressed(name, declared, target, memory, roomy))
    return found


def planned(declared: Declared, target: Target, memory: float) -> Plan:
    """The plan for devices of so many GB."""
    count = declared.pipeline.placements["bench"].num_devices()
    cluster = parse_cluster(f"h100:{count}@{memory:.3f}GB", count)
    return plan_declared(declared, target, cluster).compiled.plan


def pressed(name: str, declared: Declared, target: Target, memory: float, roomy: Plan) -> Pressed:
    """The figures of a plan, and of the same choice where copies are waited for."""
    plan = planned(declared, target, memory)
    bare = without_moves(plan)
    traced = demand_of(bare, Memories(plan=bare)).traced()
    choice = choose_residents(traced.trace)
    naps = [
        whole_gap(traced.trace, number)
        for number in range(len(traced.trace.gaps))
        if number not in choice.stay
    ]
    context = _context(declared, target, memory)
    waited = with_moves(bare, traced, placed(traced.trace, naps), context)
    alone = replace(waited, actions=tuple(replace(a, kind="run") for a in waited.actions))
    timed = [timing(chain(made, context), context).timing for made in (without_moves(roomy), alone)]
    return Pressed(
        name=name,
        memory=memory,
        moved=traced.trace.moved(choice.stay),
        lru=traced.trace.moved(lru(traced.trace)),
        fewest=fewest(traced.trace),
        roomy=timed[0].period,
        period=plan.timing.period,
        waiting=timed[1].period,
    )


def without_moves(plan: Plan) -> Plan:
    """The plan as it was before `residency`."""
    moves = {a.id for a in plan.actions if a.part is not None}
    actions = [
        replace(a, after=tuple(d for d in a.after if d.kind != "device" and d.action not in moves))
        for a in plan.actions
        if a.id not in moves
    ]
    return replace(plan, actions=tuple(actions), timing=None)


def _context(declared: Declared, target: Target, memory: float) -> Context:
    from rlflow.cli.commands import costs_of

    count = declared.pipeline.placements["bench"].num_devices()
    cluster = parse_cluster(f"h100:{count}@{memory:.3f}GB", count)
    made = plan_declared(declared, target, cluster)
    costs: Costs = costs_of(made)
    placement = declared.pipeline.placements["bench"]
    return Context(placement=placement, cluster=cluster, costs=costs)


def table(paged: Sequence[Paged]) -> list[tuple[str, ...]]:
    """A row for each kind of trace."""
    kinds = dict.fromkeys(one.kind for one in paged)
    return [row(kind, [one for one in paged if one.kind == kind]) for kind in kinds]


def row(name: str, group: Sequence[Paged]) -> tuple[str, ...]:
    """The figures of some traces."""
    least = sum(one.fewest for one in group)
    return (
        name,
        str(len(group)),
        f"{sum(one.moved for one in group) / least:.4f}",
        f"{max(one.moved / one.fewest if one.fewest else 1.0 for one in group):.4f}",
        f"{sum(one.moved == one.fewest for one in group) / len(group):.1%}",
        f"{sum(one.lru for one in group) / least:.3f}",
        str(sum(one.moved > one.lru for one in group)),
        f"{statistics.median(one.seconds for one in group) * 1e3:.1f}",
    )


def plan_row(one: Pressed) -> tuple[str, ...]:
    """The figures of a plan."""
    return (
        one.name,
        f"{one.memory:.1f} GB",
        *(f"{size / 1e9:.1f}" for size in (one.moved, one.lru, one.fewest)),
        f"{one.period:.2f} s",
        f"{one.period - one.roomy:.2f} s",
        f"{one.waiting - one.roomy:.2f} s",
    )


if __name__ == "__main__":
    main()
