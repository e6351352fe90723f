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
from rlflow.runtime.execute.monitor_rows import RowBooks
from rlflow.runtime.execute.monitor_trips import Instance, Trips
from rlflow.runtime.execute.segments import AHEAD
from rlflow.runtime.execute.stats import logged_as
from rlflow.scheduler.plan.plan import HOST, Action, Part, Plan


class Monitor:
    """Watches iterations `start` to `end` with a barrier after every `barrier` of them.

    `log` has (action, iteration, versions read) of each instance, in the order of their ends;
    `reported` is how many iterations are done. Trained instances begin with version `start`, all
    others with version 0, that of their files. No instance starts more than `ahead` iterations, and
    the largest `ahead` of the plan's actions, in front of the iterations that are done.
    """

    def __init__(
        self, plan: Plan, *, start: int, end: int, barrier: int, ahead: int = AHEAD
    ) -> None:
        self.plan, self.start, self.end, self.barrier = plan, start, end, barrier
        self.reported = start
        self.log: list[tuple[str, int, tuple[int | None, ...]]] = []
        self.books = Books(plan, start)
        self.running: dict[str, int] = {}
        self.lanes: dict[tuple[int, str], str] = {}
        self.trips = Trips(plan)
        self.rows = RowBooks(plan, self.trips)
        self._sampled: dict[Instance, int | None] = {}
        self._open: dict[Instance, tuple[int, int | None, int]] = {}
        self._most = max((action.ahead for action in plan.actions), default=0) + ahead
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
        self.rows.start(action, iteration, name)
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
            assert (action.id, iteration) not in self.rows.done, f"{name} starts twice"
            due = action.closing if first >= self.end else action.due(iteration)
            assert due, f"{name} is not due"

    def _versions(self, action: Action, iteration: int, name: str) -> None:
        """It reads the version that it declares, and no version before its segment's first."""
        for instance, lag in action.reads:
            wanted = self.books.wanted(action, instance, max(iteration - lag, 0))
            if lag > 0:
                wanted = self.books.wanted(action, instance, max(iteration - lag, self._segment[0]))
            held = self.books.version[instance]
            assert held == wanted, f"{name} reads version {held} of {instance}, not {wanted}"

    def _goes_on(self, action: Action, iteration: int, name: str) -> None:
        """Pieces of a rollout run on the same weights; a resumed rollout has newer ones."""
        if action.kind != "run" or not self.plan.graph.has_node(str(action.node)):
            return
        node = self.plan.graph.node(str(action.node))
        if node.op.use != "rollout":
            return
        held = self.books.version[str(action.instance)]
        if action.ends_first:
            self._next_piece(action, iteration, name)
        if node.resumes is not None:
            before = self._sampled.get((node.resumes, iteration))
            assert before is not None, f"{name} goes on with what nobody knows"
            wanted = before + self._newer(action, iteration)
            assert held == wanted, f"{name} goes on with {held} after {before}, not {wanted}"
        self._sampled[node.name, iteration] = held

    def _next_piece(self, action: Action, iteration: int, name: str) -> None:
        """Pieces run in order, on the same weights, and the cache is kept between them."""
        assert action.chunk is not None
        instance = str(action.instance)
        held, lost = self.books.version[instance], self.books.lost[instance]
        done, before, kept = self._open.setdefault((str(action.node), iteration), (0, held, lost))
        assert done == action.chunk.index, f"{name} starts when {done} pieces are over"
        assert before == held, f"{name} goes on with version {held} after {before}"
        assert kept == lost, f"{name} goes on, and the cache of {instance} was given away"

    def _newer(self, action: Action, iteration: int) -> int:
        """How many more updates a resumed rollout has than the paused one: those of an iteration.

        None where `staleness` reaches back before the segment. None in later trips of a loop
        either, which are paused and resumed over the same weights.
        """
        last = iteration - self.plan.staleness
        later = action.trip is not None and any(trip.index for trip in action.trip.levels)
        if last < self._segment[0] or later:
            return 0
        return self.books.updates_in(self.books.models[str(action.instance)], last)

    def _piece_over(self, action: Action, iteration: int) -> None:
        """Count a piece of a rollout that is not over yet; after the last one nothing is open."""
        if not action.ends_first:
            return
        assert action.chunk is not None
        place = (str(action.node), iteration)
        done, before, kept = self._open[place]
        self._open[place] = done + 1, before, kept
        if done + 1 == action.chunk.count:
            del self._open[place]

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
        self.rows.finish(action, iteration)
        self._piece_over(action, iteration)
        self.rows.leave_out(self.trips.finish(action, completion), iteration)

    def iteration_done(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Check that iterations are reported in order, whole, with the numbers of all actions."""
        assert iteration == self.reported, f"iteration {iteration} is told after {self.reported}"
        if iteration == self._segment[1] - 1:
            assert not self.running, f"iteration {iteration} drains while {self.running} run"
        closing = iteration >= self.end
        for action in self.plan.actions:
            due = action.closing if closing else action.due(iteration)
            if self.trips.left_out(action.id, iteration):
                over = (action.id, iteration) in self.rows.done
                assert not over, f"{action.id} of {iteration} ran, though its loop was over"
            elif action.part is None and due and not (closing and action.kind == "reshard"):
                over = (action.id, iteration) in self.rows.done
                assert over, f"iteration {iteration} is told before {action.id} is over"
                key = f"{logged_as(action)}/n"
                gate = action.trip is not None and action.trip.gate
                told = gate or metrics.get(key) == iteration
                assert told, f"{key} of {iteration} is {metrics.get(key)}"
        self.reported += 1

    def _drained(self, name: str) -> None:
        """Between two segments nothing runs and no rows are kept; then the next one begins."""
        assert not self.running, f"{name} starts while {self.running} of a segment before run"
        self.rows.check_drained()
        assert not self._open, f"rollouts are left in pieces: {sorted(self._open)}"
        self._segment = self._next_segment(self.reported)
        self.rows.clear()
        self._sampled.clear()
        self.trips.reached.clear()

    def finish(self) -> None:
        """Check what has to hold after the run: all of it is over, and nothing is kept."""
        assert not self.running, f"the run is over while {self.running} run"
        self.rows.check_drained()
        assert not self._open, f"rollouts are left in pieces: {sorted(self._open)}"
        assert self.reported >= self.end, f"{self.reported} of {self.end} iterations are done"


class Books:
    """Weights, versions and bytes of the machine.

    A version counts the updates of the model's nodes, piece by piece: iteration i begins with as
    many as the graph has due before it; None is weights that were discarded. `lost` counts how
    often the cache of keys and values of each instance was given away.
    """

    def __init__(self, plan: Plan, start: int) -> None:
        self.plan = plan
        nodes = {node.name: node for node in plan.graph.nodes}
        self._nodes = {a.id: nodes[a.node] for a in plan.actions if a.node in nodes}
        self.parts: dict[str, Part] = {part.name: part for part in plan.parts}
        self.models = {instance.name: instance.model for instance in plan.instances}
        self.in_part = {i.name for i in plan.instances if _filled_in_part(plan, i.name)}
        self.updates = {m.name: _writers(plan, m.name) for m in plan.graph.models}
        self._counts = {model: [0] for model in self.updates}
        self.version: dict[str, int | None] = dict.fromkeys(self.models, 0)
        for instance in plan.instances:
            if instance.trained:
                self.version[instance.name] = self._updates_before(instance.model, start)
        self.awake = set(plan.awake_at_start)
        self.in_use: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self._moving: dict[str, int | None] = {}
        self._on_host: set[str] = set()
        self.held: dict[int, int] = defaultdict(int)
        self.hosts: dict[int, int] = defaultdict(int)
        discarded = {action.part for action in plan.actions if action.mode == "discard"}
        for part in plan.parts:
            for device in part.stays:
                self.held[device] += part.size or 0
            self._hold(part, (part.size or 0) if part.name in self.awake else part.residual)
            if part.name not in self.awake and part.name not in discarded:
                self._copy_on_host(part.name)
        for kept in plan.kept:
            for host in plan.hosts_keeping(kept):
                self.hosts[host] += kept.size

        for each in plan.saved:
            for device in plan.instance(each.instance).devices:
                self.hosts[plan.host_of(device)] += each.size

    def _hold(self, part: Part, size: int) -> None:
        for device in part.leaves:
            self.held[device] += size

    def _copy_on_host(self, name: str) -> None:
        """Book the copy of a part that sleeps, once."""
        if name not in self._on_host:
            self._on_host.add(name)
            for device in self.parts[name].leaves:
                self.hosts[self.plan.host_of(device)] += self.parts[name].size or 0

    def _drop_on_host(self, name: str) -> None:
        if name in self._on_host:
            self._on_host.remove(name)
            for device in self.parts[name].leaves:
                self.hosts[self.plan.host_of(device)] -= self.parts[name].size or 0

    def wanted(self, action: Action, instance: str, version: int) -> int:
        """How many updates the weights have seen that an action knows as `version`."""
        model = self.models[instance]
        before = self._updates_before(model, version)
        for name in self.updates[model] if action.id in self.updates[model] else ():
            if name == action.id:
                break
            before += self._nodes[name].due(version)
        return before

    def _updates_before(self, model: str, iteration: int) -> int:
        """How many runs that write a model are due before an iteration."""
        counts = self._counts[model]
        while len(counts) <= iteration:
            counts.append(counts[-1] + self.updates_in(model, len(counts) - 1))
        return counts[iteration]

    def updates_in(self, model: str, iteration: int) -> int:
        """How many runs that write a model are due in an iteration."""
        return sum(self._nodes[name].due(iteration) for name in self.updates[model])

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
        elif action.kind == "reshard":
            self._moving[action.id] = self.version[str(action.instance)]
        for need in action.needs:
            assert need in self.awake, f"{name} needs {need}, which sleeps"
            self.in_use[need] += 1
        for device in action.devices:
            self.held[device] += action.cost.transient or 0
        self._fits(action, name)

    def _leave(self, action: Action) -> None:
        part = self.parts[str(action.part)]
        self.lost[part.instance] += part.kind == "pool"
        if action.mode == "offload":
            self._copy_on_host(part.name)
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
        most, budget = max(self.hosts.values(), default=0), self.plan.budget(HOST)
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
            self._drop_on_host(str(action.part))
        elif action.kind == "sleep":
            part = self.parts[str(action.part)]
            self._hold(part, part.residual - (part.size or 0))
        elif action.kind == "reshard":
            moved = self._moving.pop(action.id)
            for target in action.targets:
                self._fill(target, moved)
        elif action.writes:
            instance = str(action.instance)
            self.version[instance] = self.wanted(action, instance, iteration) + 1

    def _fill(self, target: str, version: int | None) -> None:
        """Adapters, or what is not frozen, do not make weights whole that were discarded."""
        if self.version[target] is not None or target not in self.in_part:
            self.version[target] = version


def _filled_in_part(plan: Plan, name: str) -> bool:
    """Whether a reshard leaves some weights of an instance; engines load frozen ones too."""
    instance = plan.instance(name)
    model = plan.graph.model(instance.model)
    frozen = bool(model.freeze) and not instance.engine_plan.own_process
    return model.lora is not None or frozen


def _writers(plan: Plan, model: str) -> list[str]:
    """The runs that write a model, in the order in which they have to: node by node."""
    runs = [action for action in plan.actions if action.kind == "run" and not _only_adds(action)]
    runs.sort(key=lambda action: action.chunk.index if action.chunk else 0)
    return [a.id for node in plan.graph.updates(model) for a in runs if a.node == node.name]


def _only_adds(action: Action) -> bool:
    """Whether a chunk of an update leaves the step to a later one; of other nodes any chunk."""
    chunk = action.chunk
    return chunk is not None and chunk.by == "groups" and chunk.index + 1 < chunk.count
