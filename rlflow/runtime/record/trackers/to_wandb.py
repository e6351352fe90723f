"""A run in Weights & Biases, online or offline as `WANDB_MODE` says.

The axis of all charts is `iteration`: points of a resumed run that repeat iterations come after
the ones that they supersede, since Weights & Biases takes nothing back.
"""

from __future__ import annotations

import html
import io
import os
from collections.abc import Callable, Mapping
from typing import Any

from rlflow.runtime.record.trackers.facts import RunFacts
from rlflow.runtime.record.trackers.feed import Table

# It gives up sending at the end before rlflow would leave it behind.
FINISH_SECONDS = 45.0


class WandbTracker:
    """Writes below the run's directory unless `WANDB_DIR` names another; never asks anything."""

    def __init__(self, facts: RunFacts, keep: Callable[[str], None]) -> None:
        import wandb

        self._wandb: Any = wandb
        # Metadata has the command line, in which a key may be.
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_save_requirements=False,
            finish_timeout=FINISH_SECONDS,
        )
        if _asks_a_server() and not wandb.login(prompt=False):
            raise PermissionError("no API key: wandb login, or WANDB_MODE=offline")
        self._run: Any = wandb.init(
            project=facts.project,
            name=facts.name,
            id=facts.known or facts.id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(facts.path),
            config={**facts.config, "rlflow": dict(facts.hashes)},
            settings=settings,
        )
        keep(str(self._run.id))
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        if facts.after is None:
            self._tell(facts)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an iteration."""
        self._run.log({**metrics, "iteration": iteration})

    def write_table(self, iteration: int, table: Table) -> None:
        """Log some rows as a table."""
        made = self._wandb.Table(columns=list(table.columns), data=[list(r) for r in table.rows])
        self._run.log({f"samples/{table.node}": made, "iteration": iteration})

    def close(self) -> None:
        """Send what is left, and end the run."""
        self._run.finish()

    def _tell(self, facts: RunFacts) -> None:
        """Attach the plan and the picture of the graph."""
        attached = {}
        if facts.plan:
            attached["plan"] = self._wandb.Html(f"<pre>{html.escape(facts.plan)}</pre>")
        if facts.picture:
            from PIL import Image

            attached["graph"] = self._wandb.Image(Image.open(io.BytesIO(facts.picture)))
        if attached:
            self._run.log({**attached, "iteration": 0})


def _asks_a_server() -> bool:
    """Whether runs are sent as they go, for which somebody has to be logged in."""
    return os.environ.get("WANDB_MODE", "online") not in ("offline", "disabled", "dryrun")
