"""Estimates of seconds and bytes, from model shapes and a table of device kinds.

Every figure is marked with its source. Rooflines after Williams et al. 2009: the
larger of compute time and memory time. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlflow.graph.check import num_prompts, num_rows
from rlflow.graph.graph import Graph, Node
from rlflow.scheduler.cluster import Cluster
from rlflow.scheduler.plan import Cost, Instance
from rlflow.scheduler.shapes import Shape, dtype_bytes

ASSUMED_PROMPT_TOKENS = 64
ASSUMED_RESPONSE_TOKENS = 256
LOOKED_AT = 64
MOST_ROWS = 300_000
VALUE_BYTES = {"int64": 8, "float32": 4, "bool": 1, "text": 4}
HOST_SECONDS_PER_ROW = 5e-6
HOST_SECONDS = 2e-4
ADAM_MOMENTS = 2
MOMENT_BYTES = 4
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

    def weight_bytes(self, model: str) -> int | None:
        """Bytes of a model's parameters, whole."""
        shape = self.shapes[model]
        return None if shape is None else shape.parameters * dtype_bytes(self.graph.model(model))

    def optimizer_bytes(self, model: str) -> int | None:
        """Bytes of AdamW's two moments in float32, whole."""
        shape = self.shapes[model]
        return None if shape is None else shape.parameters * ADAM_MOMENTS * MOMENT_BYTES

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

    def run(self, node: Node, instance: Instance | None) -> Cost:
        """The cost of running a node once."""
        if instance is None or node.model is None:
            seconds = HOST_SECONDS + HOST_SECONDS_PER_ROW * self.rows(node)
            return Cost(seconds=seconds, source="assumed per row of host work")
        shape = self.shapes[node.model]
        if shape is None:
            return Cost(seconds=None, transient=None, source="the model's files are not here")
        rows, (prompt, response) = self.rows(node), self.tokens(node)
        prompts = num_prompts(self.graph, node) or rows
        packed = prompts * prompt + rows * response
        size = dtype_bytes(self.graph.model(node.model))
        ranks = len(instance.devices)
        width = shape.kv_heads * shape.head_dim
        if node.op.use == "rollout":
            cache = 2 * shape.layers * width * size * rows * (prompt + response)
            return Cost(
                seconds=self._decode(shape, prompts * prompt, rows, response, size, cache, ranks),
                transient=cache // ranks + rows * shape.vocab * 4 // ranks,
                source=TABLE,
            )
        passes = 1 if node.op.use == "forward" else 3 * dict(node.params).get("epochs", 1)
        parts = dict(node.params).get("mini_batches", 1)
        seconds = passes * self._compute(2 * shape.parameters * packed, ranks)
        activations = packed * shape.hidden * size * ACTIVATIONS_PER_LAYER // parts // ranks
        logits = rows * response * shape.vocab * 4 // parts // ranks
        if node.op.use == "forward":
            return Cost(seconds=seconds, transient=activations + logits, source=TABLE)
        gradients = shape.parameters * size // (instance.fsdp * instance.tp)
        transient = activations * shape.layers + 2 * logits + gradients
        return Cost(seconds=seconds, transient=transient, source=TABLE)

    def copy(self, moved: int | None) -> Cost:
        """The cost of moving bytes between devices, or between a device and the host."""
        if moved is None:
            return Cost(seconds=None, moved=None, source="the model's files are not here")
        return Cost(seconds=moved / self.cluster.kind.link, moved=moved, source=TABLE)

    def _compute(self, flops: float, ranks: int) -> float:
        return flops / (self.cluster.kind.flops * COMPUTE_SHARE * ranks)

    def _decode(
        self,
        shape: Shape,
        prompt_tokens: int,
        rows: int,
        steps: int,
        size: int,
        cache: int,
        ranks: int,
    ) -> float:
        prefill = self._compute(2 * shape.parameters * prompt_tokens, ranks)
        compute = self._compute(2 * shape.parameters * rows, ranks)
        memory = (shape.parameters * size + cache / 2 / ranks) / self.cluster.kind.bandwidth
        return prefill + steps * (max(compute, memory) + DECODE_OVERHEAD)
