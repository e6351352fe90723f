"""Order and residency decided together, where memory is short.

Pass `order` finds a short period as if all parts stayed in memory. Where some have to sleep, their
copies lengthen it, and the order decides which have to. For example, a reshard after the
update that needs its room moves nothing; before it, all that the reshard filled has to leave.
So this file changes the order where parts leave, and what leaves where a copy is waited for.
It judges each change by the period with all copies, and stops when no change helps. Its budget
counts work and not seconds, so a plan does not depend on the machine that compiles it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random

from rlflow.scheduler.context import Context
from rlflow.scheduler.memory.demand import Demand
from rlflow.scheduler.memory.exact_joint import Best, optimise_jointly, solvable
from rlflow.scheduler.memory.exact_moves import Joint
from rlflow.scheduler.memory.judge import AS_LONG, Away, Copies, Judge, Judged
from rlflow.scheduler.passes.order import in_turns, periodic_problem
from rlflow.scheduler.passes.sleep_wake import move_cost
from rlflow.scheduler.periodic.kernel_moves import rotated, swapped
from rlflow.scheduler.periodic.problem import Kernel, Problem, compact, task_positions, timed_kernel
from rlflow.scheduler.periodic.search import lists
from rlflow.scheduler.plan.plan import Action, Dep, Mode, Plan

EFFORT = 2_000
ROUGH = 200
SHAKES = 20
REACH = 6
SEED = 1

Gap = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The plan in its order, and what of its residency is decided with it.

    A gap is a part's name and the action before. `away` are gaps through which parts leave
    whatever else would. Where a solver has decided everything `asleep` are all gaps, with the
    actions during which the part is, and `moves` all moves in their order: the gap, whether it
    wakes, and before which place of the list.
    """

    plan: Plan
    away: frozenset[Gap] = frozenset()
    asleep: Mapping[Gap, frozenset[str]] = field(default_factory=dict)
    moves: tuple[tuple[Gap, bool, int], ...] = ()
    fewest: bool = False


def joint_orders(plan: Plan, context: Context, demand: Demand) -> tuple[Decided, ...]:
    """Orders that are short with their sleeps and wakes, and what leaves in any case: best first.

    Of orders that take as long the one that moves fewer bytes. Where the order there is moves
    none it stays. An exact solver goes on from there where seconds are given for it. The memory
    of hosts is not looked at: the last one is the order as it is.
    """
    actions = _in_iterations(plan.actions)
    problem = periodic_problem(replace(plan, actions=actions))
    judge = Judge(
        problem, demand, copies_of(plan, context, demand), ROUGH if context.rough else EFFORT
    )
    ahead = tuple(action.ahead for action in plan.actions)
    start = Kernel(order=tuple(range(len(actions))), ahead=ahead)
    first = judge.judged(start, frozenset())
    as_is = Decided(plan=plan)
    if not first.moved:
        return (as_is,)
    best = _best(judge, first)
    searched = _as_judged(plan, actions, demand, best, start)
    if context.optimize > 0 and solvable(judge):
        exact = optimise_jointly(judge, best, context.optimize)
        noted = plan.noting("optimised residency", _outcome(best, exact))
        if exact.joint is not None:
            return _as_solved(noted, actions, demand, exact, exact.joint), searched, as_is
        searched = _as_judged(noted, actions, demand, best, start)
        return replace(searched, fewest=exact.fewest), as_is
    return (searched,) if best is first else (searched, as_is)


def _as_judged(
    plan: Plan, actions: tuple[Action, ...], demand: Demand, best: Judged, start: Kernel
) -> Decided:
    """What the search has found; the list as it is where its order stays."""
    away = frozenset((demand.held[held].part.name, actions[since].id) for held, since in best.away)
    if best.kernel != start:
        plan = replace(plan, actions=in_turns(actions, best.kernel))
    return Decided(plan=plan, away=away)


def _as_solved(
    plan: Plan, actions: tuple[Action, ...], demand: Demand, exact: Best, joint: Joint
) -> Decided:
    """What the solver has found, by the names of parts and actions."""

    def gap(key: tuple[int, int]) -> Gap:
        return demand.held[key[0]].part.name, actions[key[1]].id

    return Decided(
        plan=replace(plan, actions=in_turns(actions, joint.kernel)),
        asleep={gap(k): frozenset(actions[x].id for x in away) for k, away in joint.away.items()},
        moves=tuple((gap(move.key), move.wake, move.slot) for move in joint.moves),
        fewest=exact.fewest,
    )


def _outcome(before: Judged, exact: Best) -> str:
    """What a solver has made of a search's period, in words."""
    share = exact.period / exact.bound - 1
    how = "proven optimal" if exact.proven else f"within {share:.1%} of the optimum"
    gained = before.period / exact.period - 1
    text = f"period {exact.period:.6g} s with its copies, {how} for order and residency together"
    return text + (f", {gained:.1%} better than without" if gained > 1e-5 else "")


