"""A worker: the model instances of one process, and the verbs that a plan has for them.

It runs bodies, reshards, and puts parts to sleep and wakes them; it refuses what the
state of an instance forbids. It knows no order. Ranks that share an instance or a reshard
meet in the groups that its `world` has for them.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlflow.batch import select_field
from rlflow.contract.values import SampleKey, Stat
from rlflow.engines.hf.generate.rng import permutation
from rlflow.engines.hf.loading import load_tokenizer
from rlflow.engines.hf.pictures.reader import picture_reader
from rlflow.graph.graph import Graph, Node
from rlflow.graph.rules.nesting import declared_name, draw_of
from rlflow.modelfiles.directories import model_directory
from rlflow.ops.body import Alone, Call, Output
from rlflow.runtime.execute.flow import Flow
from rlflow.runtime.execute.stats import logged
from rlflow.runtime.execute.versions import require_averages, require_same, require_versions
from rlflow.runtime.record.devices.rows import row_tokens, row_work
from rlflow.runtime.record.edges.recorder import Recorder
from rlflow.runtime.record.printed import printed_by
from rlflow.runtime.record.stages import stage
from rlflow.runtime.worker.allocator import give_back_freed_memory
from rlflow.runtime.worker.device_memory import (
    AcceleratorMemory,
    device_memory,
    leaving_memory,
    memory_errors,
)
from rlflow.runtime.worker.drafting import drafter_within, drafting_in
from rlflow.runtime.worker.loaded import InUse, Loaded, products_of
from rlflow.runtime.worker.loading import load_instance, loading
from rlflow.runtime.worker.node_states import NodeStates
from rlflow.runtime.worker.reading import Reading, fields_read
from rlflow.runtime.worker.starting import start_steps
from rlflow.runtime.worker.store import ShardStore, Stored
from rlflow.runtime.worker.world import resharder, where_loaded
from rlflow.scheduler.plan.plan import Action, Instance, Plan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from rlflow.engines.reshard.resharder import Resharder
    from rlflow.engines.reshard.streaming import BucketStream
    from rlflow.runtime.worker.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an action instance did in this process: metrics, and the rows that it left here, if any.

    `tokens` int64 `[rows]` are the lengths of prompt and response together, where the rows have
    them. `groups` int64 `[rows]` are the groups of rows that were gathered. `numbers` int64
    `[rows]` are the numbers of the rows, where the action alone knows them. `moved` is the number
    of bytes that other processes sent. `work` is what the rows cost a model that reads them.
    """

    metrics: Mapping[str, float | Stat] = field(default_factory=dict)
    rows: int = 0
    total: int = 0
    tokens: Tensor | None = None
    groups: Tensor | None = None
    numbers: Tensor | None = None
    moved: int | None = None
    work: Mapping[str, float] = field(default_factory=dict)


