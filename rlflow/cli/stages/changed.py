"""What of a run is another now: its graph, placement, layouts, devices, seed and torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlflow.cli.commands import Planned
from rlflow.runtime.record.changes import graph_changes
from rlflow.runtime.record.identity.documents import read_document
from rlflow.runtime.record.rundir import RunDir
from rlflow.scheduler.plan.plan import Plan


def changed_since(directory: RunDir, planned: Planned) -> list[tuple[str, str, str]]:
    """What of a run is another in a plan of its whole graph: name, before, now."""
    run, plan = directory.path, planned.compiled.plan
    found: list[tuple[str, str, str]] = []
    graph = read_document(run / "graph.json")
    if graph is not None:
        now = json.loads(json.dumps(plan.graph.to_json()))
        found += [(each.path, each.before, each.now) for each in graph_changes(graph, now)]
    said = read_document(run / "plan.json")
    if said is not None:
        found += _differing(_layouts(said), _layouts(json.loads(json.dumps(plan.to_json()))))
    config = read_document(run / "config.json") or {}
    versions = directory.read_run().get("versions")
    torch = versions.get("torch") if isinstance(versions, Mapping) else None
    before = {"seed": str(config.get("seed")), "torch": str(torch)}
    found += _differing(
        before, {"seed": str(planned.declared.config.seed), "torch": version("torch")}
    )
    return found


def _layouts(plan: Mapping[str, Any]) -> dict[str, str]:
    """How a plan lies: placement, devices, backend, and the layout of each model where it is."""
    found = {"placement": str(plan["placement"]), "backend": str(plan["backend"])}
    devices, _, rest = str(plan["cluster"]).partition(" (")
    threads = [word for word in rest.strip(")").split(", ") if "thread" in word]
    found["devices"] = ", ".join([devices, *threads])
    for each in plan["instances"]:
        if "train" in each["uses"] or "forward" in each["uses"]:
            ranks = len(each["devices"])
            apart = "".join(
                f" {axis}={each[axis]}" for axis in ("ep", "cp", "pp", "virtual") if axis in each
            )
            found[f"layout of {each['model']}"] = (
                f"{ranks} device{'s' if ranks > 1 else ''}, fsdp={each['fsdp']}{apart} "
                f"tp={each['tp']}"
            )
    return found


def _differing(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in dict.fromkeys([*before, *now]):
        pair = before.get(name, "none"), now.get(name, "none")
        if pair[0] != pair[1]:
            yield name, *pair


def notes_of(run: Path, plan: Plan, after: Path | None, iteration: int) -> Iterator[str]:
    """What keeps two updates from being compared, or equal in every bit."""
    if after is None:
        yield (
            f"weights are not compared: {run} keeps no checkpoint from after iteration {iteration}"
            "; --save-every 1 --keep N keeps them"
        )
    said = read_document(run / "plan.json")
    if said is None:
        return
    counts = _chunks(said)
    now = _chunks(json.loads(json.dumps(plan.to_json())))
    for node, count in now.items():
        if counts.get(node, count) != count:
            yield (
                f"{node} ran in {counts[node]} chunks, and runs in {count} here: sums are in "
                "another order, so last bits may differ; where it makes rows, record them"
            )


def _chunks(plan: Mapping[str, Any]) -> dict[str, int]:
    """In how many chunks each node of a plan runs."""
    runs = [action for action in plan["actions"] if action["kind"] == "run" and action["node"]]
    return {each["node"]: each["chunk"]["count"] if each.get("chunk") else 1 for each in runs}
