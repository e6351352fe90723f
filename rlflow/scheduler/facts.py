"""What the verifier's rules look things up in: orderings that are proven, memory replayed.

Orderings are proven over unrolled instances (action, iteration): `Facts.before[k][b]`
is the set of actions whose instance of iteration i has finished whenever `b` of iteration
i + k starts, in every interleaving that `after` allows. As no distance is negative, a
path between two instances stays between their iterations, so this holds for every i.
An instance that an action skips (`every`, `first`) starts nothing, and is over when all
that it comes after is over.

This file states no rule, and shares no code with the passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rlflow.graph.graph import Node
from rlflow.scheduler.plan import HOST, Action, Instance, Part, Plan

ITERATIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One iteration's memory: bytes on each device during each action, and what went wrong."""

    loads: tuple[dict[int, int], ...]
    broken: tuple[str, ...]

    def most(self, positions: list[int], devices: tuple[int, ...]) -> int:
        """The most bytes that one of the devices holds during the actions at these positions."""
        return max((self.loads[n].get(d, 0) for n in positions for d in devices), default=0)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A plan with the look-ups that rules share, each computed when a rule first asks."""

    plan: Plan

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
    def expected_parts(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        """Instance, kind and devices of every part that the instances should have."""
        found = {}
        for i in self.plan.instances:
            found[i.weights] = (i.name, "weights", i.devices)
            if i.trained:
                found[i.gradients] = (i.name, "gradients", i.devices)
                found[i.optimizer] = (i.name, "optimizer", i.devices)
        return found

    @cached_property
    def runs(self) -> dict[str, Action]:
        """The run action of every node, by the node's name."""
        return {str(a.node): a for a in self.plan.actions if a.kind == "run"}

    def declared(
        self, node: Node, instance: Instance | None
    ) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
        """What a node's run needs, reads and writes where it is served by an instance."""
        if instance is None:
            return (), (), ()
        if node.op.use == "train":
            needs = (instance.weights, instance.gradients, instance.optimizer)
            return needs, ((instance.name, 0),), ((instance.name, -1),)
        return (instance.weights,), ((instance.name, self.plan.graph.lag(node)),), ()

    @cached_property
    def updates(self) -> dict[str, list[Action]]:
        """The run actions that write each trained model, in the order declared."""
        found: dict[str, list[Action]] = {}
        for node in self.plan.graph.nodes:
            if node.op.use == "train":
                found.setdefault(str(node.model), []).append(self.runs[node.name])
        return found

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
    def queues(self) -> dict[int, list[str]]:
        """The ids of each device's actions, in the order of the list."""
        found: dict[int, list[str]] = {}
        for action in self.plan.actions:
            for device in action.devices:
                found.setdefault(device, []).append(action.id)
        return found

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
    def sorted_ids(self) -> list[str]:
        """Ids so that each follows what it waits for in its own iteration; fewer on a cycle."""
        waiting = {a.id: sum(dep.distance == 0 for dep in a.after) for a in self.plan.actions}
        followers: dict[str, list[str]] = {name: [] for name in waiting}
        for action in self.plan.actions:
            for dep in action.after:
                if dep.distance == 0:
                    followers[dep.action].append(action.id)
        done = [name for name, count in waiting.items() if count == 0]
        for name in done:
            for follower in followers[name]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    done.append(follower)
        return done

    @cached_property
    def bit(self) -> dict[str, int]:
        """One bit for every action, for sets of actions held in one int."""
        return {name: 1 << index for index, name in enumerate(self.actions)}

    @cached_property
    def before(self) -> list[dict[str, int]]:
        """For k = 0, 1, ...: the set of actions of iteration i over before each one of i + k."""
        sets: list[dict[str, int]] = []
        for k in range(ITERATIONS + self.plan.graph.staleness):
            here: dict[str, int] = {}
            sets.append(here)
            for name in self.sorted_ids:
                mask = 0
                for dep in self.actions[name].after:
                    if dep.distance <= k:
                        mask |= sets[k - dep.distance][dep.action]
                    if dep.distance == k:
                        mask |= self.bit[dep.action]
                here[name] = mask
        return sets

    def precedes(self, first: str, second: str, gap: int) -> bool:
        """Whether `first` of iteration i is always over before `second` of i + gap starts.

        False where it is not known: `before` reaches a few iterations.
        """
        known = 0 <= gap < len(self.before)
        return known and bool(self.before[gap][second] & self.bit[first])

    @cached_property
    def replay(self) -> Replay:
        """The list of actions played once from the parts awake at the start."""
        awake: set[str] = set()
        held = {device: 0 for devices in self.plan.pools.values() for device in devices}
        loads, broken = [], []

        def hold(part: str, sign: int) -> None:
            (awake.add if sign > 0 else awake.discard)(part)
            for device in self.parts[part].devices:
                held[device] += sign * (self.parts[part].size or 0)

        for part in self.plan.awake_at_start:
            hold(part, +1)
        for a in self.plan.actions:
            part = a.part or ""
            if a.kind in ("sleep", "wake") and (part in awake) is (a.kind == "wake"):
                state = "awake" if part in awake else "asleep"
                broken.append(f"{a.id}: {part} is {state} already")
            elif a.kind == "wake":
                hold(part, +1)
            broken += [
                f"{a.id} needs {need}, which is asleep" for need in a.needs if need not in awake
            ]
            extra = a.cost.transient or 0
            loads.append({d: held[d] + extra for d in a.devices if d != HOST})
            if a.kind == "sleep" and part in awake:
                hold(part, -1)
        for part in sorted(awake.symmetric_difference(self.plan.awake_at_start)):
            ends, began = ("awake", "asleep") if part in awake else ("asleep", "awake")
            broken.append(f"{part} is {began} when an iteration begins and {ends} when it ends")
        return Replay(loads=tuple(loads), broken=tuple(broken))
