"""Bytes of models in the layouts of their instances: weights, gradients, moments.

And what a reshard of them moves. Knows no rows and no seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlflow.graph.graph import Graph
from rlflow.graph.model import AdamW, Muon
from rlflow.modelfiles.host_memory import LOADING_PIECE
from rlflow.modelfiles.layouts.stages import most_stages
from rlflow.modelfiles.visits import visiting_bytes, widened_bytes
from rlflow.scheduler.costs.layouts import (
    CUTS,
    Cut,
    held_parameters,
    lacking,
    parameters_per_rank,
    shares,
)
from rlflow.scheduler.costs.state import (
    ADAM_MOMENTS,
    FULL_BYTES,
    LOW_BYTES,
    Allocation,
    coded_numbers,
    coded_step_bytes,
    muon_step_bytes,
    saved_bytes,
    state_bytes,
)
from rlflow.scheduler.devices.cluster import Cluster
from rlflow.scheduler.devices.measured import Setting
from rlflow.scheduler.models.quantised import spared_bytes
from rlflow.scheduler.models.shapes import Shape, dtype_bytes, trained_parameters
from rlflow.scheduler.models.stages import cut_of
from rlflow.scheduler.plan.plan import Backend, Instance

LAYERS_AT_ONCE = 2
# Tensors on the host while a random one is drawn, of its size.
TENSORS_DRAWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes for one graph on one cluster; `shapes` has None for models that are not here.

    `backend` and `staleness` say which measurements stand for what is planned. Of instances in
    stages those of one `stage` are counted, by its number, or of the fullest one.
    """

    graph: Graph
    cluster: Cluster
    shapes: Mapping[str, Shape | None]
    backend: Backend = "local"
    staleness: int = 0
    stage: int | None = None

    @property
    def setting(self) -> Setting:
        """Beside what the actions are planned."""
        return Setting(self.graph.name, self.cluster.count, self.staleness)

    def staged(self, instance: Instance) -> Instance:
        """An instance with the number of layers that each of its stages has, where it has several.

        As many each, or one more, where the shape of its model is not known. And with the sizes of
        a tower, where ranks share layers.
        """
        shape = self.shapes[instance.model]
        count = instance.pp * instance.virtual
        if shape is not None and shape.tower and not instance.engine_plan.in_process:
            sizes = (shape.tower - shape.projector, shape.projector)
            instance = replace(instance, seeing=sizes if instance.tp > 1 or count > 1 else ())
        if count == 1 or shape is None or most_stages(shape.family, shape.layers) < count:
            return instance
        predicts = self.graph.model(instance.model).head != "value"
        return replace(instance, stages=cut_of(shape, count, predicts=predicts))

    def weights(self, instance: Instance) -> int | None:
        """Bytes of parameters on each device; embedding and two layers where layers come and go.

        Adapters lie beside the parameters they adapt. What ranks train together is in float32. An
        engine may hold linear layers in fewer bytes.
        """
        shape, model = self.shapes[instance.model], self.graph.model(instance.model)
        if shape is None:
            return None
        count, size = self._held_parameters(instance, shape), dtype_bytes(model)
        trained = state_bytes(instance, size)["weights"]
        if instance.offload == "layers":
            layers = min(shape.layers, LAYERS_AT_ONCE)
            count = min(count, shape.embedding + shape.tower + layers * shape.layer)
        spared = spared_bytes(shape, size, instance.tp) if instance.engine_plan.in_float8 else 0
        if model.lora is not None:
            adapters = self._trained_per_rank(instance)
            if adapters is None:
                return None
            return count * size - spared + adapters * (trained if instance.trained else size)
        changed = self._trained_per_rank(instance) if instance.trained else 0
        return count * size + (changed or 0) * (trained - size) - spared

    def gradients(self, instance: Instance) -> int | None:
        """Bytes of gradients on each device, and of their sums where those lie beside."""
        return self._state(instance, "gradients", "gradient sums")

    def waiting(self, instance: Instance) -> int:
        """Bytes that gradients take beside a rank's share of them, while they are whole.

        Of experts that lie apart they are whole over the ranks that have the same ones.
        """
        size, sizes = self.gradients(instance) or 0, self._trained(instance)
        if instance.ep == 1 or sizes is None:
            return size * (instance.shards - 1)
        each = self._state_bytes(instance)
        count = parameters_per_rank(instance, {"experts": sizes["experts"]}, self.stage)
        experts = count * (each.get("gradients", 0) + each.get("gradient sums", 0))
        same = instance.shards // instance.ep
        return (size - experts) * (instance.shards - 1) + experts * (same - 1)

    def moments(self, instance: Instance) -> int | None:
        """Bytes of an optimizer's moments on each device, and of master weights beside lower ones.

        None of them where they stay on the host.
        """
        size = self._state(instance, "moments", "master")
        return 0 if size and instance.offload == "optimizer" else size

    def hosted(self, instance: Instance) -> int | None:
        """Bytes of the same in host memory for each device, where they stay there."""
        visiting = instance.offload == "optimizer"
        return self._state(instance, "moments", "master") if visiting else 0

    def saved(self, instance: Instance) -> int | None:
        """Bytes that each device's process writes of a checkpoint, and copies to its host first.

        What is trained in its widest form and the moments, once; replicas write a part each.
        """
        count, size = self._trained_per_rank(instance), self._dtype_bytes(instance)
        averaged = self.graph.model(instance.model).averaged
        replicas = len(instance.devices) // instance.ranks
        each = size if averaged else saved_bytes(size, self._moment(instance))
        if count is None:
            return None
        return -(-(count * each - self._spared(instance)) // replicas)

    def loading(self, instance: Instance) -> int:
        """Bytes of host memory that each device's process takes while it loads an instance.

        Random weights are drawn a tensor at a time, of which there are two then. Engines of their
        own load by themselves.
        """
        shape, model = self.shapes[instance.model], self.graph.model(instance.model)
        if shape is None or instance.engine_plan.in_process:
            return 0
        size = dtype_bytes(model)
        if model.init == "random":
            matrices = (rows * columns for rows, columns, _ in shape.matrices)
            largest = max(shape.vocab * shape.hidden, *matrices, 0)
            return max(LOADING_PIECE, TENSORS_DRAWN * largest * size)
        if shape.made_whole and not instance.sharded:
            return max(LOADING_PIECE, shape.parameters * size)
        return LOADING_PIECE

    def visiting(self, instance: Instance) -> int:
        """Bytes that a step makes on each device of a state which is not computed with as kept."""
        count, each = self._trained_per_rank(instance), self._state_bytes(instance)
        if count is None:
            return 0
        if matrices := self.matrices(instance):
            shape = self.shapes[instance.model]
            assert shape is not None
            size, others = self._dtype_bytes(instance), count - matrices
            return muon_step_bytes(
                instance, shape, size, matrices=matrices, others=others, on_cpu=self.cluster.is_cpu
            )
        if coded := self.coded(instance)[0]:
            return coded_step_bytes(instance, self._dtype_bytes(instance), coded, count - coded)
        held = each["moments"] + each.get("master", 0)
        found = visiting_bytes(count, held) if instance.offload == "optimizer" else 0
        return found + (widened_bytes(count, ADAM_MOMENTS) if self.low_moments(instance) else 0)

    def matrices(self, instance: Instance) -> int:
        """Numbers on each device that Muon steps; 0 where AdamW steps all."""
        shape = self.shapes[instance.model]
        muon = isinstance(self.graph.model(instance.model).optimizer, Muon)
        if shape is None or not muon or not instance.trained:
            return 0
        seen = shape.in_seen_matrices
        sizes: dict[Cut, int] = {"columns": shape.in_matrices - seen, "tower": seen}
        return parameters_per_rank(instance, sizes, self.stage)

    def coded(self, instance: Instance) -> tuple[int, int]:
        """Numbers on each device whose moments are in 8 bits, and scales of one of the moments."""
        shape, optimizer = self.shapes[instance.model], self.graph.model(instance.model).optimizer
        if shape is None or not isinstance(optimizer, AdamW) or optimizer.moments != "int8":
            return 0, 0
        numbers, scales = coded_numbers(shape, instance.tp)
        seen = coded_numbers(shape, instance.tp, tower=True)
        sizes: dict[Cut, int] = {"columns": numbers, "tower": seen[0]}
        count = parameters_per_rank(instance, sizes, self.stage)
        # The first rank has most of a vocabulary, which is coded with the rest.
        held = parameters_per_rank(instance, self._shares(instance, shape), self.stage)
        count += self._held_parameters(instance, shape) - held
        sizes = {"columns": scales, "tower": seen[1]}
        return count, parameters_per_rank(instance, sizes, self.stage)

    def _spared(self, instance: Instance) -> int:
        """Bytes of the moments that Muon does not keep, or AdamW keeps in 8 bits."""
        wide = max(self._dtype_bytes(instance), FULL_BYTES)
        coded, scales = self.coded(instance)
        moments = ADAM_MOMENTS * (coded * (wide - 1) - scales * FULL_BYTES)
        return self.matrices(instance) * wide + moments

    def low_moments(self, instance: Instance) -> bool:
        """Whether moments are kept in fewer bits than they are updated in."""
        optimizer = self.graph.model(instance.model).optimizer
        return isinstance(optimizer, AdamW) and optimizer.moments == "bfloat16"

    def _state_bytes(self, instance: Instance) -> Mapping[Allocation, int]:
        """Bytes of each allocation for one trained number."""
        return state_bytes(instance, self._dtype_bytes(instance), self._moment(instance))

    def _moment(self, instance: Instance) -> int | None:
        """Bytes of a moment, where that is kept in fewer than what it is updated in."""
        return LOW_BYTES if self.low_moments(instance) else None

    def _state(self, instance: Instance, *kinds: Allocation) -> int | None:
        """Bytes of some allocations for what is trained of an instance."""
        count = self._trained_per_rank(instance)
        each = self._state_bytes(instance)
        if count is None:
            return None
        spared = self._spared(instance) if "moments" in kinds else 0
        return count * sum(each.get(kind, 0) for kind in kinds) - spared

    def _dtype_bytes(self, instance: Instance) -> int:
        return dtype_bytes(self.graph.model(instance.model))

    def _trained(self, instance: Instance) -> dict[Cut, int] | None:
        """Parameters that an update changes, by how `tp` cuts them; adapters are taken as whole."""
        shape, model = self.shapes[instance.model], self.graph.model(instance.model)
        if shape is None:
            return None
        if model.lora is None:
            found = self._shares(instance, shape)
            return found | {"tower": found["tower"] - shape.frozen}
        adapters = trained_parameters(model, shape)
        return None if adapters is None else {**dict.fromkeys(CUTS, 0), "whole": adapters}

    def _shares(self, instance: Instance, shape: Shape) -> dict[Cut, int]:
        return shares(shape, predicts=self.graph.model(instance.model).head != "value")

    def _held_parameters(self, instance: Instance, shape: Shape) -> int:
        predicts = self.graph.model(instance.model).head != "value"
        return held_parameters(instance, shape, predicts=predicts, stage=self.stage)

    def _trained_per_rank(self, instance: Instance) -> int | None:
        shape, model = self.shapes[instance.model], self.graph.model(instance.model)
        if shape is not None and model.lora is None:
            trained = replace(
                shape, parameters=shape.parameters - shape.frozen, tower=shape.tower - shape.frozen
            )
            return self._held_parameters(instance, trained)
        sizes = self._trained(instance)
        return None if sizes is None else parameters_per_rank(instance, sizes, self.stage)

    def resharded(
        self, source: Instance, target: Instance, *, in_place: bool, lent: bool = False
    ) -> int | None:
        """Bytes that a reshard moves: what the target's processes lack of what training changes.

        For each class of parameters its size times `lacking`; where the weights are copied
        `in_place`, within each process, the target's own pieces instead. An engine with layers in
        fewer bytes is brought its own weights, once for each replica. One that opens buckets which
        are `lent` to it is brought frozen weights too: it may have discarded them.
        """
        if target.engine_plan.in_float8 and in_place:
            whole = self.weights(replace(target, tp=1, devices=target.devices[:1]))
            return None if whole is None else whole * len(target.owners)
        shape, sizes = self.shapes[source.model], self._trained(source)
        if sizes is None or shape is None:
            return None
        sizes = self._shares(source, shape) if lent else sizes
        times = lacking(None if in_place else source, target)
        return int(sum(sizes[how] * times[how] for how in CUTS)) * self._dtype_bytes(source)
