"""Figures of a candidate that need no plan: what it takes at least, and what cannot fit.

No plan of a candidate has a shorter period than `Bounds.period`: a device does its runs one
after another, and a model's next iteration waits for its update, and for averages that are taken
of it. What moves between devices, and between devices and the host, comes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlflow.graph.graph import Graph, Node
from rlflow.graph.rules.steps import steps_in_order
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.microbatches import fitted_to_room
from rlflow.scheduler.engines.engines import engine_parts, with_pool
from rlflow.scheduler.engines.updates import least_update
from rlflow.scheduler.passes.bind.contexts import with_way_to_attend
from rlflow.scheduler.passes.bind.instances import layout_findings
from rlflow.scheduler.passes.bind.row_checks import division_findings
from rlflow.scheduler.plan.plan import Instance, Plan, Spread
from rlflow.scheduler.plan.row_layout import cut_groups
from rlflow.scheduler.search.known_costs import repeats_after
from rlflow.scheduler.search.layouts import Layout, ways_to_train
from rlflow.scheduler.search.ranges import Range, alike
from rlflow.scheduler.search.space import (
    Candidate,
    Choice,
    PlacedUse,
    average_instance,
    layouts_of,
    role_instance,
)

Why = Literal["memory", "layout", "rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A role with a layout on some devices.

    `seconds` of each node, with those in which new weights come to an engine before the first;
    `busy` of a device in an iteration; `held` bytes while awake, `need` at the least while one of
    its nodes runs, of a budget of `room`. `why` says what keeps it from fitting, and `at` which
    node.
    """

    seconds: tuple[float, ...]
    busy: float
    held: int
    need: int
    room: int
    why: Why | None
    at: str


