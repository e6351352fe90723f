"""What the verifier's rules look things up in: a plan's data, and the orderings that are proven.

Orderings are those of `unrolled`, in turns. Until actions have turns, they are given some here
that no distance contradicts: each runs ahead as far as its dependencies ask.

This file states no rule, and shares no code with the passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rlflow.graph.graph import Node
from rlflow.scheduler.plan.plan import Action, Dep, Instance, Lane, Part, Plan
from rlflow.scheduler.verify.unrolled import Unrolled

ITERATIONS = 3


def runs_only_with(one: Action, other: Action) -> bool:
    """Whether an action is due only in iterations in which another one is."""
    if one.every % other.every or (one.phase - other.phase) % other.every:
        return False
    (start, stop), (first, end) = one.within, other.within
    return first <= start and (end is None or (stop is not None and stop <= end))


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A plan with the look-ups that rules share, each computed when a rule first asks."""

    plan: Plan
    derived: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What several rules of one file derive from these look-ups, computed once."""

    @cached_property
    def actions(self) -> dict[str, Action]:
        """Actions by id."""
        return {action.id: action for action in self.plan.actions}

    @cached_property
    def instances(self) -> dict[str, Instance]:
        """Instances by name."""
        return {instance.name: instance for instance in self.plan.instances}

    @cached_property
    def parts(self) -> dict[str, Part]:
        """Parts by name."""
        return {part.name: part for part in self.plan.parts}

    @cached_property
    def averaged(self) -> dict[str, str]:
        """The models that are averages, and what of."""
        nodes = ((str(n.model), dict(n.params)) for n in self.plan.graph.nodes)
        return {model: str(said["averages"]) for model, said in nodes if "averages" in said}

    @cached_property
    def expected_parts(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        """Instance, kind and devices of every part that the instances should have."""
        found = {}
        for i in self.plan.instances:
            found[i.weights] = (i.name, "weights", i.devices)
            if i.options is not None:
                found[f"{i.name}/pool"] = (i.name, "pool", i.devices)
            if i.trained and i.model not in self.averaged:
                found[i.gradients] = (i.name, "gradients", i.devices)
                found[i.optimizer] = (i.name, "optimizer", i.devices)
                if i.hosts_activations:
                    found[f"{i.name}/activations"] = (i.name, "activations", i.devices)
        for node, (first, *_) in self.runs.items():
            served = self.instances.get(str(first.instance))
            if first.ends_first and (served is None or served.options is None):
                found[f"{node}/cache"] = (str(first.instance), "cache", first.devices)
        return found

    @cached_property
    def runs(self) -> dict[str, tuple[Action, ...]]:
        """The run actions of every node, one for each chunk, by the node's name."""
        found: dict[str, list[Action]] = {}
        for action in self.plan.actions:
            if action.kind == "run":
                found.setdefault(str(action.node), []).append(action)
        return {node: tuple(actions) for node, actions in found.items()}

    def declared(
        self, node: Node, instance: Instance | None
    ) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
        """What a node's run needs, reads and writes where it is served by an instance."""
        if instance is None:
            return (), (), ()
        averaged = self.averaged.get(str(node.model))
        if node.op.use == "train" and averaged is not None:
            of = [i for i in self.plan.instances if i.model == averaged and i.trained]
            needs = (instance.weights, *(i.weights for i in of))
            reads = ((instance.name, 0), *((i.name, -1) for i in of))
            return needs, reads, ((instance.name, -1),)
        if node.op.use == "train":
            needs = (instance.weights, instance.gradients, instance.optimizer)
            return needs, ((instance.name, 0),), ((instance.name, -1),)
        if dict(node.params).get("adapters") == "off":
            return (instance.weights,), (), ()
        kept = (f"{node.name}/cache",) if self.runs[node.name][0].ends_first else ()
        kept = kept if instance.options is None else (f"{instance.name}/pool",)
        needs, reads = (instance.weights, *kept), ((instance.name, self.plan.graph.lag(node)),)
        if "drafter" in dict(node.params):
            beside, lag = self._drafter(node, instance), self.plan.graph.lag(node) + 1
            return (instance.weights, f"{beside}/weights", *kept), (*reads, (beside, lag)), ()
        return needs, reads, ()

    def _drafter(self, node: Node, instance: Instance) -> str:
        """The instance of a rollout's drafter: in its engine, or whole where the rollout runs.

        Its name; what is no name where there is not just one.
        """
        engine = None if instance.options is None else instance.name
        found = [
            i.name
            for i in self.plan.instances
            if i.model == dict(node.params)["drafter"]
            and i.pool == instance.pool
            and i.inside == engine
        ]
        return found[0] if len(found) == 1 else "a drafter"

    def rows_on(self, action: Action) -> tuple[int, ...]:
        """The devices of an action that may have rows: of an engine's ranks the first ones."""
        held = self.instances.get(action.instance or "")
        if held is None or held.options is None:
            return action.devices
        return tuple(d for n, d in enumerate(action.devices) if n % held.row_ranks == 0)

    @cached_property
    def updates(self) -> dict[str, list[Action]]:
        """The run actions that write each trained model, in the order declared."""
        found: dict[str, list[Action]] = {}
        for node in self.plan.graph.nodes:
            if node.op.use == "train":
                runs = sorted(self.runs[node.name], key=lambda a: a.chunk.index if a.chunk else 0)
                runs = [a for a in runs if not self.only_adds(a)]
                found.setdefault(str(node.model), []).extend(runs)
        return found

    def only_adds(self, a: Action) -> bool:
        """Whether it is a chunk of an optimizer step that adds gradients and leaves the weights."""
        chunk = a.chunk
        if a.kind != "run" or chunk is None or chunk.by != "groups":
            return False
        train = self.plan.graph.node(str(a.node)).op.use == "train"
        return train and chunk.index + 1 < chunk.count

    @cached_property
    def added_to(self) -> frozenset[str]:
        """The instances whose gradients stay from chunk to chunk."""
        return frozenset(str(a.instance) for a in self.plan.actions if self.only_adds(a))

    @cached_property
    def reshards(self) -> dict[str, list[Action]]:
        """The reshards into each instance."""
        found: dict[str, list[Action]] = {}
        for action in self.plan.actions:
            for target in action.targets:
                found.setdefault(target, []).append(action)
        return found

    def writers(self, instance: str) -> list[Action]:
        """The actions that write an instance of a model that learns, in their order."""
        held = self.instances[instance]
        return self.updates[held.model] if held.trained else self.reshards.get(instance, [])

    @cached_property
    def queues(self) -> dict[tuple[int, Lane], tuple[str, ...]]:
        """The ids of the actions on each lane of each device, in the order of the list.

        Devices that the same actions take have one queue: the same object.
        """
        sets: dict[tuple[tuple[int, ...], Lane], list[int]] = {}
        for place, action in enumerate(self.plan.actions):
            sets.setdefault((action.devices, action.lane), []).append(place)
        users: dict[tuple[int, Lane], list[int]] = {}
        for number, (devices, lane) in enumerate(sets):
            for device in devices:
                users.setdefault((device, lane), []).append(number)
        places, known = list(sets.values()), dict[tuple[int, ...], tuple[str, ...]]()
        for own in {tuple(numbers): None for numbers in users.values()}:
            line = sorted(place for number in own for place in places[number])
            known[own] = tuple(self.plan.actions[place].id for place in line)
        return {lane: known[tuple(numbers)] for lane, numbers in users.items()}

    @cached_property
    def one_process(self) -> bool:
        """Whether everything runs in one process, so that rows need not be carried."""
        return self.plan.backend == "local"

    def meets(self, action: Action) -> bool:
        """Whether the ranks of an action meet in collectives: those of an instance or a reshard."""
        instance = self.instances.get(action.instance or "")
        if action.kind == "run" and instance is not None:
            return len(instance.devices) > 1
        return action.kind == "reshard" and len(action.devices) > 1

    @cached_property
    def ahead(self) -> dict[str, int]:
        """How far each action runs ahead, by id: as stated, or as far as distances below 0 ask.

        Distances are those of a difference system: B of distance d before A asks for
        ahead(B) >= ahead(A) - d. Relaxed as by Bellman and Ford; a cycle of distance below 0 has
        no answer, and ends the rounds.
        """
        found = {action.id: action.ahead for action in self.plan.actions}
        if any(found.values()) or not self._backwards:
            return found
        for _ in self.plan.actions:
            changed = False
            for action in self.plan.actions:
                for dep in action.after:
                    if found[dep.action] < found[action.id] - dep.distance:
                        found[dep.action] = found[action.id] - dep.distance
                        changed = True
            if not changed:
                break
        return found

    @cached_property
    def _backwards(self) -> bool:
        return any(dep.distance < 0 for action in self.plan.actions for dep in action.after)

    def turns(self, action: Action, dep: Dep) -> int:
        """The distance of a dependency in turns."""
        if not self._backwards:
            return dep.distance
        return dep.distance + self.ahead[dep.action] - self.ahead[action.id]

    @cached_property
    def sorted_ids(self) -> list[str]:
        """Ids so that each follows what it waits for in its own turn; fewer on a cycle."""
        waiting = dict.fromkeys(self.actions, 0)
        followers: dict[str, list[str]] = {name: [] for name in waiting}
        for action in self.plan.actions:
            for dep in action.after:
                if self.turns(action, dep) <= 0:
                    followers[dep.action].append(action.id)
                    waiting[action.id] += 1
        done = [name for name, count in waiting.items() if count == 0]
        for name in done:
            for follower in followers[name]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    done.append(follower)
        return done

    @cached_property
    def number(self) -> dict[str, int]:
        """The place of every action in the list."""
        return {action.id: place for place, action in enumerate(self.plan.actions)}

    @cached_property
    def unrolled(self) -> Unrolled:
        """What comes before what over unrolled turns.

        As many turns as rules ask of: a version is read `staleness` + 2 iterations after it was
        written at the most, by an action that runs `ahead` of the one that wrote it.
        """
        number = self.number
        waits = [
            [(number[dep.action], self.turns(action, dep)) for dep in action.after]
            for action in self.plan.actions
        ]
        order = [number[name] for name in self.sorted_ids]
        reach = ITERATIONS + self.plan.graph.staleness + max(self.ahead.values(), default=0)
        return Unrolled(waits=waits, order=order, turns=reach)

    def precedes(self, first: str, second: str, gap: int) -> bool:
        """Whether `first` of turn t is always over before `second` of t + gap starts."""
        return self.unrolled.precedes(self.number[first], self.number[second], gap)

    def comes_before(self, first: str, second: str, gap: int) -> bool:
        """Whether `first` of iteration i is always over before `second` of i + gap starts."""
        return self.precedes(first, second, gap + self.ahead[first] - self.ahead[second])
