"""Plans, simulations and what `tune` found, as a notebook shows them: the table and the picture.

Each is what the scheduler makes, with its printed forms; pictures are drawn where they are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Literal, TypeVar

from rlflow.cli.commands import explain_action
from rlflow.cli.tuning import write_placement
from rlflow.errors import RlflowError
from rlflow.graph.placement import Placement
from rlflow.scheduler.compile import dump_plan
from rlflow.scheduler.plan.diff import compare, diff_text
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.search.text import as_written, tuned_text
from rlflow.scheduler.search.tune import Tuned
from rlflow.scheduler.simulate.simulate import Simulation
from rlflow.scheduler.simulate.text import simulation_text

T = TypeVar("T")
Form = Literal["svg", "png", "pdf"]


class Shown:
    """What a notebook shows: the text in a terminal's way, and as a part of a page."""

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def _repr_html_(self) -> str:
        """The text, and the picture where there is one that can be drawn."""
        page = f'<pre style="overflow-x: auto; white-space: pre">{escape(str(self))}</pre>'
        if not isinstance(self, CompiledPlan | Simulated):
            return page
        try:
            picture = self.picture().decode()
        except RlflowError as error:
            return f"{page}<pre>{escape(error.render())}</pre>"
        return f'{page}<div style="overflow-x: auto">{picture[picture.index("<svg") :]}</div>'


class CompiledPlan(Shown, Plan):
    """A plan, and what can be asked of it. `str(plan)` is what `rlflow plan` prints.

    A notebook shows it as the table and the picture of its actions.
    """

    def __str__(self) -> str:
        """The printed plan."""
        return plan_text(self)

    def explain(self, action: str) -> str:
        """All about one action, by its id or the node that it runs; UsageError E206 for others."""
        return explain_action(self, action)

    def compare(self, other: Plan) -> str:
        """The plan beside another one, as `rlflow diff` prints them."""
        return diff_text(compare(self, other))

    def picture(self, form: Form = "svg") -> bytes:
        """The picture of the plan; UsageError where nothing here can draw."""
        from rlflow.report.render import render

        drawn = render(self.graph, self, level="plan", format=form)
        return drawn.encode() if isinstance(drawn, str) else drawn

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, as `rlflow plan -o` does; `rlflow diff` reads it."""
        Path(path).write_text(dump_plan(self), encoding="utf-8")


class Simulated(Shown, Simulation):
    """A plan that was played: `period`, `idle`, `latency`, `uses` by device, `spans`.

    `str(found)` is what `rlflow simulate` prints; a notebook shows the timeline with it.
    """

    def __str__(self) -> str:
        """What `rlflow simulate` prints."""
        return simulation_text(self)

    def picture(self, form: Form = "svg") -> bytes:
        """The timeline of the devices."""
        from rlflow.report.simulated import simulated_picture

        return simulated_picture(self, form)


class TunedPlacements(Shown, Tuned):
    """The placements that a search has found, `rows`, best first; `placement` is the best.

    `str(found)` is what `rlflow tune` prints.
    """

    def __str__(self) -> str:
        """What `rlflow tune` prints."""
        return tuned_text(self)

    @property
    def placement(self) -> Placement:
        """The best placement, to compile or to run; in shares where it has all devices."""
        return as_written(self, self.best)

    @property
    def plan(self) -> CompiledPlan:
        """The plan of the best placement."""
        return as_kind(CompiledPlan, self.best.plan)

    def save(self, path: str | Path) -> None:
        """Write the best placement as a Python file; UsageError E243 for another kind of file."""
        write_placement(self, Path(path))


def as_kind(kind: Callable[..., T], made: Plan | Simulation | Tuned) -> T:
    """A value of the scheduler as one with printed forms: the same fields."""
    return kind(**{field.name: getattr(made, field.name) for field in fields(made)})
