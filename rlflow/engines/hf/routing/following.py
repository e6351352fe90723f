"""A model's routers as its training engine drives them: through steps, pass by pass.

This file knows neither losses nor how a batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from rlflow.batch import Batch
from rlflow.contract.engines import RouterSpec
from rlflow.engines.hf.forward.attention import PackedAttention
from rlflow.engines.hf.forward.packed import PackedLayout
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.routing.steps import StepRouting, Total, corrections
from rlflow.engines.hf.weights.corrections import correction_names
from rlflow.errors import UsageError
from rlflow.modelfiles.configs import text_config
from rlflow.modelfiles.families import experts_in
from rlflow.modelfiles.mixtures.routers import router_finding


class FollowedRouters:
    """The routers of `model`, trained as `spec` says; None where nothing is said of them.

    `total` adds up a tensor over the ranks that have other rows. Raises UsageError (E534, E535)
    for a model whose routers cannot be trained so.
    """

    def __init__(self, model: TorchModel, spec: RouterSpec | None, total: Total) -> None:
        self.model = model
        self.spec = spec
        self.total = total
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
    def filling(self) -> Iterator[None]:
        """Passes within are of nobody's rows."""
        self._fills = True
        try:
            yield
        finally:
            self._fills = False

    @contextmanager
    def attention(self, layout: PackedLayout) -> Iterator[PackedAttention]:
        """What a pass runs under; routers follow the step that is being made, if any."""
        if self.step is None:
            yield PackedAttention(layout)
            return
        led = self.step.follow(layout, filling=self._fills)
        yield PackedAttention(layout, routing=led)
        self.step.took(led)

    def begin(self, batch: Batch, count: Callable[[Batch], None]) -> None:
        """A step with a batch begins; `count` forwards its rows where that is needed before."""
        if self.spec is None:
            return
        experts = experts_in(text_config(self.model.config.to_dict()))
        layers = len(self.model.routers)
        self.step = StepRouting(self.spec, batch, layers, experts, self.total)
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
        changes = corrections(self.loads, self.spec.bias_rate)
        for name, change in zip(self.names, changes, strict=True):
            shard = held[name]
            piece = change.view(shard.shape)[tuple(slice(*bounds) for bounds in shard.box)]
            shard.tensor.copy_(before[name] + piece.to(before[name]))
