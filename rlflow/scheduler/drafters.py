"""Where drafters lie: whole, on the devices of the rollouts that they propose tokens for.

A rollout reads the weights of its drafter beside its own. Where it runs in an engine of its own,
the drafter lies in that. This file knows no passes, and not what a drafter proposes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlflow.errors import Finding
from rlflow.graph.graph import Node
from rlflow.graph.placement import On
from rlflow.scheduler.inside import beams, drafted, drafter_of, frozen
from rlflow.scheduler.plan import Instance, Plan
from rlflow.scheduler.roofline import Holds, Load, Roofline

if TYPE_CHECKING:
    from rlflow.scheduler.costs import Costs

DRAFTS = "drafts"


def with_drafters(
    instances: Sequence[Instance], plan: Plan, chosen: Mapping[str, On]
) -> tuple[Instance, ...]:
    """The instances, and one of each drafter on every pool that it drafts on."""
    found = {instance.name: instance for instance in instances}
    for node in plan.graph.nodes:
        if node.drafter is None:
            continue
        where = chosen[node.name]
        pool, options = where.pool, where.options
        name = drafting_name(node, pool, None if options is None else options.engine)
        known = found.get(name)
        if options is not None:
            host = found[f"{node.model}@{pool}/{options.engine}"]
            tokens = int(node.param("draft_tokens"))
            found[host.name] = replace(host, drafter=node.drafter, draft_tokens=tokens)
            found[name] = Instance(
                name=name,
                model=node.drafter,
                pool=pool,
                devices=host.devices,
                uses=("rollout",),
                trained=False,
                tp=host.tp,
                inside=host.name,
            )
        elif known is None:
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


def drafting_name(node: Node, pool: str, engine: str | None) -> str:
    """The name of the instance of a rollout's drafter, by the rollout's pool and engine."""
    return f"{node.drafter}@{pool}" + (f"/{engine}/{node.model}" if engine is not None else "")


def drafting_instance(plan: Plan, node: Node, served: Instance) -> Instance:
    """The instance of the drafter of a rollout that is served by another instance."""
    engine = None if served.options is None else served.engine
    return plan.instance(drafting_name(node, served.pool, engine))


def with_drafts(
    known: Holds, node: Node, instance: Instance, roof: Roofline, load: Load, costs: Costs
) -> Holds:
    """What a node holds, and beside it what drafts for its rows: keys and values, and logits.

    The policy reads one token more than were drafted, and keeps logits of each. An engine drafts
    for all that it generates, for the rows that it computes at once, with keys and values in its
    pool. A drafter whose shape is not known counts nothing.
    """
    apart, name = instance.options is not None, drafter_of(node, instance)
    tokens = drafted(instance) if apart else int(dict(node.params).get("draft_tokens", 0))
    shape = None if name is None else costs.shapes[name]
    if name is not None and shape is not None:
        drafter = costs.roofline(replace(instance, model=name), shape)
        size = drafting_bytes(tokens, roof, drafter, load)
    elif frozen(instance) is not None:
        size = drafting_bytes(tokens, roof, roof, load, beams=beams(instance))
    else:
        return known
    return tuple(sorted((*known, (DRAFTS, size)), key=lambda part: -part[1]))


def drafting_bytes(
    tokens: int, roof: Roofline, drafter: Roofline, load: Load, *, beams: int = 1
) -> int:
    """Bytes for so many drafted tokens a row; a drafter makes logits of `beams` tokens at a time.

    A draft model that stays as it is predicts the tokens of the policy: `roof` stands for it.
    """
    rows, cache = load.most or load.rows, 0.0
    if roof.serving is not None:
        rows = roof.serving.rows(rows)
    else:
        cache = (load.longest_row + tokens) * drafter.cache_bytes + tokens * roof.cache_bytes
    return int(rows * cache) + tokens * roof.scores(rows) + beams * drafter.scores(rows)


def drafter_findings(
    plan: Plan, instances: Sequence[Instance], served: Mapping[str, Sequence[Node]]
) -> list[Finding]:
    """E261 for every rollout here whose weights or whose drafter's are cut over ranks.

    `served` has the nodes of each instance; rollouts in engines of their own are left out.
    """
    findings = []
    of = {node.name: i for i in instances for node in served[i.name] if node.model == i.model}
    for node in plan.graph.nodes:
        if node.drafter is None or of[node.name].options is not None:
            continue
        beside = drafting_instance(plan, node, of[node.name])
        cut = [f"{i.name}: {i.layout()}" for i in (of[node.name], beside) if i.fsdp * i.tp > 1]
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
