"""How long an action may be silent before a run is given up, and why so long.

Ten times what it is expected to take, by the plan or by this run so far, and never less than a
floor; a first call also compiles, warms up and reads. A reward whose calls have a time limit may be
silent for as long as they may. Silence is counted anew with every sign of
progress: what is slow but moves goes on, and what hangs is named in a bounded time. `--deadline`
sets one limit for all instead, on the whole of an action. Knows the plan, no backend.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from rlflow.errors import DeviceLostError, Finding, RunError
from rlflow.graph.roles import Calling
from rlflow.ops.scoring import Policy
from rlflow.scheduler.plan.plan import Action, Plan

FACTOR = 10.0
# Seconds of silence that are never too long: a garbage collection, a slow disk, another's load.
FLOOR = 120.0
# For what no table knows the time of: functions of users on the host, models of unknown size.
UNKNOWN = 600.0
# Seconds that a first call may take for what it compiles and warms up.
FIRST = 300.0
# Bytes a second of a slow disk or network: for what starts read, and checkpoints write.
SLOWEST = 100e6
# Seconds that ranks may wait for each other at least: the controller tells who hangs before.
MEETING = 1800.0


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many seconds an action may be silent, or take in all where `whole`, and `why`."""

    seconds: float
    why: str
    whole: bool = False


class Deadlines:
    """The allowances of a plan's actions; `fixed` seconds (`--deadline`) hold for everything."""

    def __init__(self, plan: Plan, fixed: float | None = None) -> None:
        self.plan = plan
        self.fixed = fixed
        self._longest: dict[str, float] = defaultdict(float)

    def took(self, action: str, seconds: float) -> None:
        """Record how many seconds an instance of an action took."""
        self._longest[action] = max(self._longest[action], seconds)

    def of(self, action: Action) -> Allowance:
        """The allowance of an action's next instance."""
        if self.fixed is not None:
            return Allowance(self.fixed, "--deadline", whole=True)
        longest, planned = self._longest[action.id], action.cost.seconds
        expected = max(longest, planned or 0.0)
        least = self._least(action)
        parts = [f"{FACTOR:g} times {_expectation(longest, planned)}, at least {least:g} s"]
        seconds = max(least, FACTOR * expected)
        if not longest:
            seconds += FIRST
            parts.append(f"{FIRST:g} s more for a first call")
            reading = (action.cost.moved or 0) / SLOWEST
            if reading >= 1:
                seconds += reading
                parts.append(f"{reading:.0f} s for {action.cost.moved or 0:,} bytes")
        return Allowance(seconds, "; ".join(parts))

    def _least(self, action: Action) -> float:
        """Seconds of silence that are never too long for an action.

        An engine that is lost meanwhile is started again, and says nothing until it is there. What
        the host has done before, rewards above all, tells by itself how long it takes.
        """
        used = {action.instance, *action.targets}
        starts = [e.engine_plan.settings.start_seconds for e in self.plan.engines if e.name in used]
        if starts:
            return UNKNOWN + max(starts)
        known = (
            bool(self._longest[action.id]) if action.on_host else action.cost.seconds is not None
        )
        return (FLOOR if known else UNKNOWN) + self._calling(action)

    def _calling(self, action: Action) -> float:
        """Seconds that a call of the action's function may take by what its user allows it."""
        if action.node is None or not self.plan.graph.has_node(action.node):
            return 0.0
        calling = self.plan.graph.node(action.node).role(Calling)
        policy = None if calling is None else calling.policy
        return policy.bounds.longest if isinstance(policy, Policy) else 0.0

    def for_files(self, size: int) -> float:
        """Seconds allowed to read or write so many bytes of files; at least those of an answer."""
        return self.fixed if self.fixed is not None else max(UNKNOWN, FACTOR * size / SLOWEST)

    @property
    def answering(self) -> float:
        """Seconds allowed for an answer that takes next to no work."""
        return self.for_files(0)

    @property
    def loading(self) -> float:
        """Seconds allowed for a start: to read all weights of a host from a slow disk."""
        sizes: dict[int, int] = defaultdict(int)
        for part in self.plan.parts:
            for device in part.devices if part.kind == "weights" else ():
                sizes[self.plan.host_of(device)] += part.size or 0
        most = max(sizes.values(), default=0)
        return self.fixed if self.fixed is not None else max(UNKNOWN, most / SLOWEST)

    @property
    def meeting(self) -> float:
        """Seconds that ranks wait for each other within an action, longer than any allowance."""
        if self.fixed is not None:
            return self.fixed
        return max((MEETING, *(2 * self.of(action).seconds for action in self.plan.actions)))

    def late(
        self, action: Action, iteration: int, allowed: Allowance, *, who: Iterable[str], last: str
    ) -> DeviceLostError:
        """The error for an action that was silent for longer; `last` says what it did last."""
        took = "took longer than" if allowed.whole else "showed no progress for"
        limit = "within --deadline" if allowed.whole else f"or progress, sooner: {allowed.why}"
        return DeviceLostError(
            Finding(
                code="E763",
                what=f"{action.id} in iteration {iteration} {took} {allowed.seconds:.4g} s",
                got=f"no answer from {', '.join(who)}" + (f"; before, {last}" if last else ""),
                expected=f"an answer of everybody asked {limit}",
                fix=f"--deadline {2 * allowed.seconds:.4g}",
            )
        )


def unwatched(error: Exception) -> RunError:
    """The error for a run whose watching over its actions has failed: none would be missed."""
    made = RunError(
        Finding(
            code="E782",
            what="what watches over the actions of this run has failed",
            got=repr(error),
            expected="to be told of actions that hang; --debug shows the traceback",
        )
    )
    made.__cause__ = error
    return made


def _expectation(longest: float, planned: float | None) -> str:
    """Where the expected time comes from, in words."""
    if planned is None and not longest:
        return "a time that nothing tells"
    if planned is None or longest > planned:
        return f"the longest of this run, {longest:.3g} s"
    return f"the estimate of the plan, {planned:.3g} s"
