"""Estimates of seconds and bytes: measured where an earlier run did the same, else by roofline.

Every figure is marked with its source. What is not measured follows from model shapes and a
table of device kinds. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlflow.graph.graph import Node
from rlflow.graph.roles import Averaged, Drafted, Learning
from rlflow.graph.rules.check import num_prompts, row_counts
from rlflow.graph.rules.steps import steps_of
from rlflow.modelfiles.chunks import MOST
from rlflow.modelfiles.kernels.head import HeadAsked, head_by_rows
from rlflow.scheduler.costs import measurement_keys as keys
from rlflow.scheduler.costs.distributions import (
    DRAFTS,
    ORTHOGONAL,
    VISITING,
    at_least,
    beside_gradients,
    field_bytes,
    holds,
    likeliest_seconds,
    numbers_alive,
    with_drafts,
)
from rlflow.scheduler.costs.lengths import Load
from rlflow.scheduler.costs.pieces import WHOLE, Piece, as_measured
from rlflow.scheduler.costs.ranks.attending import DTYPES
from rlflow.scheduler.costs.ranks.draft_turns import DraftTurn, drafting_shape, turn_of
from rlflow.scheduler.costs.ranks.optimizer_seconds import averaging, orthogonal_seconds
from rlflow.scheduler.costs.ranks.pipeline import piped, piped_update
from rlflow.scheduler.costs.ranks.rank_memory import CACHE, Holds
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.costs.rows.expected import ExpectedRows
from rlflow.scheduler.costs.rows.rollouts import rollout_seconds
from rlflow.scheduler.costs.rows.steady import most_dealt, rollout_swings
from rlflow.scheduler.costs.seen.corrections import (
    beside_curves,
    corrected_by,
    correction_key,
    correction_of,
)
from rlflow.scheduler.costs.serving import serving_of
from rlflow.scheduler.devices.collectives import (
    as_shared,
    copy_bandwidth,
    group_of,
    staging,
    to_host_rate,
)
from rlflow.scheduler.devices.efficiency import slowest
from rlflow.scheduler.devices.hardware import OBJECT_STORE, STORE_SECONDS
from rlflow.scheduler.models.quantised import spared_bytes
from rlflow.scheduler.models.shapes import Shape, dtype_bytes
from rlflow.scheduler.plan.plan import ActionKind, Cost, Instance, Transport

HOST_SECONDS_PER_ROW = 5e-6
HOST_SECONDS = 2e-4
FULL_BYTES = 4
# Bytes that are read and written to make two moments of 8 bits wide and to code them.
CODED = 2 * 50
TABLE = "model shape and device table"
HOST_WORK = "assumed per row of host work"
NOT_HERE = "the model's files are not here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs(ExpectedRows):
    """Estimates of seconds and bytes for one graph on one cluster."""

    @property
    def unsaid(self) -> Costs:
        """The same, of a graph whose lengths nobody has said."""
        return Costs(
            graph=replace(self.graph, lengths=None),
            cluster=self.cluster,
            shapes=self.shapes,
            backend=self.backend,
            staleness=self.staleness,
            prompts=self.prompts,
        )

    def fields(self, node: Node, names: tuple[str, ...]) -> int:
        """Bytes of a node's outputs of those names, of all rows."""
        made = [field for field in node.op.outputs if field.name in names]
        return self.rows(node) * sum(field_bytes(field, *self.tokens(node)) for field in made)

    def run(self, node: Node, instance: Instance | None, parts: int, piece: Piece = WHOLE) -> Cost:
        """The cost of running a node once, its rows in as many parts; or of one piece of it."""
        estimate = self.table(node, instance, parts, piece)
        if not self.cluster.measured.records or (instance is not None and estimate.seconds is None):
            return estimate
        if self.graph.lengths is not None and instance is not None:
            return self._as_said(node, instance, parts, piece, estimate)
        curves = self.curves_of(instance)
        record = self.record_of(self.run_key(node, instance, parts, piece))
        if record is not None:
            return beside_curves(estimate, record, self.setting, curves)
        for other in piece.relatives:
            record = self.record_of(self.run_key(node, instance, parts, other))
            seconds = self.table(node, instance, parts, other).seconds
            if record is not None and seconds and estimate.seconds is not None:
                found = as_measured(estimate, record, self.setting, estimate.seconds / seconds)
                return replace(found, source=f"{found.source}, {piece.as_part_of(other)}")
        return self.with_dispatch(self._corrected(estimate, node, instance))

    def _corrected(self, estimate: Cost, node: Node, instance: Instance | None) -> Cost:
        """An estimate by measured curves, as spans of the same kind of work correct it."""
        curves = self.curves_of(instance)
        if instance is None or not curves:
            return estimate
        known = self.cluster.measured.all(self.correction_key(instance, node.op.use or "forward"))
        return corrected_by(estimate, correction_of(known), curves)

    def _as_said(
        self, node: Node, instance: Instance, parts: int, piece: Piece, estimate: Cost
    ) -> Cost:
        """What was measured at other lengths, times what those that are said change of it."""
        found = self.unsaid.run(node, instance, parts, piece)
        before = self.unsaid.table(node, instance, parts, piece).seconds
        if not before or found.seconds is None or estimate.seconds is None:
            return estimate
        if found.source.startswith(estimate.source):
            return self.with_dispatch(self._corrected(estimate, node, instance))
        share = estimate.seconds / before
        source = found.source if share == 1 else f"{found.source}, by the lengths"
        return replace(estimate, seconds=found.seconds * share, source=source)

    def table(
        self, node: Node, instance: Instance | None, parts: int, piece: Piece = WHOLE
    ) -> Cost:
        """The cost by model shape and device table alone: of the rows that are expected.

        Memory is that of the most rows that there may be.
        """
        found, counts = self._of_all(node, instance, parts, piece), row_counts(self.graph, node)
        if counts is None or found.seconds is None:
            return found
        return replace(found, seconds=found.seconds * float(counts.expected))

    def _of_all(self, node: Node, instance: Instance | None, parts: int, piece: Piece) -> Cost:
        if instance is None or node.model is None:
            seconds = HOST_SECONDS + HOST_SECONDS_PER_ROW * self.rows(node) / parts * piece.share
            return Cost(seconds=seconds, source=HOST_WORK)
        shape = self.shapes[node.model]
        if shape is None:
            return Cost(seconds=None, transient=None, source=NOT_HERE)
        roof = self.roofline_of(node, instance, shape)
        if (averaged := node.role(Averaged)) is not None:
            of = dtype_bytes(self.graph.model(averaged.source))
            trained = self._trained_per_rank(instance) or 0
            return averaging(roof, trained, of, period=averaged.every, source=TABLE)
        load = self.load(node, parts, piece)
        if node.op.use == "rollout":
            seconds = rollout_seconds(roof, node, load, piece)
        elif node.op.use == "forward":
            seconds = piped(roof, load, lambda each: each.forward(load))
            seconds += likeliest_seconds(node, roof, load)
        else:
            learning, router = node.role(Learning), self.graph.model(node.model).router
            batches = 1.0 if piece.groups else steps_of(node) * piece.share
            trained, hosted = self._trained_per_rank(instance) or 0, self.hosted(instance) or 0
            sent = trained * max(roof.size, FULL_BYTES)
            step = roof.step(trained, hosted, rounded=self.low_moments(instance))
            if matrices := self.matrices(instance):
                step += orthogonal_seconds(roof, matrices)
            step += roof.read(CODED * self.coded(instance)[0])
            again = instance.recomputes
            one = piped_update(roof, load, sent, again) + (step if piece.steps else 0.0)
            before = getattr(learning and learning.loss, "forwards", 0)
            before += bool(router is not None and router.balance_coef)
            first = before * piped(roof, load, lambda each: each.forward(load))
            seconds = batches * (first + one + likeliest_seconds(node, roof, load))
        found = () if keeps_workspace(roof) else self._holds(node, instance, roof, load)
        found = tuple(h for h in found if not piece.leg or h[0] not in (CACHE, DRAFTS))
        if not roof.on_cpu:  # All of them wait for the slowest.
            seconds *= slowest(len(instance.devices))
        swings, size = rollout_swings(roof, node, load), sum(each for _, each in found)
        return Cost(seconds=seconds, transient=size, holds=found, source=TABLE, swings=swings)

    def held(self, node: Node, instance: Instance, parts: int) -> int:
        """Bytes that running a node holds beside the model; 0 where its shape is not known."""
        return sum(size for _, size in self.working(node, instance, parts))

    def working(self, node: Node, instance: Instance, parts: int) -> Holds:
        """The same by what it is, the largest first."""
        shape = self.shapes[instance.model]
        if shape is None:
            return ()
        roof = self.roofline_of(node, instance, shape)
        return self._holds(node, instance, roof, self.load(node, parts, WHOLE))

    def _holds(self, node: Node, instance: Instance, roof: Roofline, load: Load) -> Holds:
        found = holds(node, roof, most_dealt(node, load), recompute=instance.recomputes)
        if node.op.use == "train":
            size = self.gradients(instance) or 0
            whole = self.waiting(instance)
            found = beside_gradients(found, instance, roof, load, size, whole)
            why = ORTHOGONAL if self.matrices(instance) else VISITING
            found = at_least(found, self.visiting(instance), why)
        drafter, name = None, instance.engine_plan.drafter_of(node)
        if name is not None and (shape := self.shapes[name]) is not None:
            drafter = self.roofline(replace(instance, model=name), shape)
        return with_drafts(found, node, instance, roof, load, drafter)

    def cache(self, node: Node, instance: Instance, parts: int) -> int | None:
        """Bytes of keys and values of all rows of a rollout on each device of its instance."""
        if self.shapes[instance.model] is None:
            return None
        held = dict(self.working(node, instance, parts))
        return held.get(CACHE, 0) + held.get(DRAFTS, 0)

    def roofline_of(self, node: Node, instance: Instance, shape: Shape) -> Roofline:
        """A model as a node uses it: rollouts share no sequence, some rows have no blocks."""
        roof = self.roofline(instance, shape)
        use, drafted = node.op.use or "forward", node.role(Drafted) is not None
        turn = self.turn(node, instance)
        return replace(
            roof,
            paged=roof.paged and not (drafted or node.op.chooses or node.op.recalls),
            sequence=roof.sequence and use != "rollout",
            tf32=use in instance.tf32,
            by_rows=head_by_rows(
                HeadAsked(
                    device="cpu" if roof.on_cpu else "cuda",
                    dtype=DTYPES.get(roof.size, "float64"),
                    more=numbers_alive(node) == MOST,
                )
            ),
            turn=turn,
            proposer=None if turn is None else self._drafter(node, instance, shape, roof),
        )

    def turn(self, node: Node, instance: Instance) -> DraftTurn | None:
        """A turn of a rollout that drafts; None where nothing is drafted, or counts."""
        return turn_of(node, instance, self) if node.op.use == "rollout" else None

    def _drafter(
        self, node: Node, instance: Instance, policy: Shape, roof: Roofline
    ) -> Roofline | None:
        """What drafts for a node's rows, as it lies beside its policy; None for n-grams."""
        name = instance.engine_plan.drafter_of(node)
        if name is None:
            found = drafting_shape(instance, policy, roof.size)
            return None if found is None else replace(roof, shape=found, spared=0)
        shape = self.shapes[name]
        if shape is None:
            return None
        return replace(self.roofline(replace(instance, model=name), shape), paged=False)

    def roofline(self, instance: Instance, shape: Shape) -> Roofline:
        """A model on an instance's ranks: a mesh (replicas, pp, fsdp, tp), row-major."""
        model = self.graph.model(instance.model)
        devices, across, size = instance.devices, instance.stage_ranks, dtype_bytes(model)
        low = instance.trained and size < FULL_BYTES
        return Roofline(
            kind=as_shared(self.cluster, devices),
            shape=shape,
            size=size,
            predicts=model.head != "value",
            gathers=instance.shards > 1 or (instance.sharded and low),
            streamed=instance.offload == "layers",
            kept_whole=instance.kept_whole,
            sequence=instance.sequence,
            reduces_last=instance.reduces_last,
            hosts_activations=instance.hosts_activations,
            micro_tokens=instance.micro_tokens,
            trains_vocabulary=instance.trained and model.lora is None,
            tp=group_of(self.cluster, devices[: instance.tp]),
            fsdp=group_of(self.cluster, devices[: across : instance.tp]),
            ep=group_of(self.cluster, devices[: instance.ep * instance.tp : instance.tp]),
            shard=group_of(self.cluster, devices[: across : instance.ep * instance.tp]),
            cp=group_of(self.cluster, devices[: instance.cp * instance.tp : instance.tp]),
            cp_by=instance.cp_by,
            replicas=group_of(self.cluster, devices[:: instance.ranks]),
            pp=instance.pp,
            virtual=instance.virtual,
            splits=instance.schedule == "zero-bubble" and model.lora is None,
            stage=self.stage,
            hop=group_of(self.cluster, devices[: 2 * across : across] if instance.pp > 1 else ()),
            serving=serving_of(instance, self),
            spared=spared_bytes(shape, size, instance.tp) if instance.engine_plan.in_float8 else 0,
            paged=paged_there(instance, self.cluster.kind_of(devices[0]).name),
            rows_at_once=instance.rows_at_once,
        )

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
            kinds += [as_shared(self.cluster, devices)] if devices else []
            bandwidth = min(to_host_rate(k, moved / beside) for k in kinds)
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
        record = self.record_of(self.copy_key(moved, beside, to_host=to_host))
        if record is not None:
            return as_measured(estimate, record, self.setting)
        return self.with_dispatch(estimate)

    def run_key(self, node: Node, instance: Instance | None, parts: int, piece: Piece) -> str:
        """What a run is measured under: equal for equal work on equal hardware."""
        if self.graph.lengths is not None:
            return self.unsaid.run_key(node, instance, parts, piece)
        shape = None if node.model is None else self.shapes.get(node.model)
        prompt, longest = self.tokens(node)
        rows = self.rows(node)
        load = f"rows={rows} prompts={num_prompts(self.graph, node) or rows}"
        load += f" tokens={prompt}+{longest} parts={parts} chunk={piece}"
        model = None if node.model is None else self.graph.model(node.model)
        if instance is not None:
            load += keys.drafter(self.graph, self.shapes, instance.engine_plan.drafter_of(node))
        if instance is not None and shape is not None and instance.engine_plan.own_process:
            found = self.load(node, parts, piece)
            room = self.roofline(instance, shape).at_once(found)
            load += keys.waiting(found.rows, at_once=room)
        return keys.key_of_parts(
            self._hardware(instance.devices if instance else ()),
            self.backend,
            keys.work(node),
            keys.model(model, shape, instance),
            load,
        )

    def copy_key(self, moved: int, lanes: int, *, to_host: bool) -> str:
        """What a copy is measured under: its bytes, and by how many devices."""
        what = f"copy to or from the host by {lanes}" if to_host else f"copy by {lanes}"
        return keys.key_of_parts(self._hardware(()), self.backend, what, f"{moved} bytes")

    def curves_of(self, instance: Instance | None) -> str:
        """The version of the curves that were measured of an instance's devices; "" for none."""
        return "" if instance is None else self.cluster.kind_of(instance.devices[0]).curves.version

    def correction_key(self, instance: Instance, use: str) -> str:
        """What spans say of estimates of a use on such devices is kept under."""
        hardware = self._hardware(instance.devices)
        return correction_key(hardware, self.backend, use, self.curves_of(instance))

    def _hardware(self, devices: Sequence[int]) -> str:
        return keys.hardware(self.cluster.kind_of(max([0, *devices])).name, self.cluster.threads)

    def dispatch_key(self) -> str:
        """What the wait between actions is measured under."""
        return keys.key_of_parts(self._hardware(()), self.backend, "dispatch")

    def with_dispatch(self, estimate: Cost) -> Cost:
        """An estimate, with the measured wait until any action is started."""
        record = self.record_of(self.dispatch_key())
        if record is None or estimate.seconds is None:
            return estimate
        source = f"{estimate.source}; dispatch {record.source}"
        return replace(estimate, seconds=estimate.seconds + record.wait, source=source)


def keeps_workspace(roof: Roofline) -> bool:
    """Whether what it computes in is an engine's process's own, which keeps it between passes."""
    return roof.serving is not None and roof.kind.name != "cpu"


def paged_there(instance: Instance, kind: str) -> bool:
    """Whether rollouts of an instance have a pool of blocks: the embedded engine's on a device."""
    return kind != "cpu" and not instance.engine_plan.own_process
