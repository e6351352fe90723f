"""The `ray` backend: one worker process a device, the controller passing metadata only.

Submits action instances to the ranks of their devices, follows how rows lie, and turns the
ranks' answers into completions. The first failure ends the run: the other ranks get a
moment to say what they know, then every process is stopped. This file knows no algorithm.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlflow.errors import DeviceLostError, Finding, RlflowError, RunError
from rlflow.runtime.execute.deadlines import Allowance, Deadlines, unwatched
from rlflow.runtime.execute.executor import Completion
from rlflow.runtime.execute.stats import logged
from rlflow.runtime.ray.cluster.alive import require_cluster
from rlflow.runtime.ray.cluster.causes import cause_of, unwrapped
from rlflow.runtime.ray.cluster.standing import RankStandings, behind, crossed, uneven_calls
from rlflow.runtime.ray.made import Failed, Made
from rlflow.runtime.ray.orders import Order
from rlflow.runtime.ray.ranks import Ranks
from rlflow.runtime.ray.row_ledger import RowLedger
from rlflow.runtime.record.lines.clock import clock as own_clock
from rlflow.runtime.record.printed import replay_lines
from rlflow.scheduler.plan.plan import Action, Plan

GRACE = 3.0
TICK = 0.5
# Seconds for a sign of life of a process from which an answer is late.
PROBE = 5.0
# Ranks are asked how far they are after this share of what they are allowed.
ASK_AFTER = 0.5
# Seconds between two looks at how far ranks are that share an action: where one with nothing to do
# is behind at both, the others wait in vain.
APART = 5.0
# Seconds after which ranks that wait for each other do so in vain: they may compute before.
CROSSED = 60.0
NOTHING = (0, "")
# Figures of the rows that an action makes.
WORK = ("tokens", "passed", "predicted", "pairs")

Done = Callable[[Completion], None]


@dataclass(slots=True)
class Flight:
    """An action instance under way: who has answered what, and when it was submitted.

    It last `moved` when a rank was heard to have: `moves` are what each has counted, and who is
    `asking` has not answered how far it is. `standings` are how far all were when last `looked` at,
    and have `stood` since then. Of a transfer each receiver has its `senders`.
    """

    action: Action
    iteration: int
    done: Done
    asked: tuple[int, ...]
    since: float
    allowed: Allowance
    moved: float = 0.0
    moves: dict[int, tuple[int, str]] = field(default_factory=dict)
    asking: set[int] = field(default_factory=set)
    senders: dict[int, Sequence[int]] = field(default_factory=dict)
    made: dict[int, Made] = field(default_factory=dict)
    errors: dict[int, RlflowError] = field(default_factory=dict)
    failed_at: float | None = None
    standings: RankStandings = field(default_factory=dict)
    looked: float = 0.0
    stood: float = 0.0

    @property
    def waiting(self) -> tuple[int, ...]:
        """The devices that have not answered."""
        return tuple(d for d in self.asked if d not in self.made and d not in self.errors)

    @property
    def complete(self) -> bool:
        """Whether everybody asked has done its part."""
        return len(self.made) == len(self.asked)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a rank said instead of doing its part of a flight."""

    flight: Flight
    device: int
    error: BaseException | Failed


