"""Passes `order`, `chain` and `timing`: the plan as a periodic schedule.

`order` finds the shortest period it can: the order of actions within a turn, and by how many
iterations each runs ahead. `chain` writes the order on every device as dependencies, so that an
executor decides nothing. `timing` states how long a period of the finished plan takes, what
bounds it, and which actions have slack. `rlflow.scheduler.periodic` finds and measures schedules
of abstract tasks; this file translates actions into tasks and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rlflow.scheduler.context import Context
from rlflow.scheduler.periodic.cycles import slack_of
from rlflow.scheduler.periodic.differing import period_of_turns
from rlflow.scheduler.periodic.exact import optimise
from rlflow.scheduler.periodic.fit import ROUGH_WORK, WORK
from rlflow.scheduler.periodic.problem import (
    Kernel,
    Precedence,
    Problem,
    Resource,
    Task,
    Timed,
    timed_kernel,
    turn_arcs,
)
from rlflow.scheduler.periodic.search import search
from rlflow.scheduler.plan.plan import Action, Dep, Plan, Timing
from rlflow.scheduler.plan.text import device_name

UNKNOWN_SECONDS = 1.0
ALIKE = 1 + 1e-6
TOLD = 0.01


def seconds_of(action: Action) -> float:
    """Estimated seconds per iteration: an action every n iterations counts an nth.

    One that runs with a chance counts as much of it.
    """
    seconds = action.cost.seconds
    return (UNKNOWN_SECONDS if seconds is None else seconds) * action.chance / action.every


def order(plan: Plan, context: Context) -> Plan:
    """Put the actions in the order of a turn, some ahead, with distances counted in turns.

    Raises PlanError (E404) where an action waits for itself; UsageError (E230) where an exact
    order is asked for and its solver is missing.
    """
    if not plan.actions:
        return plan
    problem = periodic_problem(plan)
    found = search(problem, ROUGH_WORK if context.rough else WORK)
    timed = found.timed
    if context.optimize > 0:
        optimum = optimise(problem, context.optimize, start=timed)
        gained = found.timed.period / optimum.timed.period - 1
        share = optimum.timed.period / optimum.bound - 1
        how = "proven optimal" if optimum.proven else f"within {share:.1%} of the optimum"
        text = f"period {optimum.timed.period:.6g} s, {how}"
        text += f", {gained:.1%} better than without" if gained > 1e-5 else ""
        plan, timed = plan.noting("optimised order", text), optimum.timed
    elif found.gap > TOLD and not context.rough:
        text = (
            f"at most {found.gap:.1%} longer than the shortest there is; --optimize 3 looks further"
        )
        plan = plan.noting("order", f"without copies, an iteration is {text}")
    return replace(plan, actions=in_turns(plan.actions, timed.kernel))


def in_turns(actions: Sequence[Action], kernel: Kernel) -> tuple[Action, ...]:
    """The actions in the kernel's order, their distances, of iterations before, in turns."""
    ahead = {action.id: turns for action, turns in zip(actions, kernel.ahead, strict=True)}
    result = []
    for action in (actions[task] for task in kernel.order):
        mine = ahead[action.id]
        after = tuple(
            dep if ahead[dep.action] == mine else _moved(dep, ahead[dep.action] - mine)
            for dep in action.after
        )
        result.append(replace(action, ahead=mine, after=after))
    return tuple(result)


def _moved(dep: Dep, turns: int) -> Dep:
    return replace(dep, distance=dep.distance + turns)


def periodic_problem(plan: Plan, kinds: Sequence[str] = ("data", "weights", "order")) -> Problem:
    """The actions as tasks, and their dependencies of some kinds as edges."""
    place = {action.id: index for index, action in enumerate(plan.actions)}
    tasks = tuple(
        Task(name=action.id, seconds=seconds_of(action), resources=frozenset(resources))
        for action, resources in zip(plan.actions, resources_of(plan.actions), strict=True)
    )
    edges = tuple(
        Precedence(place[dep.action], index, dep.distance)
        for index, action in enumerate(plan.actions)
        for dep in action.after
        if dep.kind in kinds
    )
    return Problem(tasks=tasks, edges=edges)


def resources_of(actions: Sequence[Action]) -> list[tuple[Resource, ...]]:
    """The lanes that each action occupies: (device, lane), the first of those used alike.

    Devices that the same actions occupy stand in one queue, and one of them stands for all.
    """
    sets = {(action.devices, action.lane): number for number, action in enumerate(actions)}
    users: dict[Resource, list[int]] = {}
    for (devices, lane), number in sets.items():
        for device in devices:
            users.setdefault((device, lane), []).append(number)
    found: dict[int, list[Resource]] = {number: [] for number in sets.values()}
    alike: dict[tuple[int, ...], Resource] = {}
    for resource in sorted(users):
        alike.setdefault(tuple(users[resource]), resource)
    for numbers, resource in alike.items():
        for number in numbers:
            found[number].append(resource)
    return [tuple(found[sets[action.devices, action.lane]]) for action in actions]


