"""The plan: what the compiler emits, one action a line, frozen and hashed.

The actions are the kernel of a cyclic schedule: turn after turn, each once a turn. In turn t
an action runs iteration t + `ahead`; rollouts that run ahead of the updates are those with an
`ahead` above theirs. An instance may start when all that it comes `after` has finished, each
that many turns earlier; nothing else orders it. An instance that `every` skips, or whose
iteration is none of the run's, is over when what it comes after is over. The plan knows
devices by number and bodies not at all.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

from rlflow.graph.graph import Graph
from rlflow.graph.schedule import ALWAYS, Window, is_due
from rlflow.scheduler.plan.instance import MICRO_TOKENS, Instance, Part, PartKind, engines_of

__all__ = [
    "HOST",
    "LENT",
    "MICRO_TOKENS",
    "UPDATE_BUCKET",
    "Action",
    "ActionKind",
    "Backend",
    "Chunk",
    "Cost",
    "Dep",
    "DepKind",
    "Instance",
    "KeptRows",
    "Lane",
    "Mode",
    "Note",
    "Part",
    "PartKind",
    "Plan",
    "Reason",
    "Spread",
    "Timing",
    "Transport",
    "Trip",
]

ActionKind = Literal["run", "transfer", "reshard", "sleep", "wake"]
DepKind = Literal["data", "weights", "order", "device"]
Mode = Literal["offload", "discard"]
Backend = Literal["local", "ray"]
Lane = Literal["compute", "copy"]
Transport = Literal["copy", "shared memory", "collective", "ipc", "broadcast", "object store"]

HOST = -1
# By these, weights reach engines in buckets of at most so many bytes, which they open in place.
LENT: tuple[Transport, ...] = ("ipc", "broadcast")
UPDATE_BUCKET = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why an action is there: the rule that put it there, and that rule on this graph."""

    rule: str
    text: str

    def __post_init__(self) -> None:
        if not self.rule or not self.text:
            raise ValueError("an action without a reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dep:
    """`action`, `distance` turns earlier, has to have finished.

    Until pass `order` has given every action its `ahead`, a turn is an iteration, and a distance
    may be below 0: the rollout k iterations later is over before these weights are overwritten.
    """

    action: str
    distance: int
    kind: DepKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Estimated seconds, bytes moved, and device memory used only while it runs (bytes).

    None stands for a size that nothing on this machine tells. `holds` says what `transient` is
    made of, largest first: (`KV cache`, bytes), ... `source` says where the seconds come from.
    """

    seconds: float | None = None
    moved: int | None = 0
    transient: int | None = 0
    holds: tuple[tuple[str, int], ...] = ()
    source: str = "not estimated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How the rows of a batch lie over devices: `parts[i]` are the devices that hold part i.

    `rule` says which rows a part has: `whole` (there is one part, with all of them),
    `balanced` (groups whole, tokens evened out), `generated` (as their parents were spread), or
    the name of a registered dispatch function.
    """

    parts: tuple[tuple[int, ...], ...]
    rule: str = "whole"

    @property
    def devices(self) -> tuple[int, ...]:
        """Every device that holds rows, part by part."""
        return tuple(chain.from_iterable(self.parts))

    def describe(self) -> str:
        """The printed form: `whole`, `2 parts, balanced`."""
        return self.rule if len(self.parts) == 1 else f"{len(self.parts)} parts, {self.rule}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Piece `index` of the `count` equal pieces in which an iteration's rows are worked on.

    By `prompts` a piece is the rows of equally many whole prompts, in order; by `finish` equally
    many rows as a rollout ends them: which, it says when it has.
    """

    index: int
    count: int
    by: Literal["prompts", "finish"] = "prompts"

    def __str__(self) -> str:
        return f"[{self.index + 1}/{self.count}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """Trip `index` of at most `of` through a loop, by the name of the node that ends it.

    A `gate` ends each: what it has reached is added up, and from `goal` on no trip follows.
    `within` is the trip of the loop around it, if there is one.
    """

    loop: str
    index: int
    of: int
    gate: bool = False
    goal: float = 1.0
    within: Trip | None = None

    @property
    def levels(self) -> tuple[Trip, ...]:
        """The trips that it is of, of the outermost loop first, itself last."""
        return (*(self.within.levels if self.within else ()), self)

    def is_over(self, last: Mapping[str, int]) -> bool:
        """Whether it is left out, where loops end with the `last` trips, by their names."""
        return any(last.get(trip.loop, trip.index) < trip.index for trip in self.levels)

    def as_json(self) -> dict[str, Any]:
        """As plain data; without what is around it where nothing is."""
        around = {} if self.within is None else {"within": self.within.as_json()}
        return {k: v for k, v in asdict(self).items() if k != "within"} | around


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One entry of the plan. It is due where the iteration modulo `every` is `phase`, `within`.

    `reads` and `writes` are (instance, lag): the version of the weights, relative to
    the iteration, that it reads or writes: lag 1 is one update old, -1 is what an update of this
    iteration makes. A reshard fills its `targets`, all in one pass
    over the source, which is its `instance`. `takes` is how its input rows lie, `makes` how
    those it leaves behind do; a transfer brings rows from one to the other. A node that is
    worked on in chunks has a run for each `chunk`; `begins` says that they are cut there, of rows
    that are not. One of a `trip` is left out where its loop is over, and so runs with a `chance`.
    A `closing` action runs once more at the end.
    """

    id: str
    kind: ActionKind
    reason: Reason
    devices: tuple[int, ...]
    pool: str
    after: tuple[Dep, ...] = ()
    node: str | None = None
    instance: str | None = None
    targets: tuple[str, ...] = ()
    part: str | None = None
    mode: Mode | None = None
    transport: Transport | None = None
    fields: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    reads: tuple[tuple[str, int], ...] = ()
    writes: tuple[tuple[str, int], ...] = ()
    takes: Spread | None = None
    makes: Spread | None = None
    cost: Cost = field(default_factory=Cost)
    peak: int | None = None
    ahead: int = 0
    every: int = 1
    phase: int = 0
    within: Window = ALWAYS
    chunk: Chunk | None = None
    begins: bool = False
    trip: Trip | None = None
    chance: float = 1.0
    closing: bool = False

    @property
    def lane(self) -> Lane:
        """What it occupies of its devices: compute, or copies to and from the host."""
        return "copy" if self.kind in ("sleep", "wake") else "compute"

    @property
    def ends_first(self) -> bool:
        """Whether it is a piece of a rollout whose rows go on as they end."""
        return self.begins and self.chunk is not None and self.chunk.by == "finish"

    @property
    def piece_read(self) -> Chunk | None:
        """Of which piece the rows are that it reads; by `finish` a cut begins with all of them."""
        return None if self.ends_first else self.chunk

    def due(self, iteration: int) -> bool:
        """Whether it does something in an iteration; sleeps and wakes do in every turn."""
        return is_due(self, iteration)

    @property
    def always(self) -> bool:
        """Whether it does something in every iteration."""
        return self.every == 1 and self.within == ALWAYS

    def as_json(self) -> dict[str, Any]:
        """As plain data; without a window where it has none."""
        found = {k: v for k, v in asdict(self).items() if k != "within" or self.within != ALWAYS}
        return found | {"trip": None if self.trip is None else self.trip.as_json()}

    @property
    def on_host(self) -> bool:
        """Whether it runs beside the devices, in the controller's process."""
        return self.devices == (HOST,)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRows:
    """The most that a node keeps of earlier iterations' rows: `size` bytes of host memory in all.

    They lie where the node's run takes its rows, from one iteration to the next.
    """

    node: str
    rows: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """What a save copies of an instance: `size` bytes of each of its devices, to their hosts.

    At most: what sleeps is on its host already. The memory for it stays from save to save.
    """

    instance: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something a pass did or found that is not an action: a node dropped, a size unknown."""

    rule: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds an iteration: bounds from below, and the period that the order achieves.

    `critical` are the actions of a slowest cycle, in its order: nothing shortens the period but
    what shortens one of them. `slack` is how many seconds later an action may end without
    lengthening the period, by id. `latency` is from the start of an iteration's first run on
    a device to the end of its last one.
    """

    resource_bound: float
    recurrence_bound: float
    period: float
    busiest: str
    binding: Literal["resource", "recurrence", "order"]
    critical: tuple[str, ...] = ()
    slack: tuple[tuple[str, float], ...] = ()
    latency: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A compiled pipeline: the graph that is left, and the actions in their cyclic order.

    `budgets` are bytes of memory of every device, and under HOST those of one host for what
    sleeps, is `kept` there or `saved`; `peaks` has the same keys. `hosts` share the devices evenly,
    in their order, unless `host_starts` has the first device of each.
    """

    graph: Graph
    placement: str
    cluster: str
    budgets: Mapping[int, int]
    backend: Backend
    staleness: int
    pools: Mapping[str, tuple[int, ...]]
    hosts: int = 1
    host_starts: tuple[int, ...] = ()
    instances: tuple[Instance, ...] = ()
    parts: tuple[Part, ...] = ()
    kept: tuple[KeptRows, ...] = ()
    saved: tuple[SavedState, ...] = ()
    actions: tuple[Action, ...] = ()
    awake_at_start: tuple[str, ...] = ()
    peaks: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    timing: Timing | None = None

    def budget(self, device: int) -> int:
        """Bytes of memory of a device, of one host for HOST; 0 where none is known."""
        return self.budgets.get(device, 0)

    def host_of(self, device: int) -> int:
        """The host that a device is in, by number."""
        if self.host_starts:
            return bisect_right(self.host_starts, device) - 1
        return device // self._devices_a_host

    def hosts_keeping(self, kept: KeptRows) -> tuple[int, ...]:
        """The hosts that may hold what a node keeps; the controller may be on any of them."""
        takes = self.action(kept.node).takes
        if takes is None or takes.devices == (HOST,):
            return tuple(range(self.hosts))
        return tuple(self.host_of(device) for device in takes.devices)

    @cached_property
    def _devices_a_host(self) -> int:
        count = max((d for d in self.budgets if d != HOST), default=0) + 1
        return -(-count // self.hosts)

    def action(self, name: str) -> Action:
        """The action of that id; KeyError if there is none."""
        return self._by_id[name]

    def instance(self, name: str) -> Instance:
        """The instance of that name; KeyError if there is none."""
        return next(i for i in self.instances if i.name == name)

    @property
    def engines(self) -> tuple[Instance, ...]:
        """The instances that are engines in processes of their own."""
        return engines_of(self.instances)

    def trained_instance(self, model: str) -> Instance | None:
        """The instance that a model's update writes, if it is trained."""
        return next((i for i in self.instances if i.model == model and i.trained), None)

    def part(self, name: str) -> Part:
        """The part of that name; KeyError if there is none."""
        return self._parts_by_name[name]

    @cached_property
    def _parts_by_name(self) -> dict[str, Part]:
        return {part.name: part for part in self.parts}

    @cached_property
    def _by_id(self) -> dict[str, Action]:
        return {action.id: action for action in self.actions}

    def noting(self, rule: str, text: str) -> Plan:
        """The same plan with one more note."""
        return replace(self, notes=(*self.notes, Note(rule=rule, text=text)))

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, stable to the byte when dumped with sorted keys.

        How much memory hosts have is no part of a plan that takes none of it. Nor is what nodes
        keep, where none does, or what saves copy.
        """
        on_host = any(action.mode == "offload" for action in self.actions)
        on_host = (
            on_host or any(part.on_host for part in self.parts) or bool(self.kept or self.saved)
        )
        budgets = {d: size for d, size in sorted(self.budgets.items()) if on_host or d != HOST}
        kept = {"kept": [asdict(each) for each in self.kept]} if self.kept else {}
        saved = {"saved": [asdict(each) for each in self.saved]} if self.saved else {}
        return {
            **kept,
            **saved,
            "pipeline": self.graph.name,
            "graph": self.graph.hash,
            "placement": self.placement,
            "cluster": self.cluster,
            "budgets": {str(device): size for device, size in budgets.items()},
            "backend": self.backend,
            "staleness": self.staleness,
            "pools": {name: list(devices) for name, devices in self.pools.items()},
            "hosts": self.hosts,
            "host_starts": list(self.host_starts),
            "instances": [instance.as_json() for instance in self.instances],
            "parts": [part.as_json() for part in self.parts],
            "actions": [action.as_json() for action in self.actions],
            "awake_at_start": list(self.awake_at_start),
            "peaks": {str(device): peak for device, peak in sorted(self.peaks.items())},
            "notes": [asdict(note) for note in self.notes],
            "timing": asdict(self.timing) if self.timing else None,
        }

    @cached_property
    def hash(self) -> str:
        """The content hash, hex: equal plans have equal hashes in every process."""
        blob = json.dumps(self.to_json(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(blob.encode()).hexdigest()
