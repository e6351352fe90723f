"""The plan: what the compiler emits, one action a line, frozen and hashed.

The actions are the kernel of a cyclic schedule: every turn runs each of them once. In turn t an
action runs iteration t + `ahead`; a rollout with a larger `ahead` than the update runs ahead of
it. An instance is an action in one turn. It may start when every dependency in `after` has
finished, that many turns earlier, and nothing else orders it. An instance does nothing where
`every` skips its iteration, or where the run has no such iteration: it is over as soon as its
dependencies are. The plan knows devices by number, and no op's body.
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
from rlflow.scheduler.plan.period_range import PeriodRange

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
    """Why an action is there: the rule that inserted it, and what the rule found on this graph."""

    rule: str
    text: str

    def __post_init__(self) -> None:
        if not self.rule or not self.text:
            raise ValueError("an action without a reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dep:
    """A dependency: `action` has to have finished its instance of `distance` turns earlier.

    Before pass `order` gives every action its `ahead`, a turn is an iteration. Until then a
    distance may be negative: the rollout k iterations later ends before its weights are
    overwritten.
    """

    action: str
    distance: int
    kind: DepKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Estimated seconds, bytes moved, and device memory used only while it runs (bytes).

    A size that no file on this machine tells is None. `holds` lists what `transient` is made of,
    largest first: (`KV cache`, bytes), ... `source` says where the seconds come from. Where
    iterations differ by nature, `swings` has what some in a row take, as parts of the mean.
    """

    seconds: float | None = None
    moved: int | None = 0
    transient: int | None = 0
    holds: tuple[tuple[str, int], ...] = ()
    source: str = "not estimated"
    swings: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The layout of a batch's rows over devices: `parts[i]` are the devices that hold part i.

    `rule` says which rows a part has. `whole`: there is one part, with all rows. `balanced`: parts
    have about equally many tokens, and groups stay together. `balanced rows`: groups are cut, as
    there are fewer of them than parts. `balanced samples`: each row is laid out `pieces` times, one
    after the other, and of each an equal share of its rows is made: row r of the laid out is of
    row r // pieces. `generated`: rows lie where the rows
    that they were made of lay. Any other name is a registered dispatch function.
    """

    parts: tuple[tuple[int, ...], ...]
    rule: str = "whole"
    pieces: int = 1

    @property
    def devices(self) -> tuple[int, ...]:
        """Every device that holds rows, part by part."""
        return tuple(chain.from_iterable(self.parts))

    def describe(self) -> str:
        """The printed form: `whole`, `2 parts, balanced`, `4 parts, balanced samples / 2`."""
        cut = f" / {self.pieces}" if self.pieces > 1 else ""
        return self.rule if len(self.parts) == 1 else f"{len(self.parts)} parts, {self.rule}{cut}"

    def as_json(self) -> dict[str, Any]:
        """As plain data; without `pieces` where rows lie once."""
        return {k: v for k, v in asdict(self).items() if k != "pieces" or v > 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Chunk `index` of the `count` equal chunks in which an iteration's rows are processed.

    Cut by `prompts`, chunks are the rows of equally many whole prompts, in order. Cut by `finish`,
    they are the rows that end next, cut by `groups` all rows of the prompts that are complete
    next: which ones, the rollout says at run time.
    """

    index: int
    count: int
    by: Literal["prompts", "finish", "groups"] = "prompts"

    @property
    def as_ended(self) -> bool:
        """Whether it has rows in order of completion."""
        return self.by != "prompts"

    def __str__(self) -> str:
        return f"[{self.index + 1}/{self.count}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """Trip `index` of at most `of` through a loop; `loop` is the node that ends the loop.

    Every trip ends with a `gate`, which counts what the trip has reached. The counts add up, and
    once they reach `goal` no further trip runs. `within` is the trip of the enclosing loop, if any.
    """

    loop: str
    index: int
    of: int
    gate: bool = False
    goal: float = 1.0
    within: Trip | None = None

    @property
    def levels(self) -> tuple[Trip, ...]:
        """The trips that contain it, of the outermost loop first, and itself last."""
        return (*(self.within.levels if self.within else ()), self)

    def is_over(self, last: Mapping[str, int]) -> bool:
        """Whether it is left out, given the `last` trip of every loop that has ended, by name."""
        return any(last.get(trip.loop, trip.index) < trip.index for trip in self.levels)

    def as_json(self) -> dict[str, Any]:
        """As plain data; without `within` where no loop encloses it."""
        around = {} if self.within is None else {"within": self.within.as_json()}
        return {k: v for k, v in asdict(self).items() if k != "within"} | around


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One entry of the plan, due in iterations i `within` a window with i % `every` == `phase`.

    `reads` and `writes` are pairs (instance, lag). A lag is the version of the weights relative to
    the iteration: 1 is one update old, -1 is what an update of this iteration makes. A reshard
    reads its `instance` once and fills all `targets`. `takes` is the layout of its input rows,
    `makes` that of its results; a transfer brings rows from one layout to the other. A node
    processed in chunks has a run for each `chunk`, and `begins` marks the runs that cut a whole
    batch into them. A run of a `trip` is left out once its loop is over, so it runs with
    probability `chance`. A `closing` action runs once more after the last iteration.
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
        """The lane of its devices that it occupies: compute, or copies to and from the host."""
        return "copy" if self.kind in ("sleep", "wake") else "compute"

    @property
    def ends_first(self) -> bool:
        """Whether it is one piece of a rollout that hands its rows on in order of completion."""
        return self.begins and self.chunk is not None and self.chunk.as_ended

    @property
    def piece_read(self) -> Chunk | None:
        """The chunk of the rows that it reads; None for all, as where a cut by `finish` begins."""
        return None if self.ends_first else self.chunk

    def due(self, iteration: int) -> bool:
        """Whether it does something in an iteration; sleeps and wakes do in every turn."""
        return is_due(self, iteration)

    @property
    def always(self) -> bool:
        """Whether it does something in every iteration."""
        return self.every == 1 and self.within == ALWAYS

    def as_json(self) -> dict[str, Any]:
        """As plain data; without a window, and without swings, where it has none."""
        found = {k: v for k, v in asdict(self).items() if k != "within" or self.within != ALWAYS}
        rows = {"takes": self.takes, "makes": self.makes}
        found |= {k: None if lying is None else lying.as_json() for k, lying in rows.items()}
        if not self.cost.swings:
            del found["cost"]["swings"]
        return found | {"trip": None if self.trip is None else self.trip.as_json()}

    @property
    def on_host(self) -> bool:
        """Whether it runs in the controller's process, on no device."""
        return self.devices == (HOST,)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRows:
    """The most `rows` of earlier iterations that a node keeps, in `size` bytes of host memory.

    From one iteration to the next they lie where the node's run takes its rows.
    """

    node: str
    rows: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The most that a save copies of an instance: `size` bytes of each device to its host.

    What sleeps is on its host already and is not copied. The host memory stays from save to save.
    """

    instance: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedState:
    """Host memory that loading an instance takes: `size` bytes for each device, until it is there.

    A process loads one instance after the other.
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

    `critical` are the actions of a slowest cycle, in its order: the period is shorter only if one
    of them is. `slack` has by action how many seconds later it may end at the same period.
    `latency` is from the start of an iteration's first run on a device to the end of its last one.
    The period is that of mean seconds; where iterations differ, `played` is what they take one
    after the other, as each waits for what it has itself that is longest, else 0.
    """

    resource_bound: float
    recurrence_bound: float
    period: float
    busiest: str
    binding: Literal["resource", "recurrence", "order"]
    critical: tuple[str, ...] = ()
    slack: tuple[tuple[str, float], ...] = ()
    latency: float = 0.0
    played: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds an iteration, in the mean over iterations that differ."""
        return self.played or self.period

    def as_json(self) -> dict[str, Any]:
        """As plain data; without what is played where iterations are alike."""
        return {k: v for k, v in asdict(self).items() if v or k != "played"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A compiled pipeline: the graph that is left, and the actions in their cyclic order.

    `budgets` are bytes of memory of every device, and under HOST those of one host for what
    sleeps, is `kept` there or `saved`, or is there while instances are loaded (`loads`); `peaks`
    has the same keys. `hosts` share the devices evenly, in their order, unless `host_starts` has
    the first device of each. What sleeps may be `pinned` there: in whole pages, which its process
    keeps for what sleeps next.
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
    loads: tuple[LoadedState, ...] = ()
    pinned: bool = False
    actions: tuple[Action, ...] = ()
    awake_at_start: tuple[str, ...] = ()
    peaks: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    timing: Timing | None = None
    inputs: tuple[str, ...] = ()
    """What seconds rest on, each with where it is from, in words; no part of the content hash."""
    range: PeriodRange | None = None
    """The period in many worlds, where it was asked for; no part of the content hash either."""

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
        keep, where none does, or what saves copy and loads take.
        """
        on_host = any(action.mode == "offload" for action in self.actions)
        on_host = (
            on_host
            or any(part.on_host for part in self.parts)
            or bool(self.kept or self.saved or self.loads)
        )
        budgets = {d: size for d, size in sorted(self.budgets.items()) if on_host or d != HOST}
        kept = {"kept": [asdict(each) for each in self.kept]} if self.kept else {}
        saved = {"saved": [asdict(each) for each in self.saved]} if self.saved else {}
        loads = {"loads": [asdict(each) for each in self.loads]} if self.loads else {}
        pinned = {"pinned": True} if self.pinned else {}
        return {
            **kept,
            **saved,
            **loads,
            **pinned,
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
            "timing": self.timing.as_json() if self.timing else None,
        }

    @cached_property
    def hash(self) -> str:
        """The content hash, hex: equal plans have equal hashes in every process."""
        blob = json.dumps(self.to_json(), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(blob.encode()).hexdigest()
