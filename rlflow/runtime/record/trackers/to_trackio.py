"""A run in trackio: below `TRACKIO_DIR`, or on the Space or server that its variables name.

A run that goes on is the latest one of its directory's name. Of an iteration that it repeats
trackio keeps both points. What trackio could sample of the machine is left out: `devices.jsonl`
has what devices did.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from rlflow.runtime.record.trackers.facts import RunFacts
from rlflow.runtime.record.trackers.feed import Table


class TrackioTracker:
    """A project has the pipeline's name, and a run the one of its directory."""

    def __init__(self, facts: RunFacts, keep: Callable[[str], None]) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run: Any = trackio.init(
            project=facts.project,
            name=facts.name,
            config={**facts.config, "rlflow": dict(facts.hashes)},
            resume="never" if facts.known is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        keep(str(self._run.id))
        if facts.after is None:
            self._tell(facts)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an iteration."""
        self._run.log(dict(metrics), step=iteration)

    def write_table(self, iteration: int, table: Table) -> None:
        """Log some rows as a table."""
        rows = [list(row) for row in table.rows]
        made = self._trackio.Table(columns=list(table.columns), data=rows)
        self._run.log({f"samples/{table.node}": made}, step=iteration)

    def close(self) -> None:
        """Write what is left, and end the run."""
        self._run.finish()

    def _tell(self, facts: RunFacts) -> None:
        """Attach the plan and the picture of the graph."""
        attached: dict[str, Any] = {}
        if facts.plan:
            attached["plan"] = self._trackio.Markdown(f"```\n{facts.plan}\n```")
        if facts.picture:
            from PIL import Image

            picture = Image.open(io.BytesIO(facts.picture))
            attached["graph"] = self._trackio.Image(picture, caption="graph")
        if attached:
            self._run.log(attached, step=0)
