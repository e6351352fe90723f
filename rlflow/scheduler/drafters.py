"""Where drafters lie: whole, on the devices of the rollouts that they propose tokens for.

A rollout reads the weights of its drafter beside its own. This file knows no passes, and not what
a drafter proposes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlflow.errors import Finding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.placement import On
from rlflow.scheduler.plan import Instance, Plan
from rlflow.scheduler.roofline import Holds, Load, Roofline

DRAFTS = "drafts"


def with_drafters(
    instances: Sequence[Instance], plan: Plan, chosen: Mapping[str, On]
) -> tuple[Instance, ...]:
    """The instances, and one of each drafter on every pool that it drafts on."""
    found = {instance.name: instance for instance in instances}
    for node in plan.graph.nodes:
        if node.drafter is None:
            continue
        pool = chosen[node.name].pool
        name = f"{node.drafter}@{pool}"
        known = found.get(name)
        if known is None:
            found[name] = Instance(
                name=name,
                model=node.drafter,
                pool=pool,
                devices=plan.pools[pool],
                uses=("rollout",),
                trained=False,
            )
        else:
            found[name] = replace(known, uses=tuple(dict.fromkeys((*known.uses, "rollout"))))
    return tuple(found.values())


def drafting_instance(plan: Plan, node: Node, pool: str) -> Instance:
    """The instance of a rollout's drafter."""
    return plan.instance(f"{node.drafter}@{pool}")


def drafting_holds(
    known: Holds, node: Node, roof: Roofline, drafter: Roofline, load: Load
) -> Holds:
    """What a rollout holds, and beside it the drafter's keys and values, logits of its tokens too.

    The policy reads one token more than were drafted, and keeps logits of each.
    """
    rows, tokens = load.most or load.rows, int(node.param("draft_tokens"))
    cache = rows * ((load.longest_row + tokens) * drafter.cache_bytes + tokens * roof.cache_bytes)
    size = int(cache) + tokens * roof.scores(rows) + drafter.scores(rows)
    return tuple(sorted((*known, (DRAFTS, size)), key=lambda part: -part[1]))


def drafter_findings(graph: Graph, instances: Sequence[Instance]) -> list[Finding]:
    """E261 for every rollout whose weights or whose drafter's are cut over ranks, or elsewhere."""
    findings = []
    for node in graph.nodes:
        cut = [
            f"{i.name}: {i.layout()}"
            for i in instances
            if node.drafter is not None
            and i.model in (node.model, node.drafter)
            and "rollout" in i.uses
            and (i.fsdp * i.tp > 1 or i.options is not None)
        ]
        if cut:
            findings.append(
                Finding(
                    code="E261",
                    what=f"{node.name}: a drafter proposes tokens where both models lie whole in "
                    "one process",
                    where=node.where,
                    got=", ".join(cut),
                    expected="the embedded engine and no fsdp or tp for the rollout",
                    fix=f'"{node.drafter}": rf.on(pool, fsdp=1)',
                )
            )
    return findings
