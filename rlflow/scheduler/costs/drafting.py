"""What an engine holds where a drafter lies in it.

A drafter in an engine has weights of its own, which a reshard fills through a staging; on the
devices they are a part of the engine's, with which they sleep and wake. Its keys and values lie in
the engine's pool. Knows sizes and options; no order.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from rlflow.graph.user.speculative import slots
from rlflow.modelfiles.directories import hub_snapshot
from rlflow.scheduler.costs.sizes import Sizes
from rlflow.scheduler.models.shapes import dtype_bytes
from rlflow.scheduler.plan.plan import Instance, Part


def models_in(instance: Instance) -> tuple[Instance, ...]:
    """The models of an engine, each as it lies there: its own, and its drafter's."""
    if not instance.engine_plan.has_drafter:
        return (instance,)
    return instance, _drafter(instance)


def held_weights(instance: Instance, sizes: Sizes) -> int | None:
    """Bytes of all weights of an engine on each of its devices; None where a shape is not known."""
    found = [sizes.weights(each) for each in models_in(instance)]
    beside = frozen_bytes(instance)
    return None if None in found else sum(size or 0 for size in found) + beside


def _drafter(instance: Instance) -> Instance:
    """The drafter of an engine, as it lies there."""
    return replace(instance, model=str(instance.drafter))


def frozen_bytes(instance: Instance) -> int:
    """Bytes on each device of a draft model that stays as it is: of its files, where they are."""
    return math.ceil(sum(file.stat().st_size for file in frozen_files(instance)) / instance.tp)


def frozen_files(instance: Instance) -> list[Path]:
    """The weight files of a draft model that stays as it is; none where it is not here."""
    said = instance.engine_plan.speculative
    if said is None or said.draft_model is None:
        return []
    path = Path(said.draft_model)
    directory = path if path.is_absolute() else hub_snapshot(said.draft_model)
    if directory is None:
        return []
    return sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))


def token_bytes(instance: Instance, sizes: Sizes) -> float:
    """Bytes that a token takes in the pool of an engine on each of its devices.

    Of models whose shapes are known.
    """
    names = [each.model for each in models_in(instance)]
    found = ((sizes.graph.model(name), sizes.shapes[name]) for name in names)
    return sum(
        shape.cached_on_each(instance.tp) * dtype_bytes(model) for model, shape in found if shape
    )


def reserved(instance: Instance) -> int:
    """Tokens that each row takes in the pool beyond its own, for what is drafted."""
    return slots(instance.engine_plan.verified + 1) if instance.engine_plan.drafts else 0


def staged_bytes(instance: Instance, sizes: Sizes) -> int:
    """Bytes of the host's memory for each device that the copy of an instance's weights takes."""
    whole = sizes.weights(replace(instance, tp=1, devices=instance.devices[:1])) or 0
    return math.ceil(whole / instance.tp)


def drafter_part(instance: Instance, sizes: Sizes) -> Part:
    """The weights of a drafter in an engine: a copy on the host, of the engine's on a device."""
    return Part(
        name=instance.weights,
        instance=instance.name,
        kind="weights",
        size=0 if sizes.weights(instance) is not None else None,
        devices=instance.devices,
        on_host=staged_bytes(instance, sizes),
    )


def brought_awake(instance: Instance, sizes: Sizes) -> int:
    """Bytes for each device that an engine's wake brings of what drafts in it.

    They come from the host, whatever became of the policy's weights: a drafter from its staging,
    and what stays as it is from the copy that SGLang has of it on accelerators.
    """
    if instance.engine_plan.has_drafter:
        return sizes.weights(_drafter(instance)) or 0
    return backup(instance, sizes)


def backup(instance: Instance, sizes: Sizes) -> int:
    """Bytes of the host's memory for each device of an engine's own copy of what drafts in it.

    SGLang has one on accelerators where it gives memory back, of a drafter and of a draft model
    that stays as it is.
    """
    if sizes.cluster.kind_of(instance.devices[0]).name == "cpu":
        return 0
    lies = instance.engine_plan.lies_inside
    return staged_bytes(instance, sizes) if lies else frozen_bytes(instance)