def _in_iterations(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """The actions with their distances in iterations, as before `order`."""
    ahead = {action.id: action.ahead for action in actions}

    def before(dep: Dep, mine: int) -> Dep:
        return replace(dep, distance=dep.distance + mine - ahead[dep.action])

    return tuple(
        replace(a, ahead=0, after=tuple(before(dep, a.ahead) for dep in a.after)) for a in actions
    )


def copies_of(plan: Plan, context: Context, demand: Demand) -> Copies:
    """Seconds of each part's moves, by their mode and whether it is the wake."""
    found: list[dict[tuple[Mode, bool], float]] = []
    modes: tuple[Mode, Mode] = ("offload", "discard")
    for held in demand.held:
        seconds = {}
        for mode in modes:
            for wake in (False, True):
                cost = move_cost(plan, context, held.part, mode, "wake" if wake else "sleep")
                seconds[mode, wake] = cost.seconds or 0.0
        found.append(seconds)
    return found


def _best(judge: Judge, first: Judged) -> Judged:
    """The best that is found from the first order and from those of lists."""
    floor = timed_kernel(judge.problem, first.kernel).period
    best = _climbed(judge, first)
    for kernel in lists(judge.problem):
        if judge.left < 0 or _done(best, floor):
            break
        found = _climbed(judge, judge.judged(kernel, frozenset()))
        best = found if found.better_than(best) else best
    best = _shaken(judge, best, floor)
    if not best.better_than(first):
        return first
    kernel = compact(judge.problem, timed_kernel(judge.problem, best.kernel))
    least = judge.judged(kernel, best.away)
    return best if best.better_than(least) else least


def _done(best: Judged, floor: float) -> bool:
    """Whether nothing moves, and the period is what it is with memory for everything."""
    return not best.moved and best.period <= floor * AS_LONG


def _climbed(judge: Judge, best: Judged) -> Judged:
    """What changes lead to, each of which makes it better."""
    better = True
    while better and judge.left > 0:
        better = False
        for kernel, away in _neighbours(judge.problem, best):
            found = judge.better(kernel, away, best)
            if found is not None:
                best, better = found, True
                break
            if judge.left < 0:
                break
    return best


def _shaken(judge: Judge, best: Judged, floor: float) -> Judged:
    """The best that is found from where a few changes at random lead to."""
    random = Random(SEED)  # noqa: S311
    for _ in range(SHAKES):
        if judge.left < 0 or _done(best, floor):
            break
        kernel, away = best.kernel, best.away
        for _ in range(random.randint(2, 4)):
            pairs = _pairs(judge.problem, kernel)
            choices = list(_apart(judge.problem, kernel, *random.choice(pairs))) if pairs else []
            kernel = random.choice(choices) if choices else kernel
        if best.stays and random.random() < 0.5:
            away = away ^ {random.choice([*best.stays, *sorted(away)])}
        found = _climbed(judge, judge.judged(kernel, away))
        best = found if found.better_than(best) else best
    return best


def _neighbours(problem: Problem, judged: Judged) -> Iterator[tuple[Kernel, Away]]:
    """Orders in which two actions have changed places, and others to leave.

    First the actions for which a part is away; lanes' neighbours before others.
    """
    for first, second in judged.crowded:
        for kernel in _apart(problem, judged.kernel, first, second):
            yield kernel, judged.away
    for gap in (*judged.stays, *sorted(judged.away)):
        yield judged.kernel, judged.away ^ {gap}
    for first, second in _pairs(problem, judged.kernel):
        for kernel in _apart(problem, judged.kernel, first, second):
            yield kernel, judged.away


def _pairs(problem: Problem, kernel: Kernel) -> list[tuple[int, int]]:
    """Every two actions near each other on a lane, the first before the second."""
    place = task_positions(kernel.order)
    pairs: dict[tuple[int, int], int] = {}
    for queue in problem.queues:
        line = sorted(queue, key=place.__getitem__)
        for at, one in enumerate(line):
            for steps in range(1, min(len(line), REACH + 1)):
                pairs.setdefault((one, line[(at + steps) % len(line)]), steps)
    return sorted(pairs, key=lambda pair: pairs[pair])


def _apart(problem: Problem, kernel: Kernel, first: int, second: int) -> Iterator[Kernel]:
    """The orders in which the second comes before the first, right after which it comes now."""
    if first == second:
        return
    place = task_positions(kernel.order)
    if place[first] > place[second]:
        kernel = rotated(problem, kernel, second)
        place = task_positions(kernel.order)
    if place[first] < place[second]:
        yield from swapped(problem, kernel, first, second)
