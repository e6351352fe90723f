"""What a tracker is told of a run before its first point: names, config, plan, graph, hashes.

It is read back from the run's directory. Nothing that is named like a key is in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.runtime.record.edges.secrets import hidden_values


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run as a tracker is told of it.

    `id` is the run's own, `known` the one under which the tracker has it already, None where it is
    new. `after` is the iteration that a resumed run continues, None of a new one. `picture` is the
    graph as PNG, empty where it could not be drawn; `hashes` say by what it was made.
    """

    path: Path
    project: str
    id: str
    known: str | None = None
    after: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)
    plan: str = ""
    picture: bytes = b""

    @property
    def name(self) -> str:
        """What people call the run: its directory."""
        return self.path.resolve().name


def read_facts(path: Path, *, known: str | None, after: int | None, picture: bytes) -> RunFacts:
    """What the files of a run's directory say of it; OSError and ValueError where they do not."""
    run, plan = _document(path / "run.json"), _document(path / "plan.json")
    config, text = hidden_values(_document(path / "config.json")), path / "plan.txt"
    hashes = {
        "pipeline": run.get("pipeline"),
        "run": run.get("id"),
        "graph_hash": plan.get("graph"),
        "placement": plan.get("placement"),
        "cluster": plan.get("cluster"),
        "backend": plan.get("backend"),
        "git": (run.get("git") or {}).get("commit"),
    }
    return RunFacts(
        path=path,
        project=str(run.get("name", "rlflow")),
        id=str(run.get("id", "")),
        known=known,
        after=after,
        config=config,
        hashes={name: str(value) for name, value in hashes.items() if value is not None},
        plan=text.read_text("utf-8", errors="replace") if text.is_file() else "",
        picture=picture,
    )


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested plain data as one level, names joined by dots."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= dotted(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _document(path: Path) -> dict[str, Any]:
    """What a JSON file holds, for show: nothing where it is none, as the run goes on."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        return found if isinstance(found, dict) else {}
    return {}
