"""A plan played in one random interleaving, noting all that goes wrong: an oracle for `verify`.

It knows nothing of reachability: it starts whatever `after` allows, in a random order, and
looks at devices, memory and weights as they are at that moment.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random

from rlflow.graph.graph import Edge
from rlflow.scheduler.plan.plan import HOST, Action, Chunk, Plan, Spread


class Player:
    """The state of a machine that runs iterations 0 to `end` of a plan.

    Instances are (action id, turn); what they do is of iteration turn + ahead.
    """

    def __init__(self, plan: Plan, end: int) -> None:
        self.plan = plan
        self.end = end
        self.first = -max(a.ahead for a in plan.actions)
        self.runs: dict[str, list[Action]] = defaultdict(list)
        for a in plan.actions:
            if a.kind == "run":
                self.runs[str(a.node)].append(a)
        self.parts = {part.name: part for part in plan.parts}
        self.models = {i.name: i.model for i in plan.instances}
        self.turns: dict[str, list[str]] = defaultdict(list)
        for node in plan.graph.nodes:
            if node.op.use == "train":
                runs = sorted(self.runs[node.name], key=lambda a: a.chunk.index if a.chunk else 0)
                self.turns[node.model] += [run.id for run in runs]
        self.content: dict[str, int | None] = dict.fromkeys(self.models, 0)
        self.resident = set(plan.awake_at_start)
        self.awake = set(plan.awake_at_start)
        kept = {a.part for a in plan.actions if a.mode == "discard"} | self.awake
        self.on_host = {part.name for part in plan.parts} - kept
        self.over: set[tuple[str, int]] = set()
        self.made: set[tuple[str, int]] = set()
        self.carried: dict[tuple[str, Spread, int, Chunk | None], set[str]] = defaultdict(set)
        self.running: list[tuple[Action, int]] = []
        self.moving: dict[tuple[str, int], int | None] = {}
        self.sampled: dict[tuple[str, int], int | None] = {}
        self.open: dict[tuple[str, int], tuple[int, tuple[int | None, int]]] = {}
        self.lost: dict[str, int] = defaultdict(int)
        self.broken: list[str] = []

    def ready(self, action: Action, turn: int) -> bool:
        return all(
            turn - d.distance < self.first or (d.action, turn - d.distance) in self.over
            for d in action.after
        )

    def due(self, action: Action, turn: int) -> bool:
        """Sleeps and wakes act in every turn, the others for the iterations that there are.

        What is emptied in every turn is filled in every turn, with the version that there is.
        """
        if action.part is not None:
            return True
        i = turn + action.ahead
        if action.kind == "reshard" and not 0 <= i < self.end:
            emptied = {a.instance for a in self.plan.actions if a.mode == "discard"}
            return bool(emptied & set(action.targets))
        return 0 <= i < self.end and i % action.every == action.phase

    def start(self, action: Action, i: int) -> None:
        for other, j in self.running:
            if set(other.devices) & set(action.devices) and other.lane == action.lane:
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
            self.lost[action.instance] += self.parts[action.part].kind == "pool"
            if action.mode == "discard" and self.parts[action.part].kind == "weights":
                self.content[self.parts[action.part].instance] = None
            elif action.mode == "offload":
                self.on_host.add(action.part)
        if action.kind == "reshard":
            self.moving[action.id, i] = self.content[action.instance]
        self.look(action, i)
        self.feed(action, i)
        self.weigh(action, i)
        if action.kind == "run" and self.plan.graph.node(action.node).op.use == "rollout":
            self.sample(action, i)

    def sample(self, action: Action, i: int) -> None:
        """Pieces of a rollout follow one another over the same weights; who goes on has newer."""
        held, node = self.content[action.instance], self.plan.graph.node(action.node)
        if ends_first(action):
            here = action.chunk.index, (held, self.lost[action.instance])
            before = self.open.get((action.node, i), (0, here[1]))
            if before != here:
                self.broken.append(f"{action.id}@{i} goes on with piece {before}, not {held}")
        begun = (dict(node.params).get("resumes"), i)
        if begun[0] is not None:
            again = action.trip is not None and any(t.index for t in action.trip.levels)
            newer = len(self.turns[node.model]) if i >= self.plan.staleness and not again else 0
            if begun not in self.sampled or held != self.sampled[begun] + newer:
                self.broken.append(f"{action.id}@{i} goes on with {held} after {self.sampled}")
        self.sampled[action.node, i] = held

    def look(self, action: Action, i: int) -> None:
        """Weights as they should be; asked when an action starts and again when it ends."""
        for need in set(action.needs) - self.awake:
            self.broken.append(f"{action.id}@{i} needs {need}")
        for name, lag in action.reads:
            turns = self.turns.get(self.models[name], [])
            wanted = min(max(0, i - lag), self.end) * len(turns)
            wanted += turns.index(action.id) if action.id in turns else 0
            if self.content[name] != wanted:
                self.broken.append(f"{action.id}@{i} reads {self.content[name]}, not {wanted}")

    def feed(self, action: Action, i: int) -> None:
        for edge in self.plan.graph.edges if action.kind == "run" else ():
            if edge.kind == "data" and edge.target == action.node:
                self.take(action, i, edge)
        if action.kind == "transfer":
            for source in matching(action, self.runs[action.node]):
                if (source.id, i) not in self.made or source.makes != action.takes:
                    self.broken.append(f"{action.id}@{i} has nothing to carry")

    def take(self, action: Action, i: int, edge: Edge) -> None:
        """Rows of every chunk that an action reads, where it reads them."""
        for source in matching(action, self.runs[edge.source]):
            there = (source.id, i) in self.made
            own = action.takes.rule not in ("whole", "balanced", "generated")
            if (own or source.makes != action.takes) and self.plan.backend != "local":
                chunks = (source.chunk, action.chunk)
                carried = [self.carried[edge.source, action.takes, i, chunk] for chunk in chunks]
                there = any(set(edge.fields) <= fields for fields in carried)
            if not there:
                self.broken.append(f"{action.id}@{i} lacks {edge.fields} of {source.id}")

    def weigh(self, action: Action, i: int) -> None:
        for device in set(action.devices) - {HOST}:
            held = 0
            for name, part in self.parts.items():
                if device in part.devices:
                    here = name in self.resident or device in part.stays
                    held += (part.size or 0) if here else part.residual
            held += sum(a.cost.transient or 0 for a, _ in self.running if device in a.devices)
            if held > self.plan.budget(device):
                self.broken.append(f"{action.id}@{i} makes {held} bytes on {device}")
        hosts: dict[int, int] = defaultdict(int)
        for name in self.on_host:
            for device in set(self.parts[name].devices) - set(self.parts[name].stays):
                hosts[self.plan.host_of(device)] += self.parts[name].size or 0
        for kept in self.plan.kept:
            for host in self.plan.hosts_keeping(kept):
                hosts[host] += kept.size
        if max(hosts.values(), default=0) > self.plan.budget(HOST):
            self.broken.append(f"{action.id}@{i} makes {dict(hosts)} bytes on hosts")

    def fill(self, target: str, version: int | None) -> None:
        """Adapters alone do not make weights whole that were discarded."""
        adapters = self.plan.graph.model(self.models[target]).lora is not None
        if self.content[target] is not None or not adapters:
            self.content[target] = version

    def finish(self, index: int) -> None:
        action, i = self.running.pop(index)
        self.look(action, i)
        self.over.add((action.id, i - action.ahead))
        self.made.add((action.id, i))
        if ends_first(action):
            held = self.content[action.instance], self.lost[action.instance]
            self.open[action.node, i] = action.chunk.index + 1, held
        if action.kind == "wake":
            self.awake.add(action.part)
            self.on_host.discard(action.part)
        if action.kind == "sleep":
            self.resident.discard(action.part)
        if action.kind == "transfer":
            self.carried[action.node, action.makes, i, action.chunk] |= set(action.fields)
        if action.kind == "reshard":
            for target in action.targets:
                self.fill(target, self.moving[action.id, i])
        elif action.writes:
            turns = self.turns[self.models[action.instance]]
            wrote = i * len(turns) + turns.index(action.id) + 1
            self.content[action.instance] = wrote


def ends_first(action: Action) -> bool:
    """Whether an action decodes all rows of a rollout until some more have ended."""
    return action.begins and action.chunk is not None and action.chunk.by == "finish"


def matching(action: Action, sources: list[Action]) -> list[Action]:
    """The chunks of a node that an action reads: its own where both are cut alike, else all."""
    cuts = {(source.chunk.count, source.chunk.by) for source in sources if source.chunk is not None}
    if action.chunk is not None and cuts == {(action.chunk.count, action.chunk.by)}:
        return [source for source in sources if source.chunk == action.chunk]
    return sources


def play(plan: Plan, seed: int, iterations: int = 4) -> list[str]:
    """What goes wrong in one interleaving of a few iterations; [] if nothing does."""
    random = Random(seed)
    player = Player(plan, iterations)
    pending = [
        (action, turn) for turn in range(player.first, iterations) for action in plan.actions
    ]
    eager = random.choice([0.3, 0.6, 0.95])
    while (pending or player.running) and not player.broken:
        ready = [item for item in pending if player.ready(*item)]
        if ready and (not player.running or random.random() < eager):
            action, turn = random.choice(ready)
            pending.remove((action, turn))
            if player.due(action, turn):
                player.start(action, turn + action.ahead)
            else:
                player.over.add((action.id, turn))
        elif player.running:
            player.finish(random.randrange(len(player.running)))
        else:
            return ["stuck"]
    return player.broken
