"""Whole documents of a run from what a test says of them."""

from __future__ import annotations

from typing import Any

NODE = {
    "op": "user",
    "model": None,
    "use": None,
    "every": 1,
    "inputs": {},
    "outputs": [],
    "params": {},
}
ACTION = {
    "kind": "run",
    "reason": {"rule": "declared", "text": ""},
    "devices": [0],
    "pool": "all",
    "after": [],
    "targets": [],
    "fields": [],
    "cost": {"seconds": None, "moved": 0, "source": "not estimated"},
    "ahead": 0,
    "every": 1,
    **dict.fromkeys(("node", "instance", "part", "mode", "peak")),
}
PLAN = {
    "pipeline": "grpo",
    "placement": "one",
    "cluster": "cpu:2",
    "backend": "local",
    "pools": {"all": [0, 1]},
    "budgets": {},
    "peaks": {},
    "instances": [],
    "notes": [],
    "timing": None,
}


def graph_document(*nodes: dict[str, Any]) -> dict[str, Any]:
    """graph.json of nodes without edges."""
    made = [NODE | node for node in nodes]
    return {"name": "grpo", "staleness": 0, "nodes": made, "models": [], "edges": []}


def plan_document(*actions: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """plan.json of actions."""
    return PLAN | facts | {"actions": [ACTION | action for action in actions]}
