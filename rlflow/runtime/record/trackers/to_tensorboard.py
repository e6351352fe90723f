"""A run as TensorBoard events in its directory: scalars, the plan and samples as text, the graph.

Points that a previous start of the run wrote for later iterations are marked as superseded. With
every `STEP` bytes that are written, a metric has a point of half as many iterations, and so have
samples: a run of any length has its whole curve in some times that, and TensorBoard draws a
thousand points of it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

from rlflow.runtime.record.trackers.facts import RunFacts, dotted
from rlflow.runtime.record.trackers.feed import Table

FOLDER = "tensorboard"
ROWS = 8
# Bytes of events, and how many iterations pass between two looks at how many there are.
STEP, LOOK = 32_000_000, 100


class TensorBoardLog:
    """Writes events into the folder `tensorboard` of a run; no id needs to be kept."""

    def __init__(self, facts: RunFacts, keep: Callable[[str], None], *, step: int = STEP) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._step = facts.path / FOLDER, step
        self._written: dict[str, int] = {}
        self._looked, self._every = -LOOK, 1

        purge = None if facts.after is None else facts.after + 1
        self._writer: Any = SummaryWriter(str(facts.path / FOLDER), purge_step=purge)
        if purge is None:
            self._tell(facts)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Add one point per metric at `iteration`, where it is due."""
        if iteration - self._looked >= LOOK:
            self._looked = iteration
            size = sum(file.stat().st_size for file in self._folder.glob("*") if file.is_file())
            self._every = 2 ** (size // self._step)
        for name, value in metrics.items():
            if self._is_due(name, iteration):
                self._writer.add_scalar(name, value, iteration)

    def write_table(self, iteration: int, table: Table) -> None:
        """Add some rows as a table in Markdown, where it is due."""
        name = f"samples/{table.node}"
        if not self._is_due(name, iteration):
            return
        rows = [table.columns, ["---"] * len(table.columns), *table.rows[:ROWS]]
        text = "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows)
        self._writer.add_text(name, text, iteration)

    def _is_due(self, name: str, iteration: int) -> bool:
        """Whether enough iterations have passed since the last point of a name; then it is one."""
        due = iteration - self._written.get(name, iteration - self._every) >= self._every
        if due:
            self._written[name] = iteration
        return due

    def close(self) -> None:
        """Flush the events and close the file."""
        self._writer.close()

    def _tell(self, facts: RunFacts) -> None:
        """Add what the run is: config, hashes, plan, picture."""
        config = "\n".join(
            f"    {name} = {json.dumps(value)}" for name, value in dotted(facts.config).items()
        )
        known = "\n".join(f"    {name} = {value}" for name, value in facts.hashes.items())
        plan = "\n".join(f"    {line}" for line in facts.plan.splitlines())
        for name, text in (("config", config), ("run", known), ("plan", plan)):
            if text:
                self._writer.add_text(name, text)
        if facts.picture:
            self._writer._get_file_writer().add_summary(_image("graph", facts.picture), 0)


def _image(name: str, picture: bytes) -> Any:
    """A PNG as a summary: TensorBoard keeps it as it is."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    width, height = struct.unpack(">II", picture[16:24])
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=picture)
    return Summary(value=[Summary.Value(tag=name, image=image)])


def _cell(value: object) -> str:
    text = str(value).replace("|", "\\|")
    return text.replace("\n", " ")
