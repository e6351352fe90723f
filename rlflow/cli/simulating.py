"""`rlflow simulate`, and `rlflow diff` of saved plans: what lies between the command and the clock.

Imports neither torch nor ray; pictures are drawn only when they are asked for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlflow.cli.commands import Target, compile_target
from rlflow.cli.planning.compared import diff_placements
from rlflow.errors import Finding, PlanError, UsageError, known_names, near_names
from rlflow.scheduler.plan.diff import PlanDiff, compare
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.plan.saved import read_plan
from rlflow.scheduler.simulate.simulate import Simulation, play_plan
from rlflow.scheduler.simulate.text import simulation_text

FORMATS = {
    ".svg": "svg",
    ".png": "png",
    ".pdf": "pdf",
    ".html": "html",
    ".json": "json",
    ".txt": "text",
}
MOST_NAMED = 6


def simulate_target(target: Target, iterations: int | None) -> Simulation:
    """Compile a placement and play its plan. PlanError where an action's cost is not known."""
    return simulate_plan(compile_target(target).compiled.plan, iterations)


def simulate_plan(plan: Plan, iterations: int | None) -> Simulation:
    """Play a plan for some iterations, until they repeat for None. PlanError E236 as above."""
    _require_costs(plan)
    return play_plan(plan, iterations=iterations)


def _require_costs(plan: Plan) -> None:
    unknown = [action for action in plan.actions if action.cost.seconds is None]
    if not unknown:
        return
    names = [action.id for action in unknown]
    left = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    models = [
        f"{instance.model}={path}"
        for instance in plan.instances
        if (path := plan.graph.model(instance.model).path)
        and any(action.instance == instance.name for action in unknown)
    ]
    raise PlanError(
        Finding(
            code="E236",
            what=f"{len(names)} of {len(plan.actions)} actions have no estimate to simulate",
            got=f"{', '.join(names[:MOST_NAMED])}{left}: {unknown[0].cost.source}",
            expected=f"the shapes of {known_names(tuple(dict.fromkeys(models)))}",
            fix="--model-shape qwen2.5-7b, or the model's files on this machine",
        )
    )


def picture_format(path: Path) -> str:
    """The format that a file's suffix stands for. Raises UsageError for any other."""
    suffix = path.suffix.lower()
    if suffix in FORMATS:
        return FORMATS[suffix]
    raise UsageError(
        Finding(
            code="E238",
            what=f"-o {path} names no format that a simulation is written in",
            got=repr(suffix) if suffix else "no suffix",
            expected=known_names(tuple(FORMATS)),
            near=near_names(suffix, FORMATS),
            fix="-o gantt.svg",
        )
    )


def write_simulation(found: Simulation, path: Path) -> None:
    """Write a simulation in the format of the file's suffix. UsageError where it cannot be."""
    form = picture_format(path)
    try:
        path.write_bytes(_bytes(found, form))
    except OSError as error:
        raise UsageError(
            Finding(
                code="E238",
                what=f"cannot write {path}: {error.strerror}",
                fix="name a directory that exists: -o gantt.svg",
            )
        ) from error


def _bytes(found: Simulation, form: str) -> bytes:
    if form == "json":
        return simulation_json(found).encode()
    if form == "text":
        return f"{simulation_text(found)}\n".encode()
    from rlflow.report.simulated import simulated_page, simulated_picture

    return simulated_page(found) if form == "html" else simulated_picture(found, form)


def simulation_json(found: Simulation) -> str:
    """The simulation as JSON text, stable to the byte."""
    return json.dumps(found.as_json(), sort_keys=True, indent=1, ensure_ascii=False) + "\n"


def diff_saved(first: Path, second: Path) -> PlanDiff:
    """Compare two plans that `plan -o` wrote; their files name them where placements do not."""
    plans = (read_plan(first), read_plan(second))
    for names in ((plans[0].placement, plans[1].placement), (first.stem, second.stem)):
        if names[0] != names[1]:
            return compare(*plans, names=names)
    return compare(*plans, names=(str(first), str(second)))


def diff_of(
    targets: tuple[str, ...], placements: tuple[str, ...], *, ranged: bool = False, **options: Any
) -> PlanDiff:
    """Compare two placements of a pipeline, or two saved plans; UsageError for anything else."""
    if len(targets) == 1:
        return diff_placements(targets[0], placements, ranged=ranged, **options)
    given = [name.replace("_", "-") for name, value in options.items() if value]
    given += ["placement"] if placements else []
    saved = all(target.endswith(".json") for target in targets)
    if len(targets) == 2 and saved and not given:
        return diff_saved(Path(targets[0]), Path(targets[1]))
    if saved and given:
        what = f"saved plans are compared as they are: without --{', --'.join(given)}"
    else:
        what = f"diff compares placements of one pipeline, or two saved plans, got {len(targets)}"
    raise UsageError(
        Finding(
            code="E239",
            what=what,
            got=" ".join(targets),
            expected="PIPELINE --placement A --placement B, or A.json B.json",
            fix="rlflow plan PIPELINE --placement A -o A.json",
        )
    )
