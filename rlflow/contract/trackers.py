"""The names of trackers, the packages behind them, and what a user may say of them.

Only names: what a tracker is sent, and how, is in `rlflow/runtime/record/trackers`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.errors import Finding, known_names, near_names

# By name the package that is imported, which is also what pip installs.
TRACKERS = {
    "tensorboard": "tensorboard",
}
DEFAULT_TRACKERS = ("tensorboard",)
NO_TRACKER = "none"


def tracker_names(said: str | Sequence[str]) -> tuple[str, ...]:
    """The trackers that a name, or several, stand for: each once, none of `none`."""
    names = (said,) if isinstance(said, str) else tuple(said)
    return tuple(name for name in dict.fromkeys(names) if name != NO_TRACKER)


def tracker_findings(names: Sequence[str], said_by: str) -> list[Finding]:
    """E340 for each name that is no tracker, and for `none` beside others; `said_by` an option."""
    known = [*TRACKERS, NO_TRACKER]
    findings = [
        Finding(
            code="E340",
            what=f"{said_by}: there is no tracker {name!r}",
            expected=known_names(known),
            near=near_names(str(name), known),
        )
        for name in names
        if name not in known
    ]
    if NO_TRACKER in names and len(set(names)) > 1:
        what = f"{said_by}: {NO_TRACKER!r} is no tracker at all, and others are named beside it"
        findings.append(Finding(code="E340", what=what, fix="leave out one of the two"))
    return findings
