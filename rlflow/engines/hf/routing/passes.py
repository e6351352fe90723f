"""One forward pass as routers see it: which experts they are to choose, what of it is kept.

A `Pass` is part of the attention state that a forward runs under, so that a layer which is computed
again in a backward finds the same one. This file knows neither batches nor optimizer steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlflow.engines.hf.routing.losses import Scores, loads, router_probabilities, squared_partition


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTerms:
    """What a pass adds to the gradients: coefficients over `tokens` of the whole step.

    `shares` `[layers, experts]` are those of the step's tokens that chose each expert, None where
    there is no balance; `balance` and `z` are coefficients, divided by the number of layers.
    """

    balance: float
    z: float
    tokens: float
    shares: Tensor | None


@dataclass(slots=True, kw_only=True)
class Pass:
    """A forward over flat tokens, of which token t counts `uses[t]` times, 0 for filling.

    Without `uses` nothing is counted. `replayed` int64 `[tokens, layers, k]` are the experts that
    tokens choose, -1 where a token chooses by itself. A pass that `records` keeps what each layer
    chose, int16 `[tokens, k]`, as `chosen`. Sums over tokens are float64: `loads` and `given`, the
    sum of probabilities, `[layers, experts]`, `squares` `[layers]`. They grow while the pass is
    `open`, not when a layer is computed again.
    """

    uses: Tensor | None = None
    terms: RouterTerms | None = None
    replayed: Tensor | None = None
    records: bool = False
    open: bool = True
    chosen: dict[int, Tensor] = field(default_factory=dict)
    loads: dict[int, Tensor] = field(default_factory=dict)
    given: dict[int, Tensor] = field(default_factory=dict)
    squares: dict[int, Tensor] = field(default_factory=dict)

    def seen(self, layer: int, logits: Tensor, chosen: Tensor, scores: Scores) -> Tensor | None:
        """Take note of a layer's routing; what it adds to the loss, a scalar with gradient."""
        if self.records and self.open:
            self.chosen[layer] = chosen.to(torch.int16)
        terms = self.terms
        if self.uses is None:
            return None
        with torch.set_grad_enabled(terms is not None and torch.is_grad_enabled()):
            uses = self.uses.to(torch.promote_types(logits.dtype, torch.float32))
            given = uses @ router_probabilities(logits, scores)
            squares = uses @ squared_partition(logits)
        if self.open:
            self.loads[layer] = loads(chosen, self.uses, logits.shape[-1])
            self.given[layer] = given.detach().double()
            self.squares[layer] = squares.detach().double()
        if terms is None or not torch.is_grad_enabled() or not terms.tokens:
            return None
        added = squares * (terms.z / terms.tokens)
        if terms.shares is not None:
            shares = terms.shares[layer].to(given.dtype)
            added = added + (shares @ given) * (len(shares) * terms.balance / terms.tokens)
        return added


class Choosing(TorchFunctionMode):
    """Within, a router's choice of experts `[tokens, k]` is the one that is given.

    The choice is its one search for the largest k of all experts' scores; -1 leaves a token's to
    it. Weights are made of the scores of what was chosen, and have their gradients.
    """

    def __init__(self, chosen: Tensor) -> None:
        super().__init__()
        self.chosen = chosen
        self.choices = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        """What a function of torch makes; of that search what is given."""
        made = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or made.indices.shape != self.chosen.shape:
            return made
        self.choices += 1
        chosen = torch.where(self.chosen < 0, made.indices, self.chosen)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))


class Attach(torch.autograd.Function):
    """`x` itself, whose backward also follows a scalar that is added to the loss.

    The scalar's gradient begins with the layer's own, so that whoever fetches a layer's weights for
    its backward has them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scalar: Tensor) -> Tensor:
        """`x`."""
        ctx.save_for_backward(scalar)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient itself, and one for the scalar."""
        (scalar,) = ctx.saved_tensors
        return grad, torch.ones_like(scalar)
