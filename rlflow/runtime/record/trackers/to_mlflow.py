"""A run in MLflow, where `MLFLOW_TRACKING_URI` says or MLflow keeps runs by itself.

Of an iteration that a resumed run repeats MLflow keeps both points, the later one with the later
time.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlflow.runtime.record.trackers.facts import RunFacts, dotted
from rlflow.runtime.record.trackers.feed import Table

# What MLflow takes at once, and of one parameter.
METRICS = 1000
PARAMS = 100
LENGTH = 500


class MlflowTracker:
    """An experiment has the pipeline's name, and a run the one of its directory."""

    def __init__(self, facts: RunFacts, keep: Callable[[str], None]) -> None:
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()
        self._id = facts.known or self._new(facts)
        keep(self._id)
        if facts.known is None:
            self._tell(facts)
        else:
            self._client.update_run(self._id, status="RUNNING")

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an iteration."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in metrics.items()}
        rows = [Metric(name, float(value), now, iteration) for name, value in named.items()]
        for start in range(0, len(rows), METRICS):
            self._client.log_batch(self._id, metrics=rows[start : start + METRICS])

    def write_table(self, iteration: int, table: Table) -> None:
        """Keep some rows as a table of their own."""
        data = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        node = re.sub(r"[^\w.-]", "_", table.node)
        # As log_table writes it, which wants pandas.
        self._client.log_dict(self._id, data, f"samples/{node}/iteration-{iteration:06d}.json")

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)

    def _new(self, facts: RunFacts) -> str:
        found = self._client.get_experiment_by_name(facts.project)
        experiment = (
            self._client.create_experiment(facts.project) if found is None else found.experiment_id
        )
        tags = {f"rlflow.{name}": value for name, value in facts.hashes.items()}
        run = self._client.create_run(experiment, run_name=facts.name, tags=tags)
        return str(run.info.run_id)

    def _tell(self, facts: RunFacts) -> None:
        """Attach config, plan and the picture of the graph."""
        from mlflow.entities import Param

        rows = [Param(name, str(v)[:LENGTH]) for name, v in dotted(facts.config).items()]
        for start in range(0, len(rows), PARAMS):
            self._client.log_batch(self._id, params=rows[start : start + PARAMS])
        self._client.log_dict(self._id, dict(facts.config), "config.json")
        if facts.plan:
            self._client.log_text(self._id, facts.plan, "plan.txt")
        if facts.picture:
            with tempfile.TemporaryDirectory(prefix="rlflow-graph-") as folder:
                picture = Path(folder) / "graph.png"
                picture.write_bytes(facts.picture)
                self._client.log_artifact(self._id, str(picture))
