"""A model's routers as its training engine drives them: through steps, pass by pass.

This file knows neither losses nor how a batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from rlflow.batch import Batch
from rlflow.contract.engines import RouterSpec
from rlflow.engines.hf.forward.attention import PackedAttention
from rlflow.engines.hf.forward.packed import PackedLayout
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.routing.passes import Pass
from rlflow.engines.hf.routing.replays import (
    RESPONSES,
    flat_experts,
    never_read,
    recorded_of,
    replayed_of,
)
from rlflow.engines.hf.routing.steps import StepRouting, Total, corrections
from rlflow.engines.hf.weights.corrections import correction_names
from rlflow.errors import UsageError
from rlflow.modelfiles.configs import text_config
from rlflow.modelfiles.families import experts_in
from rlflow.modelfiles.mixtures.routers import replay_finding, router_finding


class FollowedRouters:
    """The routers of `model`, trained as `spec` says; None where nothing is said of them.

    `total` adds up a tensor over the ranks that have other rows, tokens or layers, of which `alike`
    have the same rows. Raises UsageError (E534, E535) for a model whose routers cannot be trained
    so.
    """

    def __init__(
        self, model: TorchModel, spec: RouterSpec | None, total: Total, alike: int = 1
    ) -> None:
        self.model = model
        self.spec = spec
        self.total = total
        self.alike = alike
        self.step: StepRouting | None = None
        self.loads: Tensor | None = None
        self._fills = False
        kind = model.config.get_text_config().model_type
        if spec is not None:
            found = router_finding(model.name, kind, corrected=bool(spec.bias_rate))
            if found is not None:
                raise UsageError(found)
        self.names = correction_names(model.module)

    @contextmanager
    def filling(self, fills: bool = True) -> Iterator[None]:
        """Passes within are of nobody's rows, where that is said."""
        before, self._fills = self._fills, fills
        try:
            yield
        finally:
            self._fills = before

    @contextmanager
    def attention(
        self, layout: PackedLayout, batch: Batch, *, records: bool = False
    ) -> Iterator[PackedAttention]:
        """What a pass over rows runs under, for one of which routers are led or watched.

        They choose what the rows say, `record` what they chose, and follow the step that is being
        made, if any. Raises UsageError (E536) where they cannot.
        """
        replays = RESPONSES in batch
        if self.step is None and not (replays or records):
            yield self._under(layout, None)
            return
        if replays or records:
            self._require_replays()
        led = Pass() if self.step is None else self.step.follow(layout, filling=self._fills)
        led.records = records
        led.replayed = replayed_of(batch, layout, self.model.routers_in_all)
        yield self._under(layout, led)
        led.open = False
        if self.step is not None:
            self.step.took(led)

    def recorded(self, state: PackedAttention, batch: Batch) -> dict[str, Tensor]:
        """What a pass over rows has recorded, as flat values of their fields."""
        assert isinstance(state.routing, Pass)
        if not state.routing.records:
            return {}
        if not self.model.routers_now:
            return self.unread(batch)
        chosen, shared = flat_experts(state.routing), self.model.shared_rows
        if shared is not None:
            chosen = shared.of_all_tokens(chosen, state.layout)
        return recorded_of(chosen, state.layout.of_all, batch)

    def _under(self, layout: PackedLayout, led: Pass | None) -> PackedAttention:
        """The attention of a pass, of a rank's part of the tokens where ranks share rows."""
        shared = self.model.shared_rows
        if shared is None:
            return PackedAttention(layout, routing=led)
        return shared.attention(layout, led)

    def unread(self, batch: Batch) -> dict[str, Tensor]:
        """The same of rows that nothing reads."""
        routers: Sequence[Any] = self.model.routers_now
        return never_read(batch, sum(router.top_k for router in routers))

    def _require_replays(self) -> None:
        found = replay_finding(self.model.name, self.model.config.get_text_config().model_type)
        if found is not None:
            raise UsageError(found)

    def begin(self, batch: Batch, count: Callable[[Batch], None]) -> None:
        """A step with a batch begins; `count` forwards its rows where that is needed before."""
        if self.spec is None:
            return
        experts = experts_in(text_config(self.model.config.to_dict()))
        layers = self.model.routers_in_all
        self.step = StepRouting(self.spec, batch, layers, experts, self.total, self.alike)
        if self.step.counts_first:
            count(batch)
            self.step.counted()

    def end(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of a step with those of its routers, whose losses are part of `loss`."""
        if self.step is None:
            return metrics
        found, self.loads = self.step.finish(), self.step.loads
        self.step = None
        return metrics | found | {"loss": metrics.get("loss", 0.0) + found["loss"]}

    @contextmanager
    def corrected(self) -> Iterator[None]:
        """Biases follow the loads of the last step once the optimizer's has been made within."""
        if self.spec is None or not self.spec.bias_rate or self.loads is None:
            yield
            return
        held = self.model.laid_out(self.model.all_tensors(), self.names)
        before = {name: shard.tensor.clone() for name, shard in held.items()}
        yield
        changes = corrections(self.loads[list(self.model.router_places)], self.spec.bias_rate)
        for name, change in zip(self.names, changes, strict=True):
            shard = held[name]
            piece = change.view(shard.shape)[tuple(slice(*bounds) for bounds in shard.box)]
            shard.tensor.copy_(before[name] + piece.to(before[name]))
