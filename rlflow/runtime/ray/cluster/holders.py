"""Who holds the devices of a cluster: placement groups and actors, as far as Ray tells.

Only for error messages: where this version of Ray does not tell, the list is shorter. Knows
no pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray._private.state
from ray.util.placement_group import placement_group_table

from rlflow.runtime.ray.cluster.alive import bounded

SHOWN = 8
SECONDS = 5.0

Table = Mapping[str, Mapping[str, Any]]


def holders() -> list[str]:
    """One line each: placement groups that exist, and living actors of other drivers."""
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in _asked(ray.nodes, [])}
    groups = [
        _group(group, nodes)
        for group in _asked(placement_group_table, {}).values()
        if group.get("state") == "CREATED"
    ]
    jobs = {job["JobID"]: job for job in _asked(_table("jobs"), [])}
    own = ray.get_runtime_context().get_job_id()
    actors = [
        _actor(actor, jobs.get(actor["JobID"], {}))
        for actor in _asked(_table("actors"), {}).values()
        if actor.get("State") == "ALIVE" and actor.get("JobID") != own
    ]
    found = sorted(groups) + sorted(actors)
    more = len(found) - SHOWN
    return found[:SHOWN] + ([f"{more} more"] if more > 0 else [])


def _group(group: Mapping[str, Any], nodes: Mapping[str, str]) -> str:
    where = sorted({nodes.get(node, node) for node in group["bundles_to_node_id"].values()})
    bundles = list(group["bundles"].values())
    each = " + ".join(
        f"{amount:g} {name}"
        for name, amount in sorted(bundles[0].items())
        if not name.startswith("node:")
    )
    name = group["name"] or group["placement_group_id"]
    return f"placement group {name!r}: {len(bundles)} times {each}, on {', '.join(where)}"


def _actor(actor: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    kind = actor.get("ActorClassName", "") + (f" {actor['Name']!r}" if actor.get("Name") else "")
    where = f"process {actor['Pid']} on {actor['Address']['IPAddress']}"
    entry = f" of {job['Entrypoint']!r}" if job.get("Entrypoint") else ""
    return f"actor {kind} ({where}){entry}"


def _table(name: str) -> Callable[[], Any]:
    """A table of the head node that Ray has no public name for."""
    found: Callable[[], Any] = getattr(ray._private.state, name, dict)
    return found


def _asked(ask: Callable[[], Any], otherwise: Any) -> Any:
    """What Ray answers, or what stands for no answer."""
    try:
        return bounded(ask, SECONDS, doing="asking who holds the devices")
    except Exception:  # an error message must not fail for want of detail
        return otherwise
