"""The routers of a module, and a forward for each that a `Pass` may follow or lead.

A router of transformers takes hidden states and returns logits `[tokens, experts]`, weights and
chosen experts `[tokens, k]`. Its forward is the family's own: what it chooses can be told it, its
weights are then those of its own logits. This file knows neither rows nor steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from rlflow.engines.hf.forward.attention import current_state
from rlflow.engines.hf.routing.losses import Scores
from rlflow.engines.hf.routing.passes import Attach, Choosing, Pass
from rlflow.modelfiles.mixtures.routers import ROUTERS


def find_routers(module: nn.Module) -> list[nn.Module]:
    """The routers of a module, in the order of its layers; none where the family is not known."""
    inner: Any = getattr(module, "body", module)
    if ROUTERS.get(inner.config.get_text_config().model_type) is None:
        return []
    known = getattr(inner, "_can_record_outputs", None) or {}
    recorded = known.get("router_logits") or getattr(
        inner.base_model, "_can_record_outputs", {}
    ).get("router_logits")
    if recorded is None:
        return []
    return [part for part in module.modules() if isinstance(part, recorded.target_class)]


def lead_routers(module: nn.Module, routers: Sequence[nn.Module], places: Sequence[int]) -> None:
    """Let the routers of a module, with their `places`, follow the pass that a forward runs under.

    Places are those among the routers of the whole model. Without a pass a router
    computes what it did. Call it before layers are compiled or recomputed.
    """
    inner: Any = getattr(module, "body", module)
    for layer, router in zip(places, routers, strict=True):
        scores = ROUTERS[inner.config.get_text_config().model_type].scores
        router.forward = partial(routed, router, layer, scores)


def routed(
    router: nn.Module, layer: int, scores: Scores, hidden: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """A router's own forward, as the pass in progress has it."""
    plain = type(router).forward
    led: Pass | None = getattr(current_state(), "routing", None)
    if led is None:
        made: tuple[Tensor, Tensor, Tensor] = plain(router, hidden, *args)
        return made
    logits, weights, chosen = replaying(led, layer, partial(plain, router, hidden, *args))
    added = led.seen(layer, logits, chosen, scores)
    if added is not None:
        weights = Attach.apply(weights, added)  # type: ignore[no-untyped-call]
    return logits, weights, chosen


def replaying(
    led: Pass, layer: int, plain: Callable[[], tuple[Tensor, Tensor, Tensor]]
) -> tuple[Tensor, Tensor, Tensor]:
    """What a router makes where it chooses the experts that a pass has for its layer, if any."""
    if led.replayed is None:
        return plain()
    with Choosing(led.replayed[:, layer]) as choosing:
        made = plain()
    assert choosing.choices == 1, f"a router that chose {choosing.choices} times"
    return made
