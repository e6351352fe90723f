"""The head of a language model, taken apart from its body, so that chunks can stand in its place.

A model's own forward still runs, with all that hooks on to it, such as weights that are made whole
for it. Where it calls its head, `in_place_of_head` computes with the hidden states and the head's
weights, and what the forward makes of them afterwards is left unread. This file knows what
families do to logits after the product.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from rlflow.batch import to_device
from rlflow.contract.engines import ModelConfig
from rlflow.engines.hf.forward.chunks import ChunkedScores, logits_of
from rlflow.engines.hf.forward.kernels import product
from rlflow.engines.hf.forward.shares import Projection, WantedNumbers
from rlflow.engines.hf.forward.vocabulary import CHOSEN, SUMS, TOP, require_ids, require_k

if TYPE_CHECKING:
    import torch.distributed as dist

Found = TypeVar("Found")


# Families that multiply logits by a number of their config, and those that divide by one.
FACTORS = {
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
}
DIVISORS = {
    "granite": "logits_scaling",
    "granitemoe": "logits_scaling",
    "granitemoehybrid": "logits_scaling",
    "granitemoeshared": "logits_scaling",
}


class Predictor:
    """The last layer of a language model: `layer` makes of hidden states what `form` shapes.

    The layer's weights are read while the model's forward calls it, for they may be whole only
    then.
    """

    def __init__(self, layer: nn.Linear, form: Projection) -> None:
        self.layer = layer
        self.form = form
        layer.forward = partial(called, self, layer.forward)  # type: ignore[method-assign]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[tokens, part of the vocabulary]` of `hidden [tokens, in]`, at least float32."""
        return logits_of(product(hidden, self.layer.weight, self.layer.bias), self.form)

    def scores(
        self,
        hidden: Tensor,
        tokens: Tensor,
        ids: Tensor | None,
        outputs: Collection[str],
        temperatures: tuple[float, ...],
        top_k: int,
        limit: int,
    ) -> dict[str, Tensor]:
        """Those of `outputs` that are of distributions, of `hidden [tokens, in]`, by name.

        As `vocabulary.distributions` says, with log_probs and entropy `[tokens, temperatures]`.
        `limit` bounds the bytes of distributions in memory. Raises RunError for a k, or an id,
        beyond the vocabulary.
        """
        wants_top = not set(outputs).isdisjoint(TOP)
        wants_ids = not set(outputs).isdisjoint(CHOSEN)
        if wants_top:
            require_k(top_k, self.form.size)
        if wants_ids:
            assert ids is not None, "log-probs at ids are asked for, and the batch has none"
            require_ids(ids, self.form.size)
            ids = to_device(ids, hidden.device)
        asked = WantedNumbers(
            temperatures=temperatures,
            limit=limit,
            entropy="entropy" in outputs,
            squared=not set(outputs).isdisjoint(SUMS),
            rest="rest_at" in outputs,
            top_k=top_k if wants_top else 0,
        )
        made = ChunkedScores.apply(  # type: ignore[no-untyped-call]
            hidden, self.layer.weight, self.layer.bias, tokens, ids if wants_ids else None, asked,
            self.form,
        )  # fmt: skip
        names = ("log_probs", "entropy", *SUMS, *CHOSEN, *TOP)
        return {name: value for name, value in zip(names, made, strict=True) if name in outputs}


class _Call:
    """One forward whose head computes something else."""

    def __init__(self, compute: Callable[[Predictor, Tensor], Any]) -> None:
        self.compute = compute
        self.made: list[Any] = []


_current: ContextVar[_Call | None] = ContextVar("rlflow_head", default=None)


@contextmanager
def in_place_of_head(compute: Callable[[Predictor, Tensor], Found]) -> Iterator[list[Found]]:
    """Within, in this thread, heads call `compute(predictor, hidden [tokens, in])`.

    What it returns is appended to the list.
    """
    call = _Call(compute)
    token = _current.set(call)
    try:
        yield call.made
    finally:
        _current.reset(token)


def called(predictor: Predictor, plain: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """The forward of a head: `plain`, or what `in_place_of_head` says; that keeps `hidden`."""
    call = _current.get()
    if call is None:
        return plain(hidden)
    call.made.append(call.compute(predictor, hidden.reshape(-1, hidden.shape[-1])))
    return hidden


def take_head_apart(
    module: nn.Module,
    config: ModelConfig,
    *,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
    size: int | None = None,
) -> Predictor | None:
    """The head of a language model; None where it is no plain linear layer, as with an adapter.

    With a `group` of ranks this one has the logits from `start` of `size` in all.
    """
    layer: Any = getattr(module, "get_output_embeddings", lambda: None)()
    if type(layer) is not nn.Linear:
        return None
    form = Projection(
        size=layer.out_features if size is None else size,
        start=start,
        group=group,
        scale=logit_scale(config),
        cap=getattr(config.get_text_config(), "final_logit_softcapping", None),
    )
    return Predictor(layer, form)


def logit_scale(config: ModelConfig) -> float:
    """What a family multiplies its logits by."""
    text = config.get_text_config()
    kind: str = text.model_type
    if kind in FACTORS:
        return float(getattr(text, FACTORS[kind]))
    return 1 / float(getattr(text, DIVISORS[kind])) if kind in DIVISORS else 1.0