def chain(plan: Plan, context: Context) -> Plan:
    """Write each lane's order as dependencies: the action before, and last turn's last one."""
    last: dict[Resource, str] = {}
    first: dict[Resource, str] = {}
    extra: dict[str, list[Dep]] = {action.id: [] for action in plan.actions}
    for action, resources in zip(plan.actions, resources_of(plan.actions), strict=True):
        for resource in resources:
            if resource in last:
                extra[action.id].append(Dep(action=last[resource], distance=0, kind="device"))
            first.setdefault(resource, action.id)
            last[resource] = action.id
    for resource, name in first.items():
        extra[name].append(Dep(action=last[resource], distance=1, kind="device"))
    return replace(plan, actions=tuple(_with_deps(a, extra[a.id]) for a in plan.actions))


def _with_deps(action: Action, extra: Sequence[Dep]) -> Action:
    """Add the dependencies that do not repeat one the action already has."""
    known = {(dep.action, dep.distance) for dep in action.after}
    added = []
    for dep in extra:
        if (dep.action, dep.distance) not in known:
            known.add((dep.action, dep.distance))
            added.append(dep)
    return replace(action, after=(*action.after, *added)) if added else action


def timing(plan: Plan, context: Context) -> Plan:
    """What bounds the period of the finished plan; nothing where an action's cost is unknown."""
    if not plan.actions or any(action.cost.seconds is None for action in plan.actions):
        return plan
    problem = periodic_problem(plan)
    count = len(plan.actions)
    timed = timed_kernel(problem, Kernel(order=tuple(range(count)), ahead=(0,) * count))
    slack = slack_of(problem.seconds, turn_arcs(problem, timed.kernel), timed.period, timed.starts)
    resource, busy = problem.busiest
    found = Timing(
        resource_bound=busy,
        recurrence_bound=problem.recurrence.ratio,
        period=timed.period,
        busiest=_lane_name(plan, resource),
        binding=_binding(problem, timed),
        critical=tuple(plan.actions[task].id for task in timed.critical),
        slack=tuple((a.id, room) for a, room in zip(plan.actions, slack, strict=True)),
        latency=_latency(plan, problem, timed),
        played=_played(plan, problem, timed),
    )
    return replace(plan, timing=found)


def _played(plan: Plan, problem: Problem, timed: Timed) -> float:
    """Seconds an iteration where iterations differ, no less than their means say; else 0."""
    swings = [action.cost.swings for action in plan.actions]
    if not any(swings):
        return 0.0
    ahead = [action.ahead for action in plan.actions]

    def seconds(task: int, turn: int) -> float:
        of, mean = swings[task], problem.seconds[task]
        return mean * of[(turn + ahead[task]) % len(of)] if of else mean

    arcs = turn_arcs(problem, timed.kernel)
    turns = 3 * max(len(each) for each in swings)
    return max(period_of_turns(seconds, arcs, len(ahead), turns), timed.period)


def _binding(problem: Problem, timed: Timed) -> Literal["resource", "recurrence", "order"]:
    """Which bound the period is at, or that only another order would shorten it."""
    if timed.period <= problem.resource_bound * ALIKE:
        return "resource"
    return "recurrence" if timed.period <= problem.recurrence.ratio * ALIKE else "order"


def _latency(plan: Plan, problem: Problem, timed: Timed) -> float:
    """Seconds from the start of an iteration's first run on a device to the end of the last one.

    What is done early costs nothing: prompts are drawn while the iteration before runs. An
    evaluation is of no iteration's chain.
    """
    timings = zip(plan.actions, timed.starts, problem.seconds, strict=True)
    every = [(a, start - a.ahead * timed.period, seconds) for a, start, seconds in timings]
    counted = [s for s in every if s[0].kind == "run" and s[0].always and not s[0].on_host]
    spans = [(start, seconds) for _, start, seconds in counted or every]
    return max(start + seconds for start, seconds in spans) - min(start for start, _ in spans)


def _lane_name(plan: Plan, resource: Resource | None) -> str:
    """A lane as it is printed: its device, and whether it is the one for copies."""
    if resource is None:
        return "nothing"
    device, lane = resource
    return device_name(plan, device) + (" copies" if lane == "copy" else "")
