"""Estimates of seconds and bytes: measured where an earlier run did the same, else by roofline.

Every figure is marked with its source. What is not measured follows from model shapes and a
table of device kinds. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from rlflow.graph.check import longest_response, num_prompts, num_rows
from rlflow.graph.graph import Graph, Node
from rlflow.scheduler import keys
from rlflow.scheduler.cluster import Cluster
from rlflow.scheduler.collectives import copy_bandwidth, group_of, staging
from rlflow.scheduler.distributions import field_bytes, holds, search
from rlflow.scheduler.drafters import DRAFTS, with_drafts
from rlflow.scheduler.hardware import OBJECT_STORE, STORE_SECONDS
from rlflow.scheduler.inside import drafter_of
from rlflow.scheduler.layouts import CUTS, Cut, area, lacking, parameters_per_rank, piece, shares
from rlflow.scheduler.lengths import Lengths, assumed, before, between, fitted, whole
from rlflow.scheduler.measured import Record, Setting
from rlflow.scheduler.pieces import WHOLE, Piece, as_measured
from rlflow.scheduler.plan import ActionKind, Backend, Cost, Instance, Transport
from rlflow.scheduler.roofline import CACHE, Holds, Load, Roofline, apart, averaging
from rlflow.scheduler.serving import with_serving
from rlflow.scheduler.shapes import Shape, dtype_bytes, trained_parameters

ASSUMED_PROMPT_TOKENS = 64
ASSUMED_RESPONSE_TOKENS = 256
LOOKED_AT = 64
MOST_ROWS = 300_000
HOST_SECONDS_PER_ROW = 5e-6
HOST_SECONDS = 2e-4
ADAM_MOMENTS = 2
FULL_BYTES = 4
LAYERS_AT_ONCE = 2
TABLE = "model shape and device table"
NOT_HERE = "the model's files are not here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Estimates for one graph on one cluster; `shapes` has None for models that are not here.

    `backend` and `staleness` say which measurements stand for what is planned.
    """

    graph: Graph
    cluster: Cluster
    shapes: Mapping[str, Shape | None]
    backend: Backend = "local"
    staleness: int = 0

    def weights(self, instance: Instance) -> int | None:
        """Bytes of parameters on each device; embedding and two layers where layers come and go.

        Adapters lie beside the parameters they adapt.
        """
        shape, model = self.shapes[instance.model], self.graph.model(instance.model)
        if shape is None:
            return None
        count = parameters_per_rank(instance, shares(shape))
        if instance.offload:
            layers = min(shape.layers, LAYERS_AT_ONCE)
            count = min(count, shape.embedding + layers * shape.layer)
        if model.lora is not None:
            adapters = self._trained_per_rank(instance)
            if adapters is None:
                return None
            count += adapters
        return count * dtype_bytes(model)

    def gradients(self, instance: Instance) -> int | None:
        """Bytes of gradients on each device; below float32 they are summed in float32 beside."""
        count, size = self._trained_per_rank(instance), self._dtype_bytes(instance)
        beside = FULL_BYTES if size < FULL_BYTES else 0
        return None if count is None else count * (size + beside)

    def moments(self, instance: Instance) -> int | None:
        """Bytes of AdamW's moments on each device, and of a float32 copy of lower weights."""
        count, size = self._trained_per_rank(instance), self._dtype_bytes(instance)
        copy = FULL_BYTES if size < FULL_BYTES else 0
        each = ADAM_MOMENTS * max(size, FULL_BYTES) + copy
        return None if count is None else count * each

    def _dtype_bytes(self, instance: Instance) -> int:
        return dtype_bytes(self.graph.model(instance.model))

    def _trained(self, instance: Instance) -> dict[Cut, int] | None:
        """Parameters that an update changes, by how `tp` cuts them; adapters are taken as whole."""
        shape, model = self.shapes[instance.model], self.graph.model(instance.model)
        if shape is None:
            return None
        if model.lora is None:
            return shares(shape)
        adapters = trained_parameters(model, shape)
        return None if adapters is None else {"columns": 0, "rows": 0, "whole": adapters}

    def _trained_per_rank(self, instance: Instance) -> int | None:
        sizes = self._trained(instance)
        return None if sizes is None else parameters_per_rank(instance, sizes)

    def resharded(self, source: Instance, target: Instance, *, in_place: bool) -> int | None:
        """Bytes that a reshard moves: what the target's processes lack of what training changes.

        For each class of parameters its size times `lacking`; where the weights are copied
        `in_place`, within each process, the target's own pieces instead.
        """
        sizes = self._trained(source)
        if sizes is None:
            return None
        if in_place:
            times = {
                how: sum((area(piece(target, d, how)) for d in target.devices), Fraction(0))
                for how in CUTS
            }
        else:
            times = lacking(source, target)
        return int(sum(sizes[how] * times[how] for how in CUTS)) * self._dtype_bytes(source)

    def rows(self, node: Node) -> int:
        """Rows that a node works on in one iteration; those of its data for an evaluation."""
        if node.op.name == "evaluate":
            limit, size = node.param("limit"), node.param("data").size()
            return int(limit or size or 1)
        return num_rows(self.graph, node) or 1

    def tokens(self, node: Node) -> tuple[int, int]:
        """Prompt and response tokens of a row, at their longest.

        A prompt is taken to be as many tokens as the longest of the first rows of local
        data has characters, or an assumed number where the data is elsewhere.
        """
        once = dict(self._origin(node).params).get("max_new_tokens", ASSUMED_RESPONSE_TOKENS)
        return self._prompt_tokens(node), int(longest_response(self.graph, node) or once)

    def _origin(self, node: Node) -> Node:
        """The node that made the rows."""
        origin = self.graph.node(node.rows_of) if node.rows_of else node
        if not origin.ends_loop:
            return origin
        inside = (n for n in self.graph.nodes if n.loop == origin.name and n.op.rows == "expand")
        return next(inside, origin)

    def _prompt_tokens(self, node: Node) -> int:
        origin = self._origin(node)
        while "data" not in dict(origin.params):
            parents = [self.graph.node(name) for name in origin.sources]
            if not parents:
                return ASSUMED_PROMPT_TOKENS
            origin = parents[0]
        source = origin.param("data")
        if source.remote or (source.size() or MOST_ROWS) >= MOST_ROWS:
            return ASSUMED_PROMPT_TOKENS
        return max(len(str(row["prompt"])) for row in source.rows()[:LOOKED_AT])

    def lengths(self, node: Node) -> Lengths:
        """How long the responses of a node's rows get: as measured in earlier runs, or assumed."""
        until = dict(node.params).get("until")
        if until is not None:
            options = tuple(option for option in node.params if option[0] != "until")
            return before(self.lengths(replace(node, params=options)), int(until))
        origin = self._origin(node)
        _, longest = self.tokens(node)
        if dict(origin.params).get("ignore_eos"):
            return whole(longest)
        record = self._record(keys.lengths(self.graph, origin, longest))
        if record is None or record.setting.pipeline != self.graph.name:
            return assumed(longest)
        last = record.chosen[-1]
        return fitted(longest, last.length, last.longest, self.rows(origin))

    def fields(self, node: Node, names: tuple[str, ...]) -> int:
        """Bytes of a node's outputs of those names, of all rows."""
        made = [field for field in node.op.outputs if field.name in names]
        return self.rows(node) * sum(field_bytes(field, *self.tokens(node)) for field in made)

    def run(self, node: Node, instance: Instance | None, parts: int, piece: Piece = WHOLE) -> Cost:
        """The cost of running a node once, its rows in as many parts; or of one piece of it."""
        estimate = self.table(node, instance, parts, piece)
        if not self.cluster.measured.records or (instance is not None and estimate.seconds is None):
            return estimate
        record = self._record(self.run_key(node, instance, parts, piece))
        if record is not None:
            return as_measured(estimate, record, self.setting)
        for other in piece.relatives:
            record = self._record(self.run_key(node, instance, parts, other))
            seconds = self.table(node, instance, parts, other).seconds
            if record is not None and seconds and estimate.seconds is not None:
                found = as_measured(estimate, record, self.setting, estimate.seconds / seconds)
                return replace(found, source=f"{found.source}, {piece.as_part_of(other)}")
        return self._with_dispatch(estimate)

    def table(
        self, node: Node, instance: Instance | None, parts: int, piece: Piece = WHOLE
    ) -> Cost:
        """The cost by model shape and device table alone."""
        if instance is None or node.model is None:
            seconds = HOST_SECONDS + HOST_SECONDS_PER_ROW * self.rows(node) / parts * piece.share
            return Cost(seconds=seconds, source="assumed per row of host work")
        shape = self.shapes[node.model]
        if shape is None:
            return Cost(seconds=None, transient=None, source=NOT_HERE)
        roof = self.roofline(instance, shape)
        if node.averages is not None:
            of = dtype_bytes(self.graph.model(node.averages))
            trained, period = self._trained_per_rank(instance) or 0, node.param("every")
            return averaging(roof, trained, of, period=period, source=TABLE)
        load = self.load(node, parts, piece)
        if node.op.use == "rollout":
            legs = (piece.index, piece.count) if piece.leg else (0, 1)
            seconds = roof.rollout(load, *legs)
        elif node.op.use == "forward":
            seconds = roof.forward(load) + search(node, roof, load)
        else:
            epochs, batches = dict(node.params).get("epochs", 1), self._batches(node) * piece.share
            trained = self._trained_per_rank(instance) or 0
            sent = trained * max(roof.size, FULL_BYTES)
            one = roof.update(load, sent, recompute=instance.recompute) + roof.step(trained)
            first = getattr(dict(node.params).get("loss"), "forwards", 0) * roof.forward(load)
            seconds = epochs * batches * (first + one + search(node, roof, load))
        found = () if apart(roof) else self._holds(node, instance, roof, load)
        found = tuple(h for h in found if not piece.leg or h[0] not in (CACHE, DRAFTS))
        transient = sum(size for _, size in found)
        return Cost(seconds=seconds, transient=transient, holds=found, source=TABLE)

    def held(self, node: Node, instance: Instance, parts: int) -> int:
        """Bytes that running a node holds beside the model; 0 where its shape is not known."""
        return sum(size for _, size in self.working(node, instance, parts))

    def working(self, node: Node, instance: Instance, parts: int) -> Holds:
        """The same by what it is, the largest first."""
        shape = self.shapes[instance.model]
        if shape is None:
            return ()
        return self._holds(
            node, instance, self.roofline(instance, shape), self.load(node, parts, WHOLE)
        )

    def _holds(self, node: Node, instance: Instance, roof: Roofline, load: Load) -> Holds:
        found = holds(node, roof, load, recompute=instance.recompute)
        return with_drafts(found, node, instance, roof, load, self)

    def cache(self, node: Node, instance: Instance, parts: int) -> int | None:
        """Bytes of keys and values of all rows of a rollout on each device of its instance."""
        if self.shapes[instance.model] is None:
            return None
        held = dict(self.working(node, instance, parts))
        return held.get(CACHE, 0) + held.get(DRAFTS, 0)

    def load(self, node: Node, parts: int, piece: Piece = WHOLE) -> Load:
        """The rows of one pass: of an update those of a mini-batch, in whichever piece it is.

        The legs of a rollout have all rows; those of a rollout that goes on are prompts.
        """
        if node.op.use == "train":
            return self._load(node, parts, self._batches(node))
        load = self._load(node, parts, 1 / (1 if piece.leg else piece.share))
        if node.resumes is not None:
            return load.going_on(int(node.param("first")))
        if node.op.name == "act":
            return load.later_turn(int(node.param("max_new_tokens")))
        if piece.loose:
            prompts = min(load.prompts / piece.share, load.rows)
            return replace(load, prompts=prompts, lengths=between(load.lengths, *piece.bounds))
        return load

    def _batches(self, node: Node) -> int:
        return int(dict(node.params).get("mini_batches", 1))

    def _load(self, node: Node, parts: int, cuts: float) -> Load:
        """The rows of one part in one of so many cuts of an iteration; whole rows at least."""
        rows = self.rows(node)
        prompts = num_prompts(self.graph, node) or rows
        prompt, _ = self.tokens(node)
        share = parts * cuts
        return Load(
            rows=max(rows / share, 1.0),
            prompts=max(prompts / share, 1.0),
            prompt=prompt,
            lengths=self.lengths(node),
            peers=parts,
        )

    def roofline(self, instance: Instance, shape: Shape) -> Roofline:
        """A model on an instance's ranks: a mesh (replicas, fsdp, tp), row-major."""
        model, devices = self.graph.model(instance.model), instance.devices
        across = instance.fsdp * instance.tp
        size = dtype_bytes(model)
        found = Roofline(
            kind=self.cluster.kind_of(devices[0]),
            shape=shape,
            size=size,
            predicts=model.head != "value",
            gathers=instance.fsdp > 1 or (instance.trained and size < FULL_BYTES),
            streamed=bool(instance.offload),
            micro_tokens=instance.micro_tokens,
            tp=group_of(self.cluster, devices[: instance.tp]),
            fsdp=group_of(self.cluster, devices[: across : instance.tp]),
            replicas=group_of(self.cluster, devices[::across] if instance.trained else ()),
        )
        return with_serving(found, instance, self)

    def copy(
        self,
        moved: int | None,
        lanes: int | None = None,
        *,
        devices: Sequence[int] = (),
        kind: ActionKind | None = None,
        transport: Transport | None = None,
    ) -> Cost:
        """The cost of moving bytes between devices, or between devices and their hosts.

        `moved` bytes in all, by `lanes` devices side by side: all of `devices` if it is not said,
        one if there are none. A sleep or a wake goes over the link to the host, and so does what
        has no `kind` and names devices; a transfer goes through the object store. Accelerators
        copy side by side, CPU devices share one memory. A reshard that leaves its processes holds
        buckets.
        """
        if moved is None:
            return Cost(seconds=None, moved=None, source=NOT_HERE)
        beside = lanes or len(devices) or 1
        to_host = kind in ("sleep", "wake") or (kind is None and bool(devices))
        if kind == "transfer":
            bandwidth, beside = OBJECT_STORE, 1
        elif to_host:
            kinds = [self.cluster.kind_of(device) for device in devices] or [self.cluster.kind]
            bandwidth = min(k.host_link * k.reached for k in kinds)
        else:
            bandwidth = copy_bandwidth(self.cluster, devices)
        seconds = moved / (1 if self.cluster.is_cpu else beside) / bandwidth
        seconds += STORE_SECONDS if kind == "transfer" else 0.0
        leaves = transport in ("shared memory", "collective")
        holds = staging(moved, on_cpu=self.cluster.is_cpu) if leaves else ()
        estimate = Cost(
            seconds=seconds,
            moved=moved,
            transient=sum(size for _, size in holds),
            holds=holds,
            source=TABLE,
        )
        if not self.cluster.measured.records:
            return estimate
        record = self._record(self.copy_key(moved, beside, to_host=to_host))
        if record is not None:
            return as_measured(estimate, record, self.setting)
        return self._with_dispatch(estimate)

    @property
    def setting(self) -> Setting:
        """Beside what the actions are planned."""
        return Setting(self.graph.name, self.cluster.count, self.staleness)

    def run_key(self, node: Node, instance: Instance | None, parts: int, piece: Piece) -> str:
        """What a run is measured under: equal for equal work on equal hardware."""
        shape = None if node.model is None else self.shapes.get(node.model)
        prompt, longest = self.tokens(node)
        rows = self.rows(node)
        load = f"rows={rows} prompts={num_prompts(self.graph, node) or rows}"
        load += f" tokens={prompt}+{longest} parts={parts} chunk={piece}"
        model = None if node.model is None else self.graph.model(node.model)
        if instance is not None:
            load += keys.drafter(self.graph, self.shapes, drafter_of(node, instance))
        if instance is not None and shape is not None and instance.options is not None:
            load += keys.waiting(self.roofline(instance, shape), self.load(node, parts, piece))
        return keys.joined(
            self._hardware(instance.devices if instance else ()),
            self.backend,
            keys.work(node),
            keys.model(model, shape, instance),
            load,
        )

    def copy_key(self, moved: int, lanes: int, *, to_host: bool) -> str:
        """What a copy is measured under: its bytes, and by how many devices."""
        what = f"copy to or from the host by {lanes}" if to_host else f"copy by {lanes}"
        return keys.joined(self._hardware(()), self.backend, what, f"{moved} bytes")

    def _hardware(self, devices: Sequence[int]) -> str:
        return keys.hardware(self.cluster.kind_of(max([0, *devices])).name, self.cluster.threads)

    def _record(self, key: str) -> Record | None:
        return self.cluster.measured.find(key, self.setting)

    def dispatch_key(self) -> str:
        """What the wait between actions is measured under."""
        return keys.joined(self._hardware(()), self.backend, "dispatch")

    def _with_dispatch(self, estimate: Cost) -> Cost:
        """An estimate, with the measured wait until any action is started."""
        record = self._record(self.dispatch_key())
        if record is None or estimate.seconds is None:
            return estimate
        source = f"{estimate.source}; dispatch {record.source}"
        return replace(estimate, seconds=estimate.seconds + record.wait, source=source)
