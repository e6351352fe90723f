"""A plan played in one random interleaving, noting all that goes wrong: an oracle for `verify`.

It knows nothing of reachability: it starts whatever `after` allows, in a random order, and
looks at devices, memory and weights as they are at that moment.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random

from rlflow.scheduler.plan import HOST, Action, Plan, Spread


class Player:
    """The state of a machine that runs a plan: instances are (action id, iteration)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.runs = {a.node: a for a in plan.actions if a.kind == "run"}
        self.parts = {part.name: part for part in plan.parts}
        self.models = {i.name: i.model for i in plan.instances}
        self.turns: dict[str, list[str]] = defaultdict(list)
        for node in plan.graph.nodes:
            if node.op.use == "train":
                self.turns[node.model].append(node.name)
        self.content: dict[str, int | None] = dict.fromkeys(self.models, 0)
        self.resident = set(plan.awake_at_start)
        self.awake = set(plan.awake_at_start)
        self.over: set[tuple[str, int]] = set()
        self.made: set[tuple[str, int]] = set()
        self.carried: dict[tuple[str, Spread, int], set[str]] = defaultdict(set)
        self.running: list[tuple[Action, int]] = []
        self.moving: dict[tuple[str, int], int | None] = {}
        self.broken: list[str] = []

    def ready(self, action: Action, i: int) -> bool:
        return all(d.distance > i or (d.action, i - d.distance) in self.over for d in action.after)

    def start(self, action: Action, i: int) -> None:
        for other, j in self.running:
            if set(other.devices) & set(action.devices):
                self.broken.append(f"{action.id}@{i} and {other.id}@{j} at the same time")
        self.running.append((action, i))
        if action.kind == "wake":
            if action.part in self.awake:
                self.broken.append(f"{action.id}@{i} wakes what is awake")
            self.resident.add(action.part)
        if action.kind == "sleep":
            if action.part not in self.awake:
                self.broken.append(f"{action.id}@{i} puts to sleep what sleeps")
            self.awake.discard(action.part)
            if action.mode == "discard" and self.parts[action.part].kind == "weights":
                self.content[self.parts[action.part].instance] = None
        if action.kind == "reshard":
            self.moving[action.id, i] = self.content[action.instance]
        self.look(action, i)
        self.feed(action, i)
        self.weigh(action, i)

    def look(self, action: Action, i: int) -> None:
        """Weights as they should be; asked when an action starts and again when it ends."""
        for need in set(action.needs) - self.awake:
            self.broken.append(f"{action.id}@{i} needs {need}")
        for name, lag in action.reads:
            turns = self.turns.get(self.models[name], [])
            wanted = max(0, i - lag) * len(turns)
            wanted += turns.index(action.node) if action.node in turns else 0
            if self.content[name] != wanted:
                self.broken.append(f"{action.id}@{i} reads {self.content[name]}, not {wanted}")

    def feed(self, action: Action, i: int) -> None:
        for edge in self.plan.graph.edges if action.kind == "run" else ():
            if edge.kind != "data" or edge.target != action.node:
                continue
            source = self.runs[edge.source]
            there = (source.id, i) in self.made
            own = action.takes.rule not in ("whole", "balanced", "generated")
            if (own or source.makes != action.takes) and self.plan.backend != "local":
                there = set(edge.fields) <= self.carried[edge.source, action.takes, i]
            if not there:
                self.broken.append(f"{action.id}@{i} lacks {edge.fields} of {edge.source}")
        if action.kind == "transfer":
            source = self.runs[action.node]
            if (source.id, i) not in self.made or source.makes != action.takes:
                self.broken.append(f"{action.id}@{i} has nothing to carry")

    def weigh(self, action: Action, i: int) -> None:
        for device in set(action.devices) - {HOST}:
            held = sum(
                self.parts[p].size or 0 for p in self.resident if device in self.parts[p].devices
            )
            held += sum(a.cost.transient or 0 for a, _ in self.running if device in a.devices)
            if held > self.plan.budget:
                self.broken.append(f"{action.id}@{i} makes {held} bytes on {device}")

    def fill(self, target: str, version: int | None) -> None:
        """Adapters alone do not make weights whole that were discarded."""
        adapters = self.plan.graph.model(self.models[target]).lora is not None
        if self.content[target] is not None or not adapters:
            self.content[target] = version

    def finish(self, index: int) -> None:
        action, i = self.running.pop(index)
        self.look(action, i)
        self.over.add((action.id, i))
        self.made.add((action.id, i))
        if action.kind == "wake":
            self.awake.add(action.part)
        if action.kind == "sleep":
            self.resident.discard(action.part)
        if action.kind == "transfer":
            self.carried[action.node, action.makes, i] |= set(action.fields)
        if action.kind == "reshard":
            for target in action.targets:
                self.fill(target, self.moving[action.id, i])
        elif action.writes:
            turns = self.turns[self.models[action.instance]]
            wrote = i * len(turns) + turns.index(action.node) + 1
            self.content[action.instance] = wrote


def play(plan: Plan, seed: int, iterations: int = 4) -> list[str]:
    """What goes wrong in one interleaving of a few iterations; [] if nothing does."""
    random = Random(seed)
    player = Player(plan)
    pending = [(action, i) for i in range(iterations) for action in plan.actions]
    eager = random.choice([0.3, 0.6, 0.95])
    while (pending or player.running) and not player.broken:
        ready = [item for item in pending if player.ready(*item)]
        if ready and (not player.running or random.random() < eager):
            action, i = random.choice(ready)
            pending.remove((action, i))
            if i < action.first or i % action.every:
                player.over.add((action.id, i))
            else:
                player.start(action, i)
        elif player.running:
            player.finish(random.randrange(len(player.running)))
        else:
            return ["stuck"]
    return player.broken
