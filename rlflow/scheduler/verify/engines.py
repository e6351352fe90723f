"""Rules of the verifier: engines in processes of their own, and the pools they keep.

Knows the graph and the plan; shares no code with the passes.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.scheduler.plan.plan import Action, Instance
from rlflow.scheduler.verify.happens_before import Facts


def engines_are_apart(facts: Facts) -> Iterator[str]:
    """An engine serves rollouts alone, from whole weights that are its own."""
    for i in facts.plan.instances:
        if i.options is None:
            continue
        if i.trained or set(i.uses) != {"rollout"}:
            yield f"engine {i.name} serves {', '.join(i.uses)}{' and learns' * i.trained}"
        computes = i.recomputes or i.hosts_activations or i.compiled or i.tf32
        if max(i.fsdp, i.ep, i.cp, i.pp) > 1 or i.offload or computes:
            yield f"engine {i.name} lies as {i.layout()}"
        model = facts.plan.graph.model(i.model)
        targets = () if model.lora is None else model.lora.targets
        foreign = {target.split(".")[-1] for target in targets} - set(i.options.adapted)
        if foreign or model.head == "value":
            yield f"engine {i.name} runs a model with adapters that it has not, or a value head"
    for a in facts.plan.actions:
        yield from _is_served(facts, a)


def rows_move_as_they_can(facts: Facts) -> Iterator[str]:
    """Rows move between engines that have a model each, in a way that these have.

    An engine in a process of its own gives no keys and values out, and moves rows by its clock: not
    where samples are to be exact.
    """
    for node in facts.plan.graph.nodes:
        said = dict(node.params)
        if "balance" not in said:
            continue
        i = facts.instances[str(facts.runs[node.name][0].instance)]
        ways = ("cache", "reread") if i.options is None else ("reread",)
        if said.get("moves") not in ways:
            yield f"rows of {node.name} move by {said.get('moves')!r}, {i.name} has {list(ways)}"
        if i.options is not None and getattr(i.options, "deterministic", True):
            yield f"rows of {node.name} move by the clock of {i.name}, whose samples are exact"
        if i.options is None and i.sharded:
            yield f"rows of {node.name} move, and {i.name} lies as {i.layout()}"


def drafters_lie_in_their_engines(facts: Facts) -> Iterator[str]:
    """A drafter in an engine is the one that the engine has, and has nothing else of its own.

    It lies on the engine's devices as the engine does, drafts for it alone, and sleeps with it.
    """
    held: dict[str, list[Instance]] = {}
    for i in facts.plan.instances:
        if i.inside is None:
            continue
        held.setdefault(i.inside, []).append(i)
        engine = facts.instances.get(i.inside)
        if engine is None or engine.options is None or engine.drafter != i.model:
            yield f"{i.name} lies in {i.inside}, which has no such drafter"
        elif (i.devices, i.tp, i.pool) != (engine.devices, engine.tp, engine.pool):
            yield f"{i.name} lies on {list(i.devices)} as {i.layout()}, its engine does not"
        learns = i.trained or i.recomputes or i.hosts_activations or i.compiled or i.tf32
        if learns or i.uses != ("rollout",) or i.fsdp > 1 or i.cp > 1 or i.offload:
            yield f"{i.name} does more than draft"
        if i.options is not None or i.drafter is not None:
            yield f"{i.name} is in an engine, and an engine itself"
        if facts.parts[i.weights].size:
            yield f"{i.weights} has memory of its own, beside its engine's"
        yield from (f"{a.id} moves {a.part}" for a in facts.plan.actions if a.part == i.weights)
    for i in facts.plan.instances:
        drafts = i.drafter is not None
        if drafts is not (i.draft_tokens > 0) or len(held.get(i.name, ())) != int(drafts):
            inside = [other.name for other in held.get(i.name, ())]
            yield f"{i.name} drafts {i.draft_tokens} tokens with {i.drafter}, in it lie {inside}"
    yield from _as_declared(facts)


def _as_declared(facts: Facts) -> Iterator[str]:
    """An engine drafts as its rollouts say, all of them alike where they say anything."""
    said: dict[str, set[tuple[str, int]]] = {}
    for node, (run, *_) in facts.runs.items():
        params = dict(facts.plan.graph.node(node).params)
        if "drafter" in params:
            found = str(params["drafter"]), int(params["draft_tokens"])
            said.setdefault(str(run.instance), set()).add(found)
    for i in facts.plan.instances:
        drafts = {(i.drafter, i.draft_tokens)} if i.drafter is not None else set()
        if i.options is not None and said.get(i.name, set()) != drafts:
            yield f"{i.name} lies as {i.layout()}, its rollouts say {sorted(said.get(i.name, ()))}"


def _is_served(facts: Facts, a: Action) -> Iterator[str]:
    """A run of an engine has weights and pool; nothing else has anything of a pool."""
    pools = [need for need in a.needs if facts.parts[need].kind == "pool"]
    engine = _engine(facts, a) if a.kind == "run" else None
    wanted = [] if engine is None else [f"{engine.name}/pool"]
    if pools != wanted:
        yield f"{a.id} needs pools {pools}, it uses {wanted}"
    if engine is not None and engine.weights not in a.needs:
        yield f"{a.id} generates without {engine.weights}"


def _engine(facts: Facts, a: Action) -> Instance | None:
    found = facts.instances.get(a.instance or "")
    return found if found is not None and found.options is not None else None


def engines_sleep_between_rollouts(facts: Facts) -> Iterator[str]:
    """Pools are thrown away, never copied; an engine between two pieces of a rollout is awake.

    An engine can give memory back where it does, and only one that does is known to be able to.
    """
    going_on = {run.instance for runs in facts.runs.values() for run in runs if run.ends_first}
    asleep: dict[str, Action] = {}
    for a in facts.plan.actions:
        if a.part is None or _engine(facts, a) is None:
            continue
        asleep[str(a.instance)] = a
        if facts.parts[a.part].kind == "pool" and (a.mode != "discard" or a.cost.moved):
            yield f"{a.id} keeps a pool, of no use after the rollout"
        if a.instance in going_on:
            yield f"{a.id} of an engine that has rows left to generate"
    yield from _parts_are_right(facts)
    for i in facts.plan.instances:
        if i.options is None:
            continue
        if i.name in asleep and not i.options.memory_saver:
            yield f"{asleep[i.name].id}, and {i.name} cannot give memory back"
        if i.options.memory_saver is None:
            yield f"nothing says whether {i.name} can give memory back"


def _parts_are_right(facts: Facts) -> Iterator[str]:
    """A replica is one process: all of it sleeps, or none. What parts hold is their size."""
    for part in facts.plan.parts:
        for devices in facts.instances[part.instance].processes:
            if set(part.stays).intersection(devices) not in (set(), set(devices)):
                yield f"{part.name} stays on {list(part.stays)}, which is no whole replica"
        if part.holds and sum(size for _, size in part.holds) != part.size:
            yield f"{part.name} is of {part.size} bytes, and of {dict(part.holds)}"
        if not set(part.stays) <= set(part.devices):
            yield f"{part.name} stays on {list(part.stays)}, it is on {list(part.devices)}"
