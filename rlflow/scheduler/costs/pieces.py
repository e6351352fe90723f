"""How much of a node's work one action does, and what it cost when it was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlflow.graph.rules.completion_order import ended_share
from rlflow.scheduler.devices.measured import Record, Setting
from rlflow.scheduler.plan.plan import Action, Chunk, Cost

# Into how many pieces work is cut where nobody says it.
COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One of `count` pieces of an iteration's rows; of whole prompts all are alike, with index 0.

    Where rows go on as they end, piece number `index` is `loose`: of rows, or of `groups` that are
    complete; a `leg` is a piece of the rollout itself, which decodes all rows together.
    """

    count: int = 1
    index: int = 0
    loose: bool = False
    leg: bool = False
    groups: bool = False

    def __str__(self) -> str:
        """As it stands in the key of a measurement."""
        if self.leg:
            return f"{self.index + 1}/{self.count} as {'groups' if self.groups else 'rows'} end"
        if self.loose:
            what = "groups, as they are complete" if self.groups else "rows, as they end"
            return f"{self.index + 1}/{self.count} of the {what}"
        return f"1/{self.count}"

    @property
    def bounds(self) -> tuple[float, float]:
        """The shares of the rows that have ended before it and after it."""
        if self.loose or self.leg:
            return ended_share(self.index, self.count), ended_share(self.index + 1, self.count)
        return 0.0, 1 / self.count

    @property
    def share(self) -> float:
        """The share of the rows that it has."""
        since, until = self.bounds
        return until - since

    @property
    def steps(self) -> bool:
        """Whether an update makes an optimizer step in it: of complete groups in the last one."""
        return not self.groups or self.index + 1 == self.count

    @property
    def relatives(self) -> tuple[Piece, ...]:
        """Pieces of the same work whose time tells its own, the likest first."""
        if self.leg or self.loose:
            return (WHOLE,)
        cuts = sorted(COUNTS, key=lambda count: (count > 1, abs(count - self.count)))
        return tuple(Piece(count=count) for count in cuts if count != self.count)

    def as_part_of(self, other: Piece) -> str:
        """What is said of a figure that follows from another piece's."""
        return "a chunk's share of it" if other.count == 1 else f"from a {other} of it"


WHOLE = Piece()


def chunk_piece(chunk: Chunk | None, begins: bool) -> Piece:
    """What an action of a chunk does; it `begins` where it makes the rows."""
    if chunk is None:
        return WHOLE
    if chunk.by == "prompts":
        return Piece(count=chunk.count)
    piece = Piece(count=chunk.count, index=chunk.index, groups=chunk.by == "groups")
    return replace(piece, leg=True) if begins else replace(piece, loose=True)


def piece_done(action: Action) -> Piece:
    """What an action does of its node's work."""
    return chunk_piece(action.chunk, action.begins)


def as_measured(estimate: Cost, record: Record, setting: Setting, share: float = 1.0) -> Cost:
    """A cost with the seconds of a record, and where they are from if that was another setting."""
    seconds = record.seconds * share + record.wait
    return replace(estimate, seconds=seconds, source=record.source_for(setting))
