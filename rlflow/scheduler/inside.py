"""What an engine holds where a drafter lies in it, and what may draft there.

A drafter in an engine has weights of its own, which a reshard fills through a staging; on the
devices they are a part of the engine's, with which they sleep and wake. Its keys and values lie in
the engine's pool. Knows sizes and options; no order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlflow.errors import Finding
from rlflow.graph.graph import Node
from rlflow.graph.speculative import Speculative, slots
from rlflow.scheduler.plan import Instance, Part
from rlflow.scheduler.shapes import dtype_bytes, hub_snapshot

if TYPE_CHECKING:
    from rlflow.scheduler.costs import Costs


def models_in(instance: Instance) -> tuple[Instance, ...]:
    """The models of an engine, each as it lies there: its own, and its drafter's."""
    if instance.drafter is None:
        return (instance,)
    return instance, replace(instance, model=instance.drafter)


def held_weights(instance: Instance, costs: Costs) -> int | None:
    """Bytes of all weights of an engine on each of its devices; None where a shape is not known."""
    sizes = [costs.weights(each) for each in models_in(instance)]
    beside = frozen_bytes(instance)
    return None if None in sizes else sum(size or 0 for size in sizes) + beside


def frozen(instance: Instance) -> Speculative | None:
    """What an engine drafts with by its options alone."""
    said: Speculative | None = getattr(instance.options, "speculative", None)
    return said


def drafter_of(node: Node, instance: Instance) -> str | None:
    """The model that drafts for a node's rows: an engine has one for all that it generates."""
    return node.drafter if instance.options is None else instance.drafter


def drafts(instance: Instance) -> bool:
    """Whether an engine drafts: with a drafter that lies in it, or by its options."""
    return instance.drafter is not None or frozen(instance) is not None


def drafted(instance: Instance) -> int:
    """Tokens of each row that an engine verifies in a pass beside the row's own."""
    said = frozen(instance)
    if said is None:
        return instance.draft_tokens
    return said.verified - 1


def beams(instance: Instance) -> int:
    """Tokens of each row that what an engine drafts with by its options makes logits of at once."""
    said = frozen(instance)
    return 0 if said is None or said.algorithm == "NGRAM" else said.topk


def frozen_bytes(instance: Instance) -> int:
    """Bytes on each device of a draft model that stays as it is: of its files, where they are."""
    return math.ceil(sum(file.stat().st_size for file in frozen_files(instance)) / instance.tp)


def frozen_files(instance: Instance) -> list[Path]:
    """The weight files of a draft model that stays as it is; none where it is not here."""
    said = frozen(instance)
    if said is None or said.draft_model is None:
        return []
    path = Path(said.draft_model)
    directory = path if path.is_absolute() else hub_snapshot(said.draft_model)
    if directory is None:
        return []
    return sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))


def token_bytes(instance: Instance, costs: Costs) -> float:
    """Bytes that a token takes in the pool of an engine on each of its devices.

    Of models whose shapes are known.
    """
    names = [each.model for each in models_in(instance)]
    found = ((costs.graph.model(name), costs.shapes[name]) for name in names)
    return sum(shape.cached * dtype_bytes(model) for model, shape in found if shape) / instance.tp


def reserved(instance: Instance) -> int:
    """Tokens that each row takes in the pool beyond its own, for what is drafted."""
    return slots(drafted(instance) + 1) if drafts(instance) else 0


def staging(instance: Instance, costs: Costs) -> int:
    """Bytes of the host's memory for each device that the copy of an instance's weights takes."""
    whole = costs.weights(replace(instance, tp=1, devices=instance.devices[:1])) or 0
    return math.ceil(whole / instance.tp)


def drafter_part(instance: Instance, costs: Costs) -> Part:
    """The weights of a drafter in an engine: a copy on the host, of the engine's on a device."""
    return Part(
        name=instance.weights,
        instance=instance.name,
        kind="weights",
        size=0 if costs.weights(instance) is not None else None,
        devices=instance.devices,
        on_host=staging(instance, costs),
    )