class RayBackend:
    """Carries out action instances on the ranks of their devices.

    The run is given up when one is silent for longer than its `deadlines` allow.
    """

    def __init__(
        self, plan: Plan, ranks: Ranks, *, deadlines: Deadlines, now: Callable[[], float]
    ) -> None:
        self._ranks = ranks
        self._deadlines = deadlines
        self._now = now
        self._offset = now() - own_clock()
        self._lying = RowLedger(plan)
        self._inbox: queue.SimpleQueue[Refusal | None] = queue.SimpleQueue()
        self._under_way: dict[int, Flight] = {}
        self._lock = threading.Lock()
        self._broken: RlflowError | None = None
        self._thread = threading.Thread(target=self._collect, name="ray answers", daemon=True)
        self._thread.start()

    def submit(self, action: Action, iteration: int, done: Done) -> None:
        """Send an action instance to its ranks; returns before they have answered."""
        if self._broken is not None:
            done(self._failure(action, iteration, self._broken))
            return
        asked = self._lying.asked(action)
        clock, allowed = time.monotonic(), self._deadlines.of(action)
        flight = Flight(action, iteration, done, asked, clock, allowed, moved=clock)
        with self._lock:
            self._under_way[id(flight)] = flight
        order = Order.of(action, iteration).packed()
        if action.kind == "transfer":
            references = self._transfer(flight)
        elif action.lane == "copy":
            references = {d: self._ranks.actor(d).move.remote(order) for d in asked}
        else:
            keep = {d: [rows] for d, rows in self._lying.keep(action, iteration).items()}
            references = {
                d: self._ranks.actor(d).run.remote(order, *keep.get(d, ())) for d in asked
            }
        for device, reference in references.items():
            reference._on_completed(partial(self._answered, flight, device))

    def drop_surplus(self) -> None:
        """Have every rank forget what loops have left over, before anything that is sent later."""
        for device in self._ranks.everybody():
            self._ranks.actor(device).drop_surplus.remote()

    def skip(self, action: Action, iteration: int) -> None:
        """Have the ranks let go of what an action instance would have read; none is waited for."""
        if self._lying.skip(action, iteration):
            order = Order.of(action, iteration).packed()
            for device in self._lying.asked(action):
                self._ranks.actor(device).skip.remote(order)

    def close(self, *, wait: bool = True) -> None:
        """Stop listening; the ranks belong to the machine."""
        self._inbox.put(None)
        if wait:
            self._thread.join(timeout=5)

    def _transfer(self, flight: Flight) -> dict[int, Any]:
        """Have the makers put rows into the object store, and the readers take them."""
        action, iteration = flight.action, flight.iteration
        moves = self._lying.exchange(action, iteration)
        sent = {}
        for device, wanted in moves.sends.items():
            keeps = any(piece.sender is None for piece in moves.takes.get(device, ()))
            sent[device] = self._ranks.actor(device).send.remote(
                action.id, iteration, wanted, keeps
            )
        received = {}
        for device, pieces in moves.takes.items():
            senders = sorted({piece.sender for piece in pieces if piece.sender is not None})
            flight.senders[device] = senders
            rows, total = self._lying.rows(action, iteration, device)
            received[device] = self._ranks.actor(device).receive.remote(
                action.id,
                iteration,
                rows,
                total,
                pieces,
                senders,
                *(sent[sender] for sender in senders),
            )
        return received

    def _answered(self, flight: Flight, device: int, found: Any) -> None:
        """Take a rank's answer in the thread of Ray that brings it; errors go to our own."""
        if isinstance(found, Failed):
            replay_lines(found.printed)
        if isinstance(found, (BaseException, Failed)):
            self._inbox.put(Refusal(flight, device, found))
            return
        with self._lock:
            made = flight.made[device] = Made.unpacked(found)
            replay_lines(made.printed)
            if not flight.complete or self._under_way.pop(id(flight), None) is None:
                return
        self._complete(flight)

    def _collect(self) -> None:
        """Look after what goes wrong until told to stop; what goes wrong in that ends the run."""
        going = True
        while going:
            try:
                going = self._look()
            except Exception as error:
                self._give_up_all(unwatched(error))

    def _look(self) -> bool:
        """Take a refusal, or see who is late where none comes; false when told to stop."""
        try:
            refusal = self._inbox.get(timeout=TICK)
        except queue.Empty:
            self._watch()
            return True
        if refusal is not None:
            self._refused(refusal.flight, refusal.device, refusal.error)
        return refusal is not None

    def _refused(self, flight: Flight, device: int, error: BaseException | Failed) -> None:
        """Note an error; the run ends once the others have said theirs, or a moment later."""
        if isinstance(error, Failed):
            flight.errors[device] = self._named(device, error)
        else:
            flight.errors[device] = self._lost(flight, device, error)
        flight.failed_at = flight.failed_at or time.monotonic()
        if not flight.waiting:
            self._give_up(flight)

    def _complete(self, flight: Flight) -> None:
        action, iteration = flight.action, flight.iteration
        try:
            self._lying.note(action, iteration, flight.made)
            answering = self._lying.answering(action)
            answers = [flight.made[d].metrics for d in answering]
            metrics = logged(action, answers)
        except Exception as error:  # in a thread of Ray's, which would say nothing
            said = error if isinstance(error, RlflowError) else unwatched(error)
            flight.done(self._failure(action, iteration, said))
            return
        self._deadlines.took(action.id, time.monotonic() - flight.since)
        moved = [made.moved for made in flight.made.values() if made.moved is not None]
        flight.done(
            Completion(
                action=action.id,
                iteration=iteration,
                start=self._offset + min(made.start for made in flight.made.values()),
                end=self._offset + max(made.end for made in flight.made.values()),
                metrics=metrics,
                moved=sum(moved) if moved else None,
                devices=_figures(flight, answering),
            )
        )

    def _watch(self) -> None:
        """Give up what failed a moment ago, and what is silent for longer than allowed."""
        clock = time.monotonic()
        with self._lock:
            flights = list(self._under_way.values())
        try:
            require_cluster()
        except RunError as error:
            for flight in flights[:1]:
                self._give_up(flight, error)
        for flight in flights:
            if flight.failed_at is not None and clock - flight.failed_at > GRACE:
                self._give_up(flight)
            elif clock - flight.moved > flight.allowed.seconds:
                self._give_up(flight, self._late(flight))
            elif (apart := self._apart(flight, clock)) is not None:
                self._give_up(flight, apart)
            elif clock - flight.moved > ASK_AFTER * flight.allowed.seconds:
                self._ask(flight)

    def _apart(self, flight: Flight, clock: float) -> RlflowError | None:
        """The error for a flight in which ranks wait in a collective for one that does not come."""
        if len(flight.asked) < 2 or flight.action.kind == "transfer":
            return None
        if clock - max(flight.looked, flight.since) < APART:
            return None
        found, flight.looked = self._ranks.standing(PROBE), clock
        if found != flight.standings:
            flight.standings, flight.stood = found, clock
            return None
        with self._lock:
            flights = list(self._under_way.values())
        idle = set(found).difference(*(other.waiting for other in flights))
        said = behind(found, idle)
        if not said and clock - flight.stood > min(CROSSED, ASK_AFTER * flight.allowed.seconds):
            said = crossed(found)
        if not said or not flight.waiting:
            return None
        return RunError(
            Finding(
                code="E781",
                what=f"{flight.action.id} in iteration {flight.iteration}: "
                "ranks wait in a collective that others do not call",
                got="; ".join(said),
                expected="the same collectives of every rank of a group, whatever its rows are",
            )
        )

    def _ask(self, flight: Flight) -> None:
        """Ask those that have not answered how far they are; who hangs does not say."""
        if flight.allowed.whole or flight.action.kind == "transfer":
            return
        for device in set(flight.waiting) - flight.asking:
            flight.asking.add(device)
            asked = self._ranks.actor(device).progress.remote(flight.action.id, flight.iteration)
            asked._on_completed(partial(self._heard, flight, device))

    def _heard(self, flight: Flight, device: int, told: Any) -> None:
        """Take how far a rank is, in the thread of Ray that brings it."""
        flight.asking.discard(device)
        if isinstance(told, tuple) and told != flight.moves.get(device, NOTHING):
            flight.moves[device] = told
            flight.moved = time.monotonic()

    def _give_up(self, flight: Flight, error: RlflowError | None = None) -> None:
        """End the run: stop every process, and fail all that is under way with one error."""
        self._give_up_all(error or _most_telling(flight.errors))

    def _give_up_all(self, error: RlflowError) -> None:
        with self._lock:
            if self._broken is not None:
                return
            self._broken = error
            flights = list(self._under_way.values())
            self._under_way.clear()
        self._ranks.kill()
        for other in flights:
            other.done(self._failure(other.action, other.iteration, self._broken))

    def _failure(self, action: Action, iteration: int, error: RlflowError) -> Completion:
        clock = self._now()
        return Completion(
            action=action.id, iteration=iteration, start=clock, end=clock, error=error
        )

    def _named(self, device: int, failed: Failed) -> RlflowError:
        """An error that a rank returned, with its traceback as the cause."""
        error = failed.raised()
        error.__cause__ = RemoteTraceback(f"{self._ranks.name(device)}\n{failed.trace}")
        return error

    def _lost(self, flight: Flight, device: int, error: BaseException) -> RlflowError:
        """The error for a process that died: the asked one, or the one whose rows it awaited."""
        victim = self._ranks.device_of(unwrapped(error), device)
        finding = Finding(
            code="E759",
            what=f"{flight.action.id} in iteration {flight.iteration}: "
            f"{self._ranks.name(victim)} was lost",
            got=cause_of(error),
            expected="the process of every device to live as long as the run",
        )
        lost = RankLost(finding)
        lost.__cause__ = error
        return lost

    def _late(self, flight: Flight) -> RlflowError:
        """The error for a flight that is late; who answers nothing at all is the one to blame.

        The others that have not answered wait for it, in a collective or for its rows.
        """
        with self._lock:
            senders = [each.senders for each in self._under_way.values()]
        silent = self._ranks.silent(PROBE, senders)
        missing = [self._ranks.name(device) for device in silent or flight.waiting]
        last = sorted({said for _, said in flight.moves.values() if said})
        last += uneven_calls(self._ranks.standing(PROBE))
        return self._deadlines.late(
            flight.action, flight.iteration, flight.allowed, who=missing, last="; ".join(last)
        )


class RankLost(DeviceLostError):
    """The process of a device died while an action ran on it."""


class RemoteTraceback(Exception):
    """The text of a traceback in another process."""


def _most_telling(errors: Mapping[int, RlflowError]) -> RlflowError:
    """A lost rank explains the others' broken connections; else a typed error, else any."""
    found: Sequence[RlflowError] = list(errors.values())
    lost = [error for error in found if isinstance(error, RankLost)]
    typed = [error for error in found if error.findings and error.findings[0].code != "E751"]
    return (lost or typed or found)[0]


def _figures(flight: Flight, answering: Collection[int]) -> dict[int, Mapping[str, float]]:
    """What each device did; rows that several ranks have are counted once."""
    return {
        device: made.figures
        if device in answering
        else {name: value for name, value in made.figures.items() if name not in WORK}
        for device, made in flight.made.items()
        if made.figures
    }
