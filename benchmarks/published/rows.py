"""The rows of `results.toml`: what was measured, where it stands, the setting, what is unknown.

Knows how a row must look; neither pipelines nor plans.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "results.toml"
UNITS = {"memory": "fits", "ratio": "x"}
QUANTITIES = (
    "iteration",
    "generation",
    "training",
    "log_probs",
    "old_log_probs",
    "reference",
    "sync",
    "memory",
    "ratio",
)
# How tokens go to experts that lie apart.
DISPATCHES = ("expert", "rank")
ALGORITHMS = ("grpo", "ppo", "sync", "generate")
# What a counted row must say, by what is run: without it a prediction is of something else.
DECIDING = {
    "grpo": ("shape", "devices", "placement", "prompts", "samples", "prompt_tokens"),
    "sync": ("shape", "devices", "placement"),
    "generate": ("shape", "devices", "placement", "prompts", "samples", "prompt_tokens"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured quantity of a setting; `low` to `high` where its source gives a range."""

    setting: str
    what: str
    value: float
    unit: str
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run of one system, as its source tells it."""

    said: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its id, by which tables call it."""
        return str(self.said["id"])

    @property
    def why_not(self) -> str:
        """Why its rows are not counted; empty where they are."""
        return str(self.said.get("not_counted", ""))

    @property
    def can_be_encoded(self) -> bool:
        """Whether a pipeline can be made of it: what decides is said, or assumed with a note."""
        known = all(name in self.said for name in DECIDING.get(self.said["algorithm"], ("id",)))
        return known and self.said["algorithm"] in DECIDING and bool(self.lengths_said)

    @property
    def lengths_said(self) -> bool:
        """Whether it is said how long responses were, where that matters."""
        of_memory = {row.what for row in self.rows} == {"memory"}
        named = "response_limit" if of_memory else "response_mean"
        return self.said["algorithm"] == "sync" or named in self.said

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """What was measured of it."""
        return tuple(_row(self.name, said) for said in self.said["measured"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """All of the file."""

    sources: Mapping[str, Mapping[str, str]]
    settings: tuple[Setting, ...]


def load(path: Path = FILE) -> Published:
    """Read the file; raises ValueError that names everything that is not as it must be."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    settings = tuple(Setting(said=said) for said in found["setting"])
    published = Published(sources=found["source"], settings=settings)
    if wrong := problems(published):
        raise ValueError("\n".join(wrong))
    return published


def problems(published: Published) -> list[str]:
    """What is wrong with the data, a line for each."""
    found = [f"source {name}: no {key}" for name, key in _poor_sources(published)]
    names = [setting.name for setting in published.settings]
    found += [f"{name}: twice" for name in sorted({n for n in names if names.count(n) > 1})]
    for setting in published.settings:
        found += [f"{setting.name}: {what}" for what in _problems_of(setting, published)]
    return found


def _poor_sources(published: Published) -> list[tuple[str, str]]:
    keys = ("title", "url", "seen")
    return [(n, k) for n, said in published.sources.items() for k in keys if not said.get(k)]


def _problems_of(setting: Setting, published: Published) -> list[str]:
    said = setting.said
    found = [f"no {k}" for k in ("place", "system", "model", "measured") if not said.get(k)]
    found += [f"no list {k}" for k in ("unknown", "differs") if not isinstance(said.get(k), list)]
    if said.get("source") not in published.sources:
        found.append(f"no source {said.get('source')!r}")
    if said.get("algorithm") not in ALGORITHMS:
        found.append(f"no algorithm {said.get('algorithm')!r}")
    apart = "train_ep" in said.get("placement", {}) and said.get("algorithm") != "sync"
    if said.get("dispatch") not in (DISPATCHES if apart else (None,)):
        found.append(f"dispatch {said.get('dispatch')!r}")
    if not setting.why_not and not setting.can_be_encoded:
        found.append("is counted, and what decides is not said")
    return found + [what for row in setting.rows for what in _row_problems(row)]


def _row_problems(row: Row) -> list[str]:
    found = [] if row.what in QUANTITIES else [f"no quantity {row.what!r}"]
    if row.unit != UNITS.get(row.what, "s"):
        found.append(f"{row.what} in {row.unit!r}")
    if not 0 < row.low <= row.value <= row.high:
        found.append(f"{row.what} of {row.value} is not in {row.low} to {row.high}")
    return found


def _row(setting: str, said: Mapping[str, Any]) -> Row:
    value = float(said["value"])
    return Row(
        setting=setting,
        what=said["what"],
        value=value,
        unit=said["unit"],
        low=float(said.get("low", value)),
        high=float(said.get("high", value)),
    )
