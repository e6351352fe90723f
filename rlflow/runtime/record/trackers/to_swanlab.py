"""A run in SwanLab, online or offline as `SWANLAB_MODE` says.

SwanLab keeps of each iteration the point that it had first; those that a resumed run writes again
it drops. What it collects by itself (command line, packages, output) it is told to leave.
"""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from rlflow.runtime.record.trackers.facts import RunFacts
from rlflow.runtime.record.trackers.feed import Table


class SwanlabTracker:
    """Writes below the run's directory unless `SWANLAB_LOGDIR` names another; asks nothing."""

    def __init__(self, facts: RunFacts, keep: Callable[[str], None]) -> None:
        import swanlab

        self._swanlab: Any = swanlab
        mode = os.environ.get("SWANLAB_MODE", "online")
        # What a probe collects has the command line, in which a key may be.
        settings = swanlab.Settings(
            interactive=False,
            probe=swanlab.Settings.Probe(
                hardware=False, runtime=False, requirements=False, monitor=False
            ),
            terminal=swanlab.Settings.Terminal(proxy_type="none"),
        )
        where = os.environ.get("SWANLAB_LOGDIR") or str(facts.path / "swanlog")
        # Only a server knows a run that it may continue.
        again = {"resume": "allow", "id": facts.known} if mode == "online" and facts.known else {}
        _leave_signals()
        self._run: Any = swanlab.init(
            project=facts.project,
            experiment_name=facts.name,
            mode=mode,
            log_dir=where,
            config={**facts.config, "rlflow": dict(facts.hashes)},
            settings=settings,
            **again,
        )
        keep(str(self._run.id))
        if facts.after is None:
            self._tell(facts)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an iteration."""
        self._run.log(dict(metrics), step=iteration)

    def write_table(self, iteration: int, table: Table) -> None:
        """Log some rows as a table."""
        made = self._swanlab.echarts.Table()
        rows = [["" if value is None else value for value in row] for row in table.rows]
        made.add(list(table.columns), rows)
        self._run.log({f"samples/{table.node}": made}, step=iteration)

    def close(self) -> None:
        """Send what is left, and end the run."""
        self._run.finish()

    def _tell(self, facts: RunFacts) -> None:
        """Attach the plan and the picture of the graph."""
        attached: dict[str, Any] = {}
        if facts.plan:
            attached["plan"] = self._swanlab.Text(facts.plan)
        if facts.picture:
            from PIL import Image

            attached["graph"] = self._swanlab.Image(Image.open(io.BytesIO(facts.picture)))
        if attached:
            self._run.log(attached, step=0)


class _NoSignals:
    """The module `signal` for SwanLab, which would take Ctrl-C from the run."""

    SIGINT = signal.SIGINT
    getsignal = staticmethod(signal.getsignal)

    @staticmethod
    def signal(number: int, handler: object) -> None:
        """Leave things as they are."""


def _leave_signals() -> None:
    """Have SwanLab take no signal: only the main thread may, and there it is the run's."""
    from swanlab.sdk.internal import run

    run.signal = _NoSignals
