"""Rules of the verifier: rows that are carried or kept take the bytes of their fields.

Rows are as many as the graph says. A field takes a value a row, or one a token of responses at
their longest; text is taken to be as long. How long prompts are no graph says: whatever it is, it
is the same for all rows of one data. Knows the graph and the plan; shares no code with the passes
or the costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor

from rlflow.graph.fields import Field
from rlflow.graph.graph import Graph, Node
from rlflow.graph.roles import Drawn, SamplingOptions
from rlflow.graph.rules.check import longest_response, most_rows
from rlflow.graph.rules.completion_order import ended_rows
from rlflow.scheduler.plan.plan import Action, Chunk, Spread
from rlflow.scheduler.verify.happens_before import Facts

# Bytes of a value; of text, of each token that it may be.
VALUE = {"int64": 8, "int16": 2, "float32": 4, "bool": 1, "text": 4, "image": 2352}
INTEGER = VALUE["int64"]

Rows = Fraction | int
# Data, and the model whose tokenizer has read its prompts.
Counted = tuple[int, str | None]


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Bytes of a row: `each` of what is known, `prompts` for each token of its prompt.

    And at the least `open_ended`, of fields that are of nobody knows how many tokens.
    """

    each: int
    prompts: int
    open_ended: int

    def tokens(self, size: int, rows: Rows, *, off: int = 0) -> tuple[int, int] | None:
        """The fewest and the most tokens of a prompt for which rows take so many bytes.

        Up to `off` bytes more. None where no number does; 0 stands for prompts that are not there.
        """
        least = Fraction(size) / rows - self.each - self.open_ended
        most = Fraction(size + off) / rows - self.each - self.open_ended
        if self.open_ended:
            return (0, 2**62) if most >= self.prompts else None
        if not self.prompts:
            return (0, 2**62) if least <= 0 <= most else None
        found = max(ceil(least / self.prompts), 1), floor(most / self.prompts)
        return found if found[0] <= found[1] else None


def rows_take_their_bytes(facts: Facts) -> Iterator[str]:
    """Transfers move the bytes of their fields, of the rows that are lacking where they go.

    Of rows in q parts a device that has one lacks all but a q-th, wherever they lie; a part is sent
    once for all of its devices. Rows that a node keeps take all that it reads, the length of each
    field that has one, and their age.
    """
    prompts: dict[Counted, tuple[int, int]] = {}
    graph = facts.plan.graph
    for a in facts.plan.actions:
        if a.kind == "transfer" and a.takes is not None and a.makes is not None:
            node = graph.node(str(a.node))
            fields = [field for field in node.op.outputs if field.name in a.fields]
            rows = (most_rows(graph, node) or 1) * _share(a.chunk)
            lacked, row = rows * _lacked(a.takes, a.makes), _row_bytes(graph, node, fields)
            if not _agrees(graph, node, row, a.cost.moved, lacked, prompts, off=2):
                yield f"{a.id} moves {a.cost.moved} bytes of {float(lacked):g} rows, one is {row}"
            yield from _wide_rows_lie(facts, node, a, rows)
    for kept in facts.plan.kept:
        node = graph.node(kept.node)
        makes = node.op.rows == "expand"
        fields = list(node.op.outputs) if makes else [bound.field for bound in node.inputs]
        ragged = sum(field.ragged for field in fields)
        row = _row_bytes(graph, node, fields)
        size = kept.size - kept.rows * INTEGER * (1 + ragged)
        if kept.rows and not _agrees(graph, node, row, size, kept.rows, prompts):
            yield f"{kept.node} keeps {kept.rows} rows in {kept.size} bytes, one is {row}"


def _agrees(
    graph: Graph,
    node: Node,
    row: RowBytes,
    size: int | None,
    rows: Rows,
    prompts: dict[Counted, tuple[int, int]],
    *,
    off: int = 0,
) -> bool:
    """Whether so many rows take so many bytes, with prompts as long as elsewhere."""
    if size is None or not rows:
        return size == 0
    found = row.tokens(size, rows, off=off)
    data = _data_of(graph, node)
    if found is None or not found[0] or data is None:
        return found is not None
    known = prompts.get(data, found)
    prompts[data] = max(known[0], found[0]), min(known[1], found[1])
    return prompts[data][0] <= prompts[data][1]


def _data_of(graph: Graph, node: Node) -> Counted | None:
    """The data that a node's rows are drawn from; None where they may be of several.

    With the model that has read their prompts, whose tokens those are.
    """
    reader = (graph.node(node.rows_of) if node.rows_of else node).model
    for _ in graph.nodes:
        maker = graph.node(node.rows_of) if node.rows_of else node
        if maker.counts is not None or maker.ends_loop:
            return None
        if (drawn := maker.role(Drawn)) is not None:
            return id(drawn.data), reader
        parents = [graph.node(name) for name in maker.sources]
        if not parents:
            return None
        node = parents[0]
    return None


def _lacked(source: Spread, target: Spread) -> Fraction:
    """The share of all rows that the devices of a spread lack where they lie as in another."""
    if source == target or not (source.parts and all(target.parts)):
        return Fraction(0)
    away = 1 - Fraction(1, len(source.parts))
    lacks = [max(away if d in source.devices else Fraction(1) for d in p) for p in target.parts]
    return sum(lacks, Fraction(0)) / max(len(lacks), 1) * target.pieces


def _share(chunk: Chunk | None) -> Fraction:
    """The share of all rows that a chunk has."""
    if chunk is None:
        return Fraction(1)
    if chunk.by == "prompts":
        return Fraction(1, chunk.count)
    whole = chunk.count * (chunk.count + 1)
    before, after = (ended_rows(whole, chunk.index + end, chunk.count) for end in (0, 1))
    return Fraction(after - before, whole)


def _row_bytes(graph: Graph, node: Node, fields: Sequence[Field]) -> RowBytes:
    """The bytes of some fields of a row that a node makes, or reads."""
    found = {"each": 0, "prompts": 0, "open_ended": 0}
    longest = _longest(graph, node)
    for field in fields:
        size = VALUE[field.dtype] * (field.width or 1)
        if not field.ragged:
            found["each"] += size
        elif field.of_prompt:
            found["prompts"] += size
        elif longest is None:
            found["open_ended"] += size
        else:
            found["each"] += size * longest
    return RowBytes(**found)


def _longest(graph: Graph, node: Node) -> int | None:
    """Tokens of the longest response of a node's rows; None where the graph does not say."""
    if (of_episodes := longest_response(graph, node)) is not None:
        return of_episodes
    maker = graph.node(node.rows_of) if node.rows_of else node
    said = maker.role(SamplingOptions)
    if said is None or maker.counts is not None or maker.ends_loop:
        return None
    return said.max_new_tokens


def _wide_rows_lie(facts: Facts, node: Node, a: Action, rows: Rows) -> Iterator[str]:
    """A transfer takes no memory of a device but for wide fields, where devices are the host's."""
    wide = [field for field in node.op.outputs if field.name in a.fields and field.width]
    row = _row_bytes(facts.plan.graph, node, wide)
    parts = 1 if a.makes is None else max(len(a.makes.parts), 1)
    if not (row.prompts or row.open_ended) and (a.cost.transient or 0) > row.each * rows / parts:
        yield f"{a.id} takes {a.cost.transient} bytes, its wide fields have {row.each} a row"
