"""How much of a node's work one action does, and what it cost when it was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlflow.scheduler.measured import Record, Setting
from rlflow.scheduler.plan import Action, Chunk, Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One of `count` equal pieces of an iteration's rows; `loose` where no whole prompts.

    A `leg` is a piece of a rollout that decodes all rows together: number `index`, as rows end.
    Other pieces are alike, and have the index 0.
    """

    count: int = 1
    index: int = 0
    loose: bool = False
    leg: bool = False

    def __str__(self) -> str:
        """As it stands in the key of a measurement."""
        if self.leg:
            return f"{self.index + 1}/{self.count} as rows end"
        return f"1/{self.count} of the rows" if self.loose else f"1/{self.count}"


WHOLE = Piece()


def piece_of(chunk: Chunk | None, begins: bool) -> Piece:
    """What an action of a chunk does; it `begins` where it makes the rows."""
    if chunk is None:
        return WHOLE
    if chunk.by == "prompts":
        return Piece(count=chunk.count)
    if not begins:
        return Piece(count=chunk.count, loose=True)
    return Piece(count=chunk.count, index=chunk.index, leg=True)


def piece_done(action: Action) -> Piece:
    """What an action does of its node's work."""
    return piece_of(action.chunk, action.begins)


def as_measured(estimate: Cost, record: Record, setting: Setting, share: float = 1.0) -> Cost:
    """A cost with the seconds of a record, and where they are from if that was another setting."""
    seconds = record.seconds * share + record.wait
    return replace(estimate, seconds=seconds, source=record.source_for(setting))