class Worker:
    """Loads the instances of a plan and runs its actions, one call an action instance.

    With a `world` it is one rank of several: it loads the instances of its device only; without,
    all of them on `device`.
    `check_sync` compares hashes of both ends after every reshard. After what an engine beside it
    may wait for, `memory` goes back to other processes.
    """

    def __init__(
        self,
        plan: Plan,
        seed: int,
        near: Path | None = None,
        *,
        world: World | None = None,
        check_sync: bool = False,
        device: str = "cpu",
        memory: AcceleratorMemory | None = None,
    ) -> None:
        self.plan = plan
        self.graph: Graph = plan.graph
        self.seed = seed
        self.near = near
        self.world = world
        self.check_sync = check_sync
        self.device = device if world is None else world.device
        self.memory = memory or device_memory(self.device)
        self._leaving = leaving_memory(plan)
        self.flow = Flow(plan)
        self.store = ShardStore()
        self._reading = Reading(plan, self.flow, self.store)
        self.recorder = Recorder(None, plan)
        self.states = NodeStates()
        self._carried: dict[str, dict[str, Any]] = {}
        self._resharders: dict[str, Resharder | BucketStream] = {}
        self._wanted = {node.name: fields_read(plan.graph, node) for node in plan.graph.nodes}
        self._tokenizer = functools.cache(lambda path: load_tokenizer(self._path(path)))
        self.loaded: dict[str, Loaded] = {}
        self._helped: dict[str, Loaded] = {}
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        """Load what this process holds, and put to sleep what the plan does not begin with."""
        actions = self.plan.actions
        emptied = {a.part for a in actions if a.kind == "wake" and a.mode == "discard"}
        # Every rank in one order, since the ranks of an instance wait for each other.
        for step in start_steps(self.plan):
            if step.kind == "load":
                self._load_instance(self.plan.instance(step.name))
                give_back_freed_memory()
            else:
                gone = step.name in emptied and step.name not in self.plan.awake_at_start
                self._move(step.kind, step.name, "discard" if gone else "offload")
            self.memory.give_back()
        require_averages(self.plan, self.loaded)
        self.states.follow(self.loaded, 0 if self.world is None else self.world.own)

    def _load_instance(self, instance: Instance) -> None:
        """Load an instance, or this process's part of it."""
        held = self.plan.instances if self.world is None else self.world.instances
        if instance not in held and (self.world is None or instance not in self.world.helped):
            return
        if instance.engine_plan.lies_inside:
            self.loaded[instance.name] = drafter_within(instance, self.loaded[str(instance.inside)])
            return
        declared = self.graph.model(instance.model)
        kept = self.loaded if instance in held else self._helped
        with stage(loading(instance)):
            kept[instance.name] = load_instance(
                instance,
                declared,
                self._path(declared.path),
                seed=self.seed,
                draft=drafting_in(self.plan, instance, self._path),
                **where_loaded(self.world, instance, self.device),
            )

    def close(self) -> None:
        """End what runs beside this process: engines of their own."""
        for loaded in (*self.loaded.values(), *self._helped.values()):
            loaded.close()

    def trained(self) -> list[Loaded]:
        """The instances that the plan trains, in the plan's order."""
        return [loaded for loaded in self.loaded.values() if loaded.instance.trained]

    def run(self, action: Action, iteration: int) -> Mapping[str, float | Stat]:
        """Carry out one action instance with all its rows; returns the numbers it logs.

        Those of a chunk are still to be joined with the others'. Raises what the body raises,
        and RunError for what the state forbids.
        """
        return logged(action, [self.perform(action, iteration).metrics])

    def perform(self, action: Action, iteration: int, keep: Tensor | None = None) -> Result:
        """Carry out this process's part of an action instance.

        `keep` int64 names the rows, by place, whose results stay; None for all of them.
        """
        with memory_errors(action, iteration, self.memory, self.trained()):
            result = self._performed(action, iteration, keep)
        if action.kind in ("run", "reshard"):
            self.memory.wait()
        if action.id in self._leaving:
            self.memory.give_back()
        return result

    def _performed(self, action: Action, iteration: int, keep: Tensor | None) -> Result:
        if action.kind == "run":
            with printed_by(f"iteration {iteration} {action.id}"):
                return self._run(action, iteration, keep)
        if action.kind == "reshard":
            return Result(moved=self._reshard(action, iteration))
        if action.part:
            self._move(action.kind, action.part, str(action.mode))
        return Result()

    def _run(self, action: Action, iteration: int, keep: Tensor | None) -> Result:
        node = self.graph.node(str(action.node))
        loaded = self.loaded[action.instance] if action.instance else None
        require_versions(self.plan, action, iteration, self.loaded)
        call = self._call(action, node, iteration, loaded)
        with products_of(loaded, node.op.use):
            output = _body(node.op.body)(call)
        self.store.leave(node.name, output.surplus)
        if output.memory is not None:
            self.store.memory[node.name] = output.memory
        for name, lag in action.writes:
            self.loaded[name].version = iteration - lag
        if (made := self._made(node, call, output, keep)) is not None:
            made = self.recorder.take(action, iteration, made)
            self.store.put(action.id, iteration, made, self.flow.readers(action.id, iteration))
        self.release(action, iteration)
        sized = made if made and node.op.rows in ("expand", "gather") else None
        return Result(
            metrics={**output.metrics, **(loaded.figures() if loaded is not None else {})},
            rows=output.rows,
            total=made.total if made else 0,
            tokens=None if sized is None else row_tokens(sized.fields),
            work={} if sized is None else row_work(sized.fields),
            groups=made.fields.get("group") if made and node.op.gathers else None,
            numbers=None if output.kept is None or made is None else made.rows,
        )

    def _made(self, node: Node, call: Call, output: Output, keep: Tensor | None) -> Stored | None:
        """The rows of an output under their numbers in the whole batch."""
        if not node.op.outputs:
            return None
        fields = dict(output.fields)
        if output.own or (call.rows is None and output.kept is None):
            return Stored(fields=fields, total=output.rows)
        factor = output.factor
        count = call.total if call.inputs is None else int(call.inputs.batch_size[0])
        rows = torch.arange(count) if call.rows is None else call.rows
        total = (count if call.rows is None else call.total) * factor
        if factor > 1:
            rows = (rows[:, None] * factor + torch.arange(factor)).flatten()
        if output.kept is not None:
            rows = rows[output.kept]
        if keep is not None:
            fields = {name: select_field(value, keep) for name, value in fields.items()}
            rows = rows[keep]
        return Stored(fields=fields, total=total, rows=rows)

    def _call(self, action: Action, node: Node, iteration: int, loaded: Loaded | None) -> Call:
        drawn_by = node.drawn_as
        draw = draw_of(self.graph, node, iteration)
        if node.trip is not None:
            drawn_by = declared_name(drawn_by)
        key = SampleKey(seed=self.seed, iteration=draw, stream=drawn_by)
        read = self._reading.of(action, node, iteration)
        shared = None if self.world is None else self.world.peers(action)
        return Call(
            node=node.name,
            op=node.op,
            iteration=iteration,
            seed=self.seed,
            params=dict(node.params),
            wanted=self._wanted[node.name] | self.recorder.adds(node.name, iteration),
            permutation=functools.partial(_permutation, self.seed, iteration, node.name),
            tokenizer=self._tokenizer,
            reader=lambda path: picture_reader(self._path(path)),
            inputs=read.inputs,
            others=read.others,
            rows=read.rows,
            total=read.total,
            pieces=1 if action.takes is None else action.takes.pieces,
            peers=Alone() if shared is None else shared,
            state=self.states.of(node.shares or node.name),
            model=None if loaded is None else self._in_use(action, node, loaded, key),
            source=self._averaged(node, key),
            where=node.where,
            draw=draw,
            staleness=self.graph.staleness,
            updates=self.graph.updates(self.graph.sampled_by(node) or ""),
            trips=read.trips,
            surplus=self.store.surplus.get(_counted_for(node)),
            memory=self.store.memory.get(node.name),
            piece=(0, 1) if action.chunk is None else (action.chunk.index, action.chunk.count),
            carried=self._carried_to(action, node),
        )

    def _in_use(self, action: Action, node: Node, loaded: Loaded, key: SampleKey) -> InUse:
        """The model of a node, with the drafter beside it if it has one that is in no engine."""
        names = (name for name, _ in action.reads if name in self.loaded)
        beside = [
            held
            for held in map(self.loaded.__getitem__, names)
            if not held.instance.engine_plan.lies_inside
        ]
        drafters = [held for held in beside if held.instance.model == node.drafter]
        drafter = drafters[0] if drafters else None
        piece = action.chunk if action.ends_first else None
        return InUse(loaded, key, piece=piece, drafter=drafter)

    def _carried_to(self, action: Action, node: Node) -> dict[str, Any]:
        """What the pieces of a node leave for those after them; after the last one nothing."""
        chunk, before = action.chunk, self._carried.pop(node.name, {})
        carried = before if chunk is not None and chunk.index else {}
        if chunk is not None and chunk.index + 1 < chunk.count:
            self._carried[node.name] = carried
        return carried

    def _averaged(self, node: Node, key: SampleKey) -> InUse | None:
        """The model whose weights a node averages, as they are trained."""
        trained = self.plan.trained_instance(node.averages) if node.averages else None
        return None if trained is None else InUse(self.loaded[trained.name], key)

    def held(self, action: Action, source: str, iteration: int, names: Collection[str]) -> Stored:
        """Fields of a node as they lie here for an action to read, chunks joined."""
        return self._reading.held(action, source, iteration, names)

    def release(self, action: Action, iteration: int) -> None:
        """Note that an action has read all that it reads here, of what has run."""
        for source in self.flow.sources(action.id):
            if self.plan.action(source).trip is None or self.store.has(source, iteration):
                self.store.release(source, iteration)

    def drop_surplus(self) -> None:
        """Forget what loops have left over for the next iteration."""
        self.store.surplus.clear()

    def skip(self, action: Action, iteration: int) -> None:
        """Note that an action of a loop that is over will not read what it would have."""
        for source in self.flow.outside(action.id):
            if self.store.has(source, iteration):
                self.store.release(source, iteration)

    def _reshard(self, action: Action, iteration: int) -> int:
        """Bring the source's weights to the targets; bytes that came from other processes."""
        source = self.loaded.get(str(action.instance))
        targets = [self.loaded[name] for name in action.targets if name in self.loaded]
        require_versions(self.plan, action, iteration, self.loaded)
        received = self._bring(action, source, targets)
        for target in targets:
            target.version = self.graph.written(target.instance.model, iteration + 1)
            target.model.loaded(target.version)
            if self.check_sync:
                require_same(action, target.model.check())
        return received

    def _bring(self, action: Action, source: Loaded | None, targets: list[Loaded]) -> int:
        if action.id not in self._resharders:
            self._resharders[action.id] = resharder(
                self.world, action, source, targets, check=self.check_sync
            )
        made = self._resharders[action.id]
        received = made.run().received
        if self.check_sync:
            require_same(action, made.check())
        return received

    def _move(self, kind: str, name: str, mode: str) -> None:
        """Put a part to sleep or wake it, where this process holds any of it that leaves."""
        part = self.plan.part(name)
        if part.instance not in self.loaded:
            return
        if self.world is not None and self.world.own in part.stays:
            return
        if kind == "sleep":
            self.loaded[part.instance].sleep(part.kind, mode)
        else:
            self.loaded[part.instance].wake(part.kind)

    def _path(self, path: str) -> str:
        directory = model_directory(path, self.near)
        return path if directory is None else str(directory)


def _counted_for(node: Node) -> str:
    """The loop for which what is left of the iteration before counts here: at its end, and once."""
    first = node.is_gate and node.trip is not None and node.trip[0] == 0
    return str(node.loop) if first else node.name


def _permutation(
    seed: int, iteration: int, node: str, n: int, *salt: int | str
) -> NDArray[np.int64]:
    return permutation(n, seed, iteration, node, *salt)


@functools.cache
def _body(name: str) -> Callable[[Call], Output]:
    """The body behind a dotted name: the one door from the runtime to the ops' bodies."""
    body: Callable[[Call], Output] = pkgutil.resolve_name(name)
    return body