def brought_awake(instance: Instance, costs: Costs) -> int:
    """Bytes for each device that an engine's wake brings of what drafts in it.

    They come from the host, whatever became of the policy's weights: a drafter from its staging,
    and what stays as it is from the copy that SGLang has of it on accelerators.
    """
    if instance.drafter is not None:
        return costs.weights(replace(instance, model=instance.drafter)) or 0
    return backup(instance, costs)


def backup(instance: Instance, costs: Costs) -> int:
    """Bytes of the host's memory for each device of an engine's own copy of what drafts in it.

    SGLang has one on accelerators where it gives memory back, of a drafter and of a draft model
    that stays as it is.
    """
    if costs.cluster.kind_of(instance.devices[0]).name == "cpu":
        return 0
    return staging(instance, costs) if instance.inside is not None else frozen_bytes(instance)


def drafts_findings(engine: Instance, nodes: Sequence[Node], costs: Costs) -> Iterator[Finding]:
    """E630, E638, E639 and E678 for the rollouts of an engine that drafts."""
    assert engine.options is not None
    if engine.drafter is not None:
        yield from _together(engine, nodes, costs)
    on_cpu = costs.cluster.kind_of(engine.devices[0]).name == "cpu"
    for node in nodes:
        temperature = float(dict(node.params).get("temperature", 0))
        why = engine.options.distorted(temperature, on_cpu=on_cpu)
        if why:
            yield _distorted(engine, node, temperature, why)


def _together(engine: Instance, nodes: Sequence[Node], costs: Costs) -> Iterator[Finding]:
    """What keeps a drafter from lying in an engine beside its model."""
    assert engine.options is not None
    drafted = [node for node in nodes if node.drafter is not None]
    said = {f"{n.drafter} (draft_tokens={n.param('draft_tokens')})": n for n in drafted}
    title = engine.options.title
    if len(said) > 1:
        yield Finding(
            code="E638",
            what=f"{engine.name} is to draft in several ways, and {title} has one for all rows",
            where=list(said.values())[1].where,
            got=", ".join(said),
            expected="one drafter and one number of draft_tokens for the rollouts of an engine",
            fix="the same drafter= and draft_tokens=, or a pool of its own for one rollout",
        )
    unlike = list(_unlike(engine, costs))
    if unlike:
        yield Finding(
            code="E639",
            what=f"drafter {engine.drafter!r} cannot lie in {title} beside {engine.model!r}",
            where=drafted[0].where,
            got=", ".join(unlike),
            expected="the policy's dtype and size of vocabulary, trained as a whole",
            fix=f'"{engine.model}.rollout": rf.on("{engine.pool}")',
        )
    if frozen(engine) is not None:
        yield Finding(
            code="E678",
            what=f"{engine.name} is to draft with {engine.drafter!r} and by its options",
            where=drafted[0].where,
            got="drafter= of the rollout and speculative= of the engine",
            expected="one of them",
            fix=f'"{engine.model}.rollout": rf.on("{engine.pool}", engine="{engine.engine}")',
        )


def _unlike(engine: Instance, costs: Costs) -> Iterator[str]:
    """What keeps a drafter from lying beside a model."""
    mine, theirs = (costs.graph.model(each.model) for each in models_in(engine))
    if theirs.dtype != mine.dtype:
        yield f"dtype {theirs.dtype}, the policy's is {mine.dtype}"
    if theirs.lora is not None:
        yield "adapters (lora=)"
    if mine.lora is not None:
        yield "adapters (lora=) of the policy"
    shape, other = (costs.shapes[each.model] for each in models_in(engine))
    if shape is not None and other is not None and other.vocab != shape.vocab:
        yield f"a vocabulary of {other.vocab}, the policy's is {shape.vocab}"


def _distorted(engine: Instance, node: Node, temperature: float, why: str) -> Finding:
    who = "its options" if engine.drafter is None else repr(engine.drafter)
    drafts = "draft" if engine.drafter is None else "drafts"
    beside = "" if node.drafter else f", since {who} {drafts} for all of {engine.name}"
    return Finding(
        code="E630",
        what=f"{node.name}: with a drafter what is sampled would be wrong{beside}: {why}",
        where=node.where,
        got=f"temperature={temperature:g}",
        expected="temperature=0, or the embedded engine, whose tokens no drafter changes",
        fix=f'"{engine.model}.rollout": rf.on("{engine.pool}")',
    )
