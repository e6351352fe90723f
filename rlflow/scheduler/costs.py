"""Estimates of seconds and bytes, from model shapes and a table of device kinds.

Every figure is marked with its source. Rooflines after Williams et al. 2009: the
larger of compute time and memory time. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from rlflow.graph.check import num_prompts, num_rows
from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.cluster import Cluster
from rlflow.scheduler.layouts import CUTS, Cut, area, lacking, parameters_per_rank, piece, shares
from rlflow.scheduler.plan import Cost, Instance
from rlflow.scheduler.shapes import Shape, dtype_bytes, trained_parameters

ASSUMED_PROMPT_TOKENS = 64
ASSUMED_RESPONSE_TOKENS = 256
LOOKED_AT = 64
MOST_ROWS = 300_000
VALUE_BYTES = {"int64": 8, "float32": 4, "bool": 1, "text": 4}
HOST_SECONDS_PER_ROW = 5e-6
HOST_SECONDS = 2e-4
ADAM_MOMENTS = 2
FULL_BYTES = 4
LAYERS_AT_ONCE = 2
COMPUTE_SHARE = 0.4
DECODE_OVERHEAD = 5e-4
ACTIVATIONS_PER_LAYER = 16
TABLE = "model shape and device table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Estimates for one graph on one cluster; `shapes` has None for models that are not here."""

    graph: Graph
    cluster: Cluster
    shapes: Mapping[str, Shape | None]

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
        origin = self.graph.node(node.rows_of) if node.rows_of else node
        longest = dict(origin.params).get("max_new_tokens", ASSUMED_RESPONSE_TOKENS)
        return self._prompt_tokens(node), int(longest)

    def _prompt_tokens(self, node: Node) -> int:
        origin = node
        while "data" not in dict(origin.params):
            parents = [self.graph.node(name) for name in origin.sources]
            if not parents:
                return ASSUMED_PROMPT_TOKENS
            origin = parents[0]
        source = origin.param("data")
        if source.remote or (source.size() or MOST_ROWS) >= MOST_ROWS:
            return ASSUMED_PROMPT_TOKENS
        return max(len(str(row["prompt"])) for row in source.rows()[:LOOKED_AT])

    def fields(self, node: Node, names: tuple[str, ...]) -> int:
        """Bytes of a node's outputs: 8 an integer, 4 a float, 1 a bool, 4 a token of text."""
        rows, (prompt, response) = self.rows(node), self.tokens(node)
        total = 0
        for name in names:
            made = node.op.output(name)
            if made is not None:
                length = prompt if name.startswith("prompt") else response
                wide = made.level == "token" or made.dtype == "text"
                total += rows * VALUE_BYTES[made.dtype] * (length if wide else 1)
        return total

    def run(self, node: Node, instance: Instance | None, parts: int) -> Cost:
        """The cost of running a node once, its rows in as many parts."""
        if instance is None or node.model is None:
            seconds = HOST_SECONDS + HOST_SECONDS_PER_ROW * self.rows(node) / parts
            return Cost(seconds=seconds, source="assumed per row of host work")
        shape = self.shapes[node.model]
        if shape is None:
            return Cost(seconds=None, transient=None, source="the model's files are not here")
        if node.op.use == "rollout":
            return self._rollout(node, instance, shape, parts)
        return self._passes(node, instance, shape, parts)

    def _passes(self, node: Node, instance: Instance, shape: Shape, parts: int) -> Cost:
        """A forward, or the forwards and backwards of an update.

        A backward computes twice as much as a forward. Recomputing keeps the inputs of all
        layers and the activations of one, and computes every forward twice (Chen et al. 2016).
        """
        rows, (prompt, response) = self.rows(node), self.tokens(node)
        prompts = num_prompts(self.graph, node) or rows
        ranks, batches = parts * instance.tp, dict(node.params).get("mini_batches", 1)
        packed = prompts * prompt + rows * response
        inputs = packed * shape.hidden * self._dtype_bytes(instance) // batches // ranks
        activations, logits = (
            inputs * ACTIVATIONS_PER_LAYER,
            rows * response * shape.vocab * FULL_BYTES // batches // ranks,
        )
        forward = self._compute(2 * shape.parameters * packed, ranks)
        if node.op.use == "forward":
            seconds = max(forward, self._streamed(instance, shape))
            return Cost(seconds=seconds, transient=activations + logits, source=TABLE)
        seconds = (4 if instance.recompute else 3) * forward * dict(node.params).get("epochs", 1)
        kept = activations * shape.layers
        if instance.recompute:
            kept = inputs * shape.layers + activations
        return Cost(seconds=seconds, transient=kept + 2 * logits, source=TABLE)

    def _streamed(self, instance: Instance, shape: Shape) -> float:
        """Seconds to bring every layer from the host once; 0 for a model on the device."""
        if not instance.offload:
            return 0.0
        count = parameters_per_rank(instance, shares(shape))
        return count * self._dtype_bytes(instance) / self.cluster.kind.link

    def copy(self, moved: int | None, lanes: int = 1) -> Cost:
        """The cost of moving bytes between devices, or between a device and the host.

        Accelerators receive side by side, CPU devices share one memory.
        """
        if moved is None:
            return Cost(seconds=None, moved=None, source="the model's files are not here")
        beside = 1 if self.cluster.is_cpu else lanes
        seconds = moved / beside / self.cluster.kind.link
        return Cost(seconds=seconds, moved=moved, source=TABLE)

    def _compute(self, flops: float, ranks: int) -> float:
        return flops / (self.cluster.kind.flops * COMPUTE_SHARE * ranks)

    def _rollout(self, node: Node, instance: Instance, shape: Shape, parts: int) -> Cost:
        """A prefill of the prompts, then a forward of one token a row for every token."""
        rows, (prompt, response) = self.rows(node), self.tokens(node)
        prompts = num_prompts(self.graph, node) or rows
        ranks, size = parts * instance.tp, self._dtype_bytes(instance)
        width = shape.kv_heads * shape.head_dim
        cache = 2 * shape.layers * width * size * rows * (prompt + response) // ranks
        prefill = self._compute(2 * shape.parameters * prompts * prompt, ranks)
        compute = self._compute(2 * shape.parameters * rows, ranks)
        read = shape.parameters * size / instance.tp + cache / 2
        memory = max(read / self.cluster.kind.bandwidth, self._streamed(instance, shape))
        return Cost(
            seconds=prefill + response * (max(compute, memory) + DECODE_OVERHEAD),
            transient=cache + rows * shape.vocab * FULL_BYTES // ranks,
            source=TABLE,
        )
