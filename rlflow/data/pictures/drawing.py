"""Pictures to draw: shapes on a plain ground, and questions that only the picture answers.

A row follows from its number alone. Pictures are PNG files, written by their specification (ISO/IEC
15948) without a library for images. This file knows neither models nor tokens.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rlflow.data.checks import bad_argument
from rlflow.data.paths import declared_here
from rlflow.data.pictures.columns import IMAGES
from rlflow.data.sources import Computed, DataSource, Row
from rlflow.errors import Finding, near_names

Question = Literal["colour", "shape", "count"]
Part = Literal["train", "test"]
Canvas = list[bytearray]

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "yellow": (235, 215, 50),
}
# Whether a place is inside, by how far down and across it lies of the middle, in radii.
INSIDE: dict[str, Callable[[float, float], bool]] = {
    "circle": lambda down, across: down * down + across * across <= 1,
    "square": lambda down, across: max(abs(down), abs(across)) <= 0.85,
    "triangle": lambda down, across: abs(across) <= (down + 1) / 2 and down <= 1,
}
MOST = 4
GROUND = 245
# Test pictures are numbered from here on, so no number is in both splits.
HELD_OUT_FROM = 1 << 40


def shapes(
    question: Question = "colour", *, size: int = 4096, split: Part = "train", side: int = 32
) -> Shapes:
    """Drawn pictures of `side` by `side` pixels, a question on each, and its answer as text.

    Of the `colour` of one shape, of which `shape` it is, or of a `count` of up to 4. `size` rows;
    those of the test split are others. Raises `UsageError` (E608).
    """
    where = declared_here()
    for given, known in ((question, get_args(Question)), (split, get_args(Part))):
        if given not in known:
            raise bad_argument(
                f"shapes has no {given!r}",
                where,
                expected=" or ".join(map(repr, known)),
                near=near_names(given, known),
            )
    if size < 1 or side < 16:
        raise bad_argument(f"size={size}, side={side}", where, expected="size >= 1, side >= 16")
    return Shapes(question=question, length=size, split=split, side=side, declared=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes(DataSource):
    """One split of drawn pictures with a question."""

    question: Question
    length: int
    split: Part
    side: int

    @property
    def columns(self) -> tuple[str, ...]:
        """`prompt` and `answer` are text, `images` one picture."""
        return ("prompt", IMAGES, "answer")

    @property
    def pictured(self) -> bool:
        """There is one in each row."""
        return True

    def size(self) -> int:
        """The number of rows."""
        return self.length

    def load(self) -> Sequence[Row]:
        """The rows, each drawn when it is asked for."""
        first = HELD_OUT_FROM if self.split == "test" else 0
        return Computed(self.length, lambda index: self._row(first + index))

    def describe(self) -> str:
        """The question, the split, the size of pictures and how many there are."""
        return (
            f"shapes by {self.question}, {self.split} split, {self.length:,} pictures of "
            f"{self.side} x {self.side}"
        )

    def check(self) -> list[Finding]:
        """Nothing can be wrong: the arguments were checked at the declaration."""
        return []

    def _row(self, number: int) -> Row:
        drawn = random.Random(f"shapes {self.question} {number}")  # noqa: S311  no secret
        canvas = [bytearray([GROUND]) * (3 * self.side) for _ in range(self.side)]
        colour, shape = drawn.choice(list(COLOURS)), drawn.choice(list(INSIDE))
        count = 1 + drawn.randrange(MOST) if self.question == "count" else 1
        for cell in drawn.sample(range(MOST), count):
            _draw(canvas, drawn, shape, COLOURS[colour], cell if count > 1 else None)
        answer = {"colour": colour, "shape": shape, "count": str(count)}[self.question]
        return {"prompt": f"{self.question}?", IMAGES: [png(canvas)], "answer": answer}


def _draw(
    canvas: Canvas,
    drawn: random.Random,
    shape: str,
    colour: tuple[int, int, int],
    cell: int | None,
) -> None:
    """Draw a shape somewhere on the canvas, or in one of its four quarters."""
    side = len(canvas) // (1 if cell is None else 2)
    top, left = (0, 0) if cell is None else (cell // 2 * side, cell % 2 * side)
    radius = drawn.uniform(0.28, 0.42) * side
    y, x = (drawn.uniform(radius, side - radius) for _ in range(2))
    for row in range(side):
        for column in range(side):
            if INSIDE[shape]((row + 0.5 - y) / radius, (column + 0.5 - x) / radius):
                place = 3 * (left + column)
                canvas[top + row][place : place + 3] = bytes(colour)


def png(canvas: Sequence[bytes | bytearray]) -> bytes:
    """Rows of pixels, three bytes each, as a PNG file."""
    header = struct.pack(">IIBBBBB", len(canvas[0]) // 3, len(canvas), 8, 2, 0, 0, 0)
    lines = b"".join(b"\0" + bytes(row) for row in canvas)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    parts = [b"\x89PNG\r\n\x1a\n"]
    for kind, body in chunks:
        parts += [struct.pack(">I", len(body)), kind, body]
        parts.append(struct.pack(">I", zlib.crc32(kind + body)))
    return b"".join(parts)
