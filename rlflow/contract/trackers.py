"""The names of trackers, the packages behind them, and what a user may say of them.

Only names: what a tracker is sent, and how, is in `rlflow/runtime/record/trackers`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.errors import Finding, known_names, near_names

# By name the package that is imported.
TRACKERS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
}
INSTALL = {
    "tensorboard": "pip install tensorboard",
    **{name: f'pip install "rlflow-engine[{name}]"' for name in TRACKERS if name != "tensorboard"},
}
# Those in which runs are of a project: the pipeline's name, or what is said behind `=`.
WITH_PROJECT = ("wandb", "trackio", "mlflow", "swanlab")
DEFAULT_TRACKERS = ("tensorboard",)
NO_TRACKER = "none"


def tracker_of(said: str) -> str:
    """The tracker of a name that may have a project behind it: `wandb` of `wandb=mine`."""
    return said.partition("=")[0]


def tracker_names(said: str | Sequence[str]) -> tuple[str, ...]:
    """The trackers that a name, or several, stand for: each once, none of `none`."""
    names = (said,) if isinstance(said, str) else tuple(said)
    return tuple(name for name in dict.fromkeys(names) if name != NO_TRACKER)


def tracker_findings(names: Sequence[str], said_by: str) -> list[Finding]:
    """E340 for each name that is no tracker, for a project of one that has none, for one twice.

    And for `none` beside others; `said_by` an option.
    """
    known = [*TRACKERS, NO_TRACKER]
    used = [tracker_of(str(name)) for name in names]
    findings = [
        Finding(
            code="E340",
            what=f"{said_by}: there is no tracker {name!r}",
            expected=known_names(known),
            near=near_names(name, known),
        )
        for name in used
        if name not in known
    ]
    for name, said in zip(used, map(str, names), strict=True):
        if name in known and "=" in said and (name not in WITH_PROJECT or said.endswith("=")):
            what = f"{said_by}: {said!r} names no project of {name}"
            expected = f"{name} alone, or with a project {', '.join(WITH_PROJECT)}"
            findings.append(Finding(code="E340", what=what, expected=expected, fix=name))
    if len(set(used)) < len(set(map(str, names))):
        what = f"{said_by}: a tracker is named with two projects"
        findings.append(Finding(code="E340", what=what, got=", ".join(map(str, names))))
    if NO_TRACKER in used and len(set(used)) > 1:
        what = f"{said_by}: {NO_TRACKER!r} is no tracker at all, and others are named beside it"
        findings.append(Finding(code="E340", what=what, fix="leave out one of the two"))
    return findings
