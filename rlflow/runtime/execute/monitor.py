"""The monitor: what must hold of a run at every moment, checked at every start and end.

A listener of the executor that keeps the books of a machine that runs the plan: which lanes
are taken, which weights lie where in which version, what is awake, how many bytes are held,
whose rows are there. It looks up what a plan says and nothing that a pass has proven. All that
is broken raises AssertionError at once, with the instance and the reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from rlflow.runtime.execute.executor import Completion
from rlflow.runtime.execute.flow import Flow
from rlflow.runtime.execute.monitor_trips import Instance, Trips
from rlflow.runtime.execute.segments import AHEAD
from rlflow.runtime.execute.stats import logged_as
from rlflow.scheduler.plan.plan import HOST, Action, Chunk, Part, Plan


class Monitor:
    """Watches iterations `start` to `end` with a barrier after every `barrier` of them.

    `log` has (action, iteration, versions read) of each instance, in the order of their ends;
    `reported` is how many iterations are done. What is trained begins with version `start`,
    all other instances with version 0 as their files have it.
    """

    def __init__(self, plan: Plan, *, start: int, end: int, barrier: int) -> None:
        self.plan, self.start, self.end, self.barrier = plan, start, end, barrier
        self.reported = start
        self.log: list[tuple[str, int, tuple[int | None, ...]]] = []
        self.books = Books(plan, start)
        self.running: dict[str, int] = {}
        self.lanes: dict[tuple[int, str], str] = {}
        self.done: set[Instance] = set()
        flow = Flow(plan)
        self._sources = {action.id: flow.sources(action.id) for action in plan.actions}
        self._readers: dict[str, list[Action]] = {action.id: [] for action in plan.actions}
        for action in plan.actions:
            for source in self._sources[action.id]:
                self._readers[source].append(action)
        self._left: dict[Instance, int] = {}
        self._begun: dict[Instance, int | None] = {}
        self._pieces: dict[Instance, int] = {}
        self._givers = {a.id: givers(plan, a) for a in plan.actions if a.kind == "run"}
        self.trips = Trips(plan)
        self._outside = {action.id: flow.outside(action.id) for action in plan.actions}
        self._unread: Counter[Instance] = Counter()
        self._most = max((action.ahead for action in plan.actions), default=0) + AHEAD
        self._segment = self._next_segment(start)

    def _next_segment(self, start: int) -> tuple[int, int]:
        """The iterations from `start` to where it drains; past the end the closing one."""
        if start >= self.end:
            return start, start + 1
        return start, min((start // self.barrier + 1) * self.barrier, self.end)

    def started(self, action: Action, iteration: int) -> None:
        """Check everything that has to hold before an instance starts."""
        if self.reported >= self._segment[1]:
            self._drained(f"{action.id}@{iteration}")
        name = f"{action.id}@{iteration}"
        self._in_segment(action, iteration, name)
        for device in action.devices:
            other = self.lanes.get((device, action.lane))
            assert other is None, f"{name} starts on device {device} while {other} runs there"
            self.lanes[device, action.lane] = name
        assert action.id not in self.running, f"{name} starts while {action.id} runs"
        self.running[action.id] = iteration
        self.trips.start(action, iteration, name)
        self._rows_are_there(action, iteration, name)
        self.books.start(action, name)
        self._versions(action, iteration, name)
        self._goes_on(action, iteration, name)

    def _in_segment(self, action: Action, iteration: int, name: str) -> None:
        """No instance of another segment, none twice, none too far ahead of what is done."""
        first, last = self._segment
        early = first - 1 if action.kind == "reshard" else first
        assert early <= iteration < last, f"{name} starts in iterations {first} to {last - 1}"
        ahead = iteration - self.reported
        assert ahead <= self._most, f"{name} is {ahead} iterations ahead of what is done"
        if action.kind not in ("reshard", "sleep", "wake"):
            assert (action.id, iteration) not in self.done, f"{name} starts twice"
            due = action.closing if first >= self.end else action.due(iteration)
            assert due, f"{name} is not due"

    def _rows_are_there(self, action: Action, iteration: int, name: str) -> None:
        """All that it reads was made in this iteration, and is still kept."""
        for source in self._givers.get(action.id, ()):
            if self.trips.left_out(source, iteration):
                continue
            there = (source, iteration) in self.done
            assert there, f"{name} starts before {source}@{iteration} has made its rows"
        for source in self._sources[action.id]:
            if self.trips.left_out(source, iteration):
                continue
            kept = (source, iteration) in self._left
            assert kept, f"{name} reads the rows of {source}@{iteration}, which are not kept"

    def _versions(self, action: Action, iteration: int, name: str) -> None:
        """It reads the version that it declares, and no version before its segment's first."""
        for instance, lag in action.reads:
            wanted = self.books.wanted(action, instance, max(iteration - lag, 0))
            if lag > 0:
                wanted = self.books.wanted(action, instance, max(iteration - lag, self._segment[0]))
            held = self.books.version[instance]
            assert held == wanted, f"{name} reads version {held} of {instance}, not {wanted}"

    def _goes_on(self, action: Action, iteration: int, name: str) -> None:
        """Pieces of a rollout follow one another over the same weights; who resumes has newer."""
        if action.kind != "run" or not self.plan.graph.has_node(str(action.node)):
            return
        node = self.plan.graph.node(str(action.node))
        if node.op.use != "rollout":
            return
        held = self.books.version[str(action.instance)]
        if action.ends_first:
            assert action.chunk is not None
            done = self._pieces.get((node.name, iteration), 0)
            assert done == action.chunk.index, f"{name} starts when {done} pieces are over"
            before = self._begun.setdefault((node.name, iteration), held)
            assert before == held, f"{name} goes on with version {held} after {before}"
        if node.resumes is not None:
            before = self._begun[node.resumes, iteration]
            newer = len(self.books.updates[str(node.model)])
            assert before is not None, f"{name} goes on with what nobody knows"
            assert held in (before, before + newer), f"{name} goes on with {held} after {before}"
        self._begun[node.name, iteration] = held

    def _piece_over(self, action: Action, iteration: int) -> None:
        """Count a piece of a rollout that is not over yet; after the last one nothing is open."""
        if not action.ends_first:
            return
        assert action.chunk is not None
        place = (str(action.node), iteration)
        self._pieces[place] = action.chunk.index + 1
        if action.chunk.index + 1 == action.chunk.count:
            del self._pieces[place]

    def finished(self, action: Action, completion: Completion) -> None:
        """Check that nothing has changed under an instance that ends, and book what it did."""
        iteration = self.running.pop(action.id)
        name = f"{action.id}@{iteration}"
        assert completion.iteration == iteration, f"{name} ends as {completion.iteration}"
        for device in action.devices:
            del self.lanes[device, action.lane]
        self._versions(action, iteration, name)
        versions = tuple(self.books.version[instance] for instance, _ in action.reads)
        self.log.append((action.id, iteration, versions))
        self.books.finish(action, iteration, name)
        self.done.add((action.id, iteration))
        self._piece_over(action, iteration)
        for source in self._sources[action.id]:
            if not self.trips.left_out(source, iteration):
                self._read(source, iteration)
        readers = sum(reader.due(iteration) for reader in self._readers[action.id])
        readers -= self._unread.pop((action.id, iteration), 0)
        if readers:
            self._left[action.id, iteration] = readers
        for left_out in self.trips.finish(action, completion):
            for source in self._outside[left_out]:
                self._read(source, iteration)

    def _read(self, source: str, iteration: int) -> None:
        """Count one reader less of what a source has made, or will."""
        key = (source, iteration)
        if key not in self._left:
            self._unread[key] += 1
            return
        self._left[key] -= 1
        if self._left[key] == 0:
            del self._left[key]

    def iteration_done(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Check that iterations are reported in order, whole, with the numbers of all actions."""
        assert iteration == self.reported, f"iteration {iteration} is told after {self.reported}"
        if iteration == self._segment[1] - 1:
            assert not self.running, f"iteration {iteration} drains while {self.running} run"
        closing = iteration >= self.end
        for action in self.plan.actions:
            due = action.closing if closing else action.due(iteration)
            if self.trips.left_out(action.id, iteration):
                over = (action.id, iteration) in self.done
                assert not over, f"{action.id} of {iteration} ran, though its loop was over"
            elif action.part is None and due and not (closing and action.kind == "reshard"):
                over = (action.id, iteration) in self.done
                assert over, f"iteration {iteration} is told before {action.id} is over"
                key = f"{logged_as(action)}/n"
                gate = action.trip is not None and action.trip.gate
                told = gate or metrics.get(key) == iteration
                assert told, f"{key} of {iteration} is {metrics.get(key)}"
        self.reported += 1

    def _drained(self, name: str) -> None:
        """Between two segments nothing runs and no rows are kept; then the next one begins."""
        assert not self.running, f"{name} starts while {self.running} of a segment before run"
        assert not self._left, f"rows are kept that nobody will read: {sorted(self._left)}"
        assert not self._pieces, f"rollouts are left in pieces: {sorted(self._pieces)}"
        self._segment = self._next_segment(self.reported)
        self.done.clear()
        self._begun.clear()
        self.trips.reached.clear()
        self._unread.clear()

    def finish(self) -> None:
        """Check what has to hold after the run: all of it is over, and nothing is kept."""
        assert not self.running, f"the run is over while {self.running} run"
        assert not self._left, f"rows are kept that nobody will read: {sorted(self._left)}"
        assert not self._pieces, f"rollouts are left in pieces: {sorted(self._pieces)}"
        assert self.reported >= self.end, f"{self.reported} of {self.end} iterations are done"


class Books:
    """Weights, versions and bytes of the machine.

    A version counts the updates of the model's nodes, piece by piece: iteration i begins with as
    many as were due before it; None is weights that were discarded.
    """

    def __init__(self, plan: Plan, start: int) -> None:
        self.plan = plan
        self._actions = {action.id: action for action in plan.actions}
        self.parts: dict[str, Part] = {part.name: part for part in plan.parts}
        self.models = {instance.name: instance.model for instance in plan.instances}
        self.adapters = {m.name for m in plan.graph.models if m.lora is not None}
        self.updates = {m.name: _writers(plan, m.name) for m in plan.graph.models}
        self.version: dict[str, int | None] = dict.fromkeys(self.models, 0)
        for instance in plan.instances:
            if instance.trained:
                self.version[instance.name] = self._updates_before(instance.model, start)
        self.awake = set(plan.awake_at_start)
        self.in_use: Counter[str] = Counter()
        self.held: dict[int, int] = defaultdict(int)
        self.hosts: dict[int, int] = defaultdict(int)
        discarded = {action.part for action in plan.actions if action.mode == "discard"}
        for part in plan.parts:
            for device in part.stays:
                self.held[device] += part.size or 0
            self._hold(part, (part.size or 0) if part.name in self.awake else part.residual)
            if part.name not in self.awake and part.name not in discarded:
                self._hold_on_host(part, 1)
        for kept in plan.kept:
            for host in plan.hosts_keeping(kept):
                self.hosts[host] += kept.size

    def _hold(self, part: Part, size: int) -> None:
        for device in part.leaves:
            self.held[device] += size

    def _hold_on_host(self, part: Part, sign: int) -> None:
        for device in part.leaves:
            self.hosts[self.plan.host_of(device)] += sign * (part.size or 0)

    def wanted(self, action: Action, instance: str, version: int) -> int:
        """What `version` an action counts as, by what its model's updates have done by then."""
        model = self.models[instance]
        before = self._updates_before(model, version)
        for name in self.updates[model] if action.id in self.updates[model] else ():
            if name == action.id:
                break
            before += self._actions[name].due(version)
        return before

    def _updates_before(self, model: str, iteration: int) -> int:
        """How many runs that write a model are due before an iteration."""
        runs = [self._actions[name] for name in self.updates[model]]
        return sum(run.due(i) for run in runs for i in range(iteration))

    def start(self, action: Action, name: str) -> None:
        """Book what an instance takes; check that it fits and finds its weights awake."""
        if action.kind == "wake":
            assert action.part not in self.awake, f"{name} wakes what is awake"
            part = self.parts[str(action.part)]
            self._hold(part, (part.size or 0) - part.residual)
        elif action.kind == "sleep":
            assert action.part in self.awake, f"{name} puts to sleep what sleeps"
            users = self.in_use[str(action.part)]
            assert not users, f"{name} puts {action.part} to sleep while it is used"
            self.awake.discard(str(action.part))
            self._leave(action)
        for need in action.needs:
            assert need in self.awake, f"{name} needs {need}, which sleeps"
            self.in_use[need] += 1
        for device in action.devices:
            self.held[device] += action.cost.transient or 0
        self._fits(action, name)

    def _leave(self, action: Action) -> None:
        part = self.parts[str(action.part)]
        if action.mode == "offload":
            self._hold_on_host(part, 1)
        elif part.kind == "weights":
            self.version[part.instance] = None

    def _fits(self, action: Action, name: str) -> None:
        """No device and no host holds more than it may, or than the plan says it ever does."""
        for device in action.devices:
            if device == HOST:
                continue
            held, budget = self.held[device], self.plan.budget(device)
            assert held <= budget, f"{name} makes {held} bytes on device {device} of {budget}"
            peak = self.plan.peaks.get(device, held)
            assert held <= peak, f"{name} makes {held} bytes on device {device}, the peak is {peak}"
        if action.kind == "sleep":
            most = max(self.hosts.values(), default=0)
            budget = self.plan.budget(HOST)
            assert most <= budget, f"{name} makes {most} bytes on a host of {budget}"

    def finish(self, action: Action, iteration: int, name: str) -> None:
        """Book what an instance leaves behind."""
        for device in action.devices:
            self.held[device] -= action.cost.transient or 0
        for need in action.needs:
            assert need in self.awake, f"{name} ends while {need} sleeps"
            self.in_use[need] -= 1
        if action.kind == "wake":
            self.awake.add(str(action.part))
            if action.mode == "offload":
                self._hold_on_host(self.parts[str(action.part)], -1)
        elif action.kind == "sleep":
            part = self.parts[str(action.part)]
            self._hold(part, part.residual - (part.size or 0))
        elif action.kind == "reshard":
            for target in action.targets:
                self._fill(target, self.version[str(action.instance)])
        elif action.writes:
            instance = str(action.instance)
            self.version[instance] = self.wanted(action, instance, iteration) + 1

    def _fill(self, target: str, version: int | None) -> None:
        """Adapters alone do not make weights whole that were discarded."""
        if self.version[target] is not None or self.models[target] not in self.adapters:
            self.version[target] = version


def _writers(plan: Plan, model: str) -> list[str]:
    """The runs that write a model, in the order in which they have to: node by node."""
    runs = [action for action in plan.actions if action.kind == "run"]
    runs.sort(key=lambda action: action.chunk.index if action.chunk else 0)
    return [a.id for node in plan.graph.updates(model) for a in runs if a.node == node.name]


def givers(plan: Plan, action: Action) -> tuple[str, ...]:
    """The runs whose rows an action reads: those of each source's chunks that it overlaps."""
    if not plan.graph.has_node(str(action.node)):
        return ()
    sources = plan.graph.node(str(action.node)).sources
    return tuple(
        other.id
        for other in plan.actions
        if other.kind == "run" and other.node in sources and _overlap(other.chunk, action.chunk)
    )


def _overlap(one: Chunk | None, other: Chunk | None) -> bool:
    """Whether two pieces of a batch have rows in common; None is all of it."""
    if one is None or other is None or one.by != other.by:
        return True
    before = one.index * other.count < (other.index + 1) * one.count
    return before and other.index * one.count < (one.index + 1) * other.count
