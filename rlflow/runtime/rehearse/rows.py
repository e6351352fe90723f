"""Rows of the sizes that a plan assumes, at their longest, in the place of what actions leave.

Prompts are random tokens, so that no two are the same; what else a node reads is zero. Knows fields
and sizes, no models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlflow.batch import make_batch, ragged, shared, text
from rlflow.graph.fields import IMAGE, PICTURES, PIXELS, Binding, DType, Field
from rlflow.graph.graph import Node
from rlflow.runtime.rehearse.pictures import PicturesAtLongest
from rlflow.runtime.worker.reading import Read
from rlflow.runtime.worker.store import ShardStore, Stored
from rlflow.scheduler.plan.plan import Action

DTYPES: dict[DType, torch.dtype] = {
    "int64": torch.int64,
    "int16": torch.int16,
    "float32": torch.float32,
    "bool": torch.bool,
}
SEED = 0
# Lengths of responses that are tried for those that fill a micro-batch, at the most.
LENGTHS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """Rows of one part of an action: how many, of how many prompts, and tokens at their longest."""

    rows: int
    prompts: int
    prompt: int
    response: int
    pictures: PicturesAtLongest | None = None

    @property
    def group(self) -> int:
        """Rows of one prompt."""
        return math.ceil(self.rows / self.prompts)

    def filling(self, micro_tokens: int, *, steps: int = 1) -> RowSizes:
        """The same with responses of which a micro-batch has most tokens, no longer than they are.

        Rows of one of so many steps that fit in one are as they are, and so is a row beyond it.
        """
        rows, prompts = self.rows // steps, self.prompts // steps
        whole = prompts * self.prompt + rows * self.response
        if whole <= micro_tokens or self.prompt + self.response > micro_tokens:
            return self
        lengths = range(self.response, self.response // 2, -max(1, self.response // LENGTHS))
        best = max(lengths, key=lambda length: self._fullest(rows, length, micro_tokens))
        return replace(self, response=best)

    def _fullest(self, rows: int, response: int, micro_tokens: int) -> int:
        """The most tokens of a micro-batch, where responses are so long; groups stand together."""
        most = tokens = 0
        for row in range(rows):
            first = row % self.group == 0
            added = response + (self.prompt if first else 0)
            if tokens + added > micro_tokens:
                tokens, added = 0, response + self.prompt
            tokens += added
            most = max(most, tokens)
        return most


class RowsAtLongest:
    """What a worker reads in a rehearsal, of each action the rows that its plan counts with.

    Token ids lie below `vocabulary`.
    """

    def __init__(self, sizes: Mapping[str, RowSizes], vocabulary: int) -> None:
        self._sizes = sizes
        self._vocabulary = vocabulary

    def of(self, action: Action, node: Node, iteration: int) -> Read:
        """The rows of an action, as `Reading.of` has them."""
        size = self._sizes[action.id]
        count = 1 + max(bound.part for bound in node.inputs)
        batches = [
            make_batch(self._fields([b for b in node.inputs if b.part == part], size), size.rows)
            for part in range(count)
        ]
        return Read(inputs=batches[0], others=tuple(batches[1:]), total=size.rows)

    def _fields(self, bounds: Sequence[Binding], size: RowSizes) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(SEED)
        found = {bound.name: self._field(bound.field, size, drawn) for bound in bounds}
        if "group" in found:
            found["group"] = torch.arange(size.rows) // size.group
        return found

    def _field(self, field: Field, size: RowSizes, drawn: torch.Generator) -> Tensor:
        if field.dtype in ("text", IMAGE):
            return text([""] * size.rows)
        if field.name in (PIXELS, PICTURES):
            return self._seen(field, size)
        dtype = DTYPES[field.dtype]
        wide = () if field.width is None else (field.width,)
        if field.level == "row":
            return torch.zeros(size.rows, *wide, dtype=dtype)
        length = size.prompt if field.name.startswith("prompt") else size.response
        if field.name in ("prompt_tokens", "response_tokens"):
            prompts = field.name == "prompt_tokens"
            count = size.prompts if prompts else size.rows
            tokens = torch.randint(self._vocabulary, (count, length), generator=drawn)
            if size.pictures is not None:
                tokens = size.pictures.standing_in(tokens, prompts=prompts)
            values = tokens.repeat_interleave(size.group, 0)[: size.rows] if prompts else tokens
            values = values.flatten()
        elif field.dtype == "bool":
            values = torch.ones(size.rows * length, *wide, dtype=dtype)
        else:
            values = torch.zeros(size.rows * length, *wide, dtype=dtype)
        return ragged(values, torch.full((size.rows,), length))

    def _seen(self, field: Field, size: RowSizes) -> Tensor:
        """The pixels of every prompt's pictures, or their shapes, which rows of a prompt share."""
        if size.pictures is None:
            none = torch.zeros(0, field.width or 1, dtype=DTYPES[field.dtype])
            return ragged(none, torch.zeros(size.rows, dtype=torch.int64))
        shapes = size.pictures.shapes
        number = size.pictures.tokens if field.name == PIXELS else len(shapes)
        values = torch.zeros(1, 1).expand(number, size.pictures.sight.numbers)
        first = torch.zeros(size.rows, dtype=torch.int64)
        return shared(values if field.name == PIXELS else shapes, first, first + number)


class NothingKept(ShardStore):
    """A store that keeps no rows: every action of a rehearsal brings its own."""

    def put(self, action: str, iteration: int, stored: Stored, readers: int) -> None:
        """Rows are dropped."""

    def release(self, action: str, iteration: int) -> None:
        """There are none."""