class Figures:
    """The figures of roles, worked out once each."""

    def __init__(self, plan: Plan, costs: Costs, roles: tuple[PlacedUse, ...]) -> None:
        self.plan, self.costs, self.roles = plan, costs, roles
        self._known: dict[tuple[int, Choice], Figure] = {}
        self._fitting: dict[tuple[int, Range], tuple[Choice, ...]] = {}
        self._beyond: dict[int, bool] = {}
        self._grain = repeats_after(costs.cluster)

    def of(self, role: int, choice: Choice) -> Figure:
        """The figures of a role's choice: those of the same devices of the first hosts."""
        key = role, choice
        if key not in self._known:
            first = role, choice.moved(-self._beside(choice.range))
            if first not in self._known:
                self._known[first] = self._figure(self.roles[role], first[1])
            self._known[key] = self._known[first]
        return self._known[key]

    def _beside(self, where: Range) -> int:
        """How many devices come before the host, or the rack, of a range, if all are alike."""
        return where[0] // self._grain * self._grain if self._grain else 0

    def fitting(self, role: int, where: Range) -> tuple[Choice, ...]:
        """The choices of a role on a range that fit by themselves and are worth a look.

        Fastest first, with other ways to train; see `_worth` for those that are left out.
        """
        key, before = (role, where), self._beside(where)
        if key not in self._fitting and before:
            first = self.fitting(role, (where[0] - before, where[1] - before))
            self._fitting[key] = tuple(choice.moved(before) for choice in first)
        elif key not in self._fitting:
            kept = self._worth(role, self.options(role, where))
            self._fitting[key] = tuple(self._worth(role, self.with_ways(role, kept)))
        return self._fitting[key]

    def with_ways(self, role: int, choices: Sequence[Choice]) -> list[Choice]:
        """The choices of a role, and where that trains each with its other ways to do so."""
        trained, cpu = self.roles[role].trained, self.costs.cluster.is_cpu
        among = choices if trained else ()
        ways = (Choice(*c.range, w) for c in among for w in ways_to_train(c.layout, on_host=cpu))
        return [*choices, *ways]

    def _worth(self, role: int, choices: Sequence[Choice]) -> list[Choice]:
        """Those that fit, of which no other is as fast and neither holds nor needs more.

        Of those that have rows whole no other such is: rollouts share no others' weights.
        """
        fits = [c for c in choices if self.of(role, c).why is None]
        fits.sort(key=lambda c: (self.of(role, c).busy, self.of(role, c).held, c))
        found: list[tuple[Choice, Figure]] = []
        for choice in fits:
            one, rows = self.of(role, choice), choice.layout.whole_rows
            before = [k for other, k in found if other.layout.whole_rows or not rows]
            if not any(k.held <= one.held and k.need <= one.need for k in before):
                found.append((choice, one))
        return [choice for choice, _ in found]

    def options(self, role: int, where: Range) -> tuple[Choice, ...]:
        """All choices of a role on a range, whether they fit or not."""
        made = self.roles[role]
        if not alike(where, self.costs.cluster):
            return ()
        shape = self.costs.shapes[made.model]
        rows = (self.costs.load(node, 1).longest_row for node in made.nodes if not made.rollout)
        layouts = layouts_of(
            made,
            where,
            shape,
            self.costs.cluster,
            longest=max(rows, default=0),
            staged=self._beyond_a_host(role),
        )
        return tuple(Choice(*where, layout) for layout in layouts)

    def _beyond_a_host(self, role: int) -> bool:
        """Whether the devices of a host, all together, have no room for what a role holds."""
        if role not in self._beyond:
            made, cluster = self.roles[role], self.costs.cluster
            count = -(-cluster.count // cluster.hosts)
            alone = role_instance(made, Choice(0, count, Layout(fsdp=count)))
            held = max(self._awake(node, alone, alone, made.nodes) for node in made.nodes)
            self._beyond[role] = cluster.hosts > 1 and held > self.plan.budget(0)
        return self._beyond[role]

    def why(self, role: int, where: Range) -> Why:
        """What keeps a role from a range: of the layouts, the one that comes nearest."""
        reasons = {self.of(role, choice).why for choice in self.options(role, where)}
        known: tuple[Why, ...] = ("memory", "rows", "layout")
        return next((why for why in known if why in reasons), "layout")

    def _figure(self, role: PlacedUse, choice: Choice) -> Figure:
        instance = self.costs.staged(role_instance(role, choice))
        room = min(self.plan.budget(device) for device in instance.devices)
        refused = layout_findings(instance, self.plan, self.costs)
        why: Why | None = "layout" if refused else None
        if why is None:
            instance = self._fitted(instance, role, choice, room)
        seconds, need, held, at = list[float](), 0, 0, role.nodes[0].name
        for node in role.runs if why is None else ():
            own = average_instance(node, instance) if node.averages else instance
            parts = instance.row_parts if node.op.dispatched not in ("all", "first") else 1
            if why is None and _undivided(self.plan.graph, node, instance, parts):
                why, at = "rows", node.name
            awake = self._awake(node, instance, own, role.nodes)
            held = max(held, awake)
            if awake > room:  # Its seconds do not matter.
                beside = 0 if own.engine_plan.own_process else self.costs.held(node, own, parts)
            else:
                cost = self.costs.run(node, own, parts)
                seconds.append((cost.seconds or 0.0) + self._renewed(role, node, own))
                beside = cost.transient or 0
            if awake + beside > need:
                need = awake + beside
                at = node.name if why is None else at
        if why is None and need > room:
            why = "memory"
        busy = sum(s / node.every for s, node in zip(seconds, role.runs, strict=False))
        return Figure(
            seconds=tuple(seconds), busy=busy, held=held, need=need, room=room, why=why, at=at
        )

    def _renewed(self, role: PlacedUse, node: Node, instance: Instance) -> float:
        """Seconds that an engine waits for new weights at least, before the first of its nodes."""
        first = next((each for each in role.nodes if each.every == 1), None)
        if node != first or role.source is None or not instance.engine_plan.own_process:
            return 0.0
        return least_update(instance, self.costs)

    def _fitted(self, instance: Instance, role: PlacedUse, choice: Choice, room: int) -> Instance:
        """An instance as the compiler would have it where it is alone on its devices."""
        if instance.engine_plan.own_process:
            return with_pool(instance, role.nodes, room, self.costs)
        instance = with_way_to_attend(instance, role.nodes, {}, self.costs)
        free = not choice.layout.recomputes
        return fitted_to_room(instance, role.nodes, room, self.costs, free=free)

    def _awake(self, node: Node, instance: Instance, own: Instance, nodes: Sequence[Node]) -> int:
        """Bytes that a node cannot do without while it runs, of an average both models' weights."""
        if instance.engine_plan.own_process:
            return sum(part.size or 0 for part in engine_parts(instance, nodes, self.costs))
        held = self.costs.weights(instance) or 0
        if own != instance:
            held += self.costs.weights(own) or 0
        elif node.op.use == "train":
            held += self.costs.gradients(instance) or 0
            held += self.costs.moments(instance) or 0
        return held


def _undivided(graph: Graph, node: Node, instance: Instance, parts: int) -> bool:
    """Whether a node's rows do not lie in so many parts."""
    if parts == 1 or not node.inputs:
        return False
    spread = Spread(
        parts=instance.row_groups,
        rule="balanced" if node.op.dispatched == "split" else node.op.dispatched,
    )
    return bool(division_findings(graph, node, cut_groups(graph, node, spread)))


class PeriodBounds:
    """Lower bounds of the period of candidates of one graph."""

    def __init__(self, graph: Graph, figures: Figures) -> None:
        self.figures = figures
        self.names = graph.order()
        place = {name: index for index, name in enumerate(self.names)}
        nodes = [graph.node(name) for name in self.names]
        self._sources = [[place[source] for source in _waited_for(graph, n)] for n in nodes]
        self._every = [node.every for node in nodes]
        self._cut = [_may_be_cut(node) for node in nodes]
        host = [figures.costs.run(n, None, 1).seconds if n.model is None else 0.0 for n in nodes]
        self._host = [seconds or 0.0 for seconds in host]
        self._at = [[place[node.name] for node in role.runs] for role in figures.roles]
        self._cycles = [
            (
                [place[node.name] for node in _waiting(graph, model.name)],
                [node.op.use == "rollout" for node in _waiting(graph, model.name)],
                place[graph.updates(model.name)[-1].name],
            )
            for model in graph.models
            if graph.updates(model.name)
        ]
        taken = [node for node in nodes if node.averages]
        updates = [graph.updates(str(node.averages))[-1] for node in taken]
        self._cycles += [
            ([place[update.name]], [False], place[node.name])
            for node, update in zip(taken, updates, strict=True)
        ]

    def period(self, candidate: Candidate) -> float:
        """Seconds that an iteration takes at least."""
        return max(self.resource(candidate), self.recurrence(candidate))

    def resource(self, candidate: Candidate) -> float:
        """The runs of the busiest device, one after another."""
        found = 0.0
        choices = candidate.choices
        for start in {choice.start for choice in choices}:
            busy = sum(
                self.figures.of(role, choice).busy
                for role, choice in enumerate(choices)
                if choice.start <= start < choice.stop
            )
            found = max(found, busy)
        return found

    def recurrence(self, candidate: Candidate) -> float:
        """The longest chain from a use of a model's weights to its update, over the lag.

        An average waits for the update that it is taken of, and the next one for the average. Of
        a chain that is cut into chunks each op takes at least one of them.
        """
        seconds = list(self._host)
        for role, choice in enumerate(candidate.choices):
            times = self.figures.of(role, choice).seconds
            for place, time in zip(self._at[role], times, strict=False):
                seconds[place] = time
        for place, every in enumerate(self._every):
            if every > 1:
                seconds[place] = 0.0
            elif self._cut[place]:
                seconds[place] /= candidate.stream
        found = 0.0
        for readers, behind, update in self._cycles:
            for lag in {0, candidate.staleness}:
                starts = {
                    reader
                    for reader, rollout in zip(readers, behind, strict=True)
                    if (candidate.staleness if rollout else 0) == lag
                }
                starts |= {update} if lag == 0 else set()
                found = max(found, self._longest(seconds, starts, update) / (1 + lag))
        return found

    def _longest(self, seconds: Sequence[float], starts: set[int], end: int) -> float:
        """Seconds of the longest chain of data from one of `starts` to `end`; 0 for none."""
        reached: list[float | None] = [None] * len(seconds)
        for place in range(end + 1):
            before = [reached[s] for s in self._sources[place]]
            known = [time for time in before if time is not None]
            if known or place in starts:
                reached[place] = max(known, default=0.0) + seconds[place]
        return reached[end] or 0.0

    def crowding(self, candidate: Candidate) -> int:
        """Bytes that do not fit the fullest device with everything awake, about; below 0 room."""
        most = -min(self.figures.plan.budgets.values())
        choices = candidate.choices
        for start in {choice.start for choice in choices}:
            here = [
                (role, self.figures.of(role, choice))
                for role, choice in enumerate(choices)
                if choice.start <= start < choice.stop
            ]
            awake = sum(f.held for r, f in here if not self.shares(candidate, r))
            beside = max(f.need - f.held for _, f in here)
            most = max(most, awake + beside - min(f.room for _, f in here))
        return most

    def shares(self, candidate: Candidate, role: int) -> bool:
        """Whether a rollout uses the weights that are trained on its devices."""
        source = self.figures.roles[role].source
        if source is None:
            return False
        here, there = candidate.choices[role], candidate.choices[source]
        apart = here.layout.own or here.layout.engine
        return here.range == there.range and here.layout.sizes == there.layout.sizes and not apart

    def estimate(self, candidate: Candidate) -> float:
        """The bound, and seconds to bring out and in again what does not fit, about."""
        link = self.figures.costs.cluster.kind.host_link
        return self.period(candidate) + 2 * max(self.crowding(candidate), 0) / link


def _waited_for(graph: Graph, node: Node) -> tuple[str, ...]:
    """The nodes that one comes after within an iteration: whose fields it reads, or weights."""
    updates = graph.updates(node.averages)[-1:] if node.averages else ()
    return (*node.sources, *(update.name for update in updates))


def _waiting(graph: Graph, model: str) -> list[Node]:
    """Who reads the weights that the last iteration's update wrote, or `staleness` before it."""
    return [n for n in graph.readers(model) if n.every == 1 and n.drafter != model]


def _may_be_cut(node: Node) -> bool:
    """Whether streaming may work on a node's groups some at a time."""
    op = node.op
    along = op.per in ("row", "group") and op.rows in ("expand", "same") and not op.chooses
    return steps_in_order(node) > 1 or (along and op.use != "train")
