"""The routers of a model over one optimizer step: statistics of all its rows, on all ranks.

The share of tokens that chose an expert is a factor of every token's gradient, so it has to be
known before the first backward: where there is a balance loss, the step's rows are forwarded once
before, without gradient and without the head. This file knows neither losses of a policy nor how a
batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rlflow.batch import Batch, lengths
from rlflow.contract.engines import RouterSpec
from rlflow.engines.hf.forward.packed import PackedLayout
from rlflow.engines.hf.routing.losses import imbalance
from rlflow.engines.hf.routing.passes import Pass, RouterTerms

Total = Callable[[Tensor], Tensor]
"""Adds up a tensor over the ranks that have other rows, or other tokens of them."""


class StepRouting:
    """What routers do in one optimizer step with a batch; `experts` a layer, of so many `layers`.

    `total` adds up over ranks, of which `alike` have the same rows: parts of their tokens, or of
    the layers, whose sums are zero for the others.
    Passes that are counted in `finish` are those of the step itself.
    """

    def __init__(
        self,
        spec: RouterSpec,
        batch: Batch,
        layers: int,
        experts: int,
        total: Total,
        alike: int = 1,
    ) -> None:
        self.spec = spec
        self.total = total
        self.shape = layers, experts
        own = torch.tensor(tokens_read(batch), dtype=torch.float64)
        self.tokens = float(total(own)) / alike
        self.shares: Tensor | None = None
        self._begin()

    def _begin(self) -> None:
        self.loads = torch.zeros(self.shape, dtype=torch.float64)
        self.given = torch.zeros(self.shape, dtype=torch.float64)
        self.squares = torch.zeros(self.shape[0], dtype=torch.float64)

    @property
    def counts_first(self) -> bool:
        """Whether the rows have to be forwarded once before the step."""
        return bool(self.spec.balance_coef)

    def follow(self, layout: PackedLayout, *, filling: bool) -> Pass:
        """A pass over rows, with the step's terms where it has a gradient.

        Rows that only fill up a pass count nothing.
        """
        spec, layers = self.spec, self.shape[0]
        terms = None
        if torch.is_grad_enabled() and (spec.balance_coef or spec.z_coef):
            shares = None if self.shares is None else self.shares.to(layout.tokens.device)
            terms = RouterTerms(
                balance=spec.balance_coef / layers,
                z=spec.z_coef / layers,
                tokens=self.tokens,
                shares=shares,
            )
        return Pass(uses=uses_of(layout, filling=filling), terms=terms)

    def took(self, done: Pass) -> None:
        """Take note of a pass that is over."""
        done.open = False
        for layer in done.loads:
            self.loads[layer] += done.loads[layer].cpu()
            self.given[layer] += done.given[layer].cpu()
            self.squares[layer] += done.squares[layer].cpu()

    def counted(self) -> None:
        """All rows were forwarded: fix the share of tokens that chose each expert."""
        shares = self.total(self.loads) / max(self.tokens, 1.0)
        if self.spec.balance_over == "model":
            shares = shares.mean(0, keepdim=True).expand(self.shape)
        self.shares = shares
        self._begin()

    def finish(self) -> dict[str, float]:
        """The step's metrics, over all rows of all ranks, and `loss`: what the terms add to it."""
        layers, experts = self.shape
        joined = torch.cat([self.loads.flatten(), self.given.flatten(), self.squares])
        size = layers * experts
        joined = self.total(joined)
        given, squares = joined[size : 2 * size], joined[2 * size :]
        self.loads = joined[:size].view(self.shape)
        apart = imbalance(self.loads)
        tokens = max(self.tokens, 1.0)
        of, mean = self.loads / tokens, given.view(self.shape) / tokens
        if self.spec.balance_over == "model":
            of, mean = of.mean(0, keepdim=True), mean.mean(0, keepdim=True)
        balance = float((of * mean).sum(-1).mean() * experts)
        z = float(squares.mean() / tokens)
        return {
            "loss": self.spec.balance_coef * balance + self.spec.z_coef * z,
            "balance_loss": balance,
            "z_loss": z,
            "expert_imbalance": float(apart.mean()),
            "expert_imbalance_max": float(apart.max()),
        }


def corrections(of_layers: Tensor, rate: float) -> Tensor:
    """What each expert's bias changes by, `[layers, experts]` for so many tokens that chose it.

    `rate * sign(mean - load)` (Wang et al., arXiv:2408.15664, algorithm 1).
    """
    return rate * (of_layers.mean(-1, keepdim=True) - of_layers).sign()


def tokens_read(batch: Batch) -> int:
    """Tokens that a model reads of rows, each by itself: all but the last of each response."""
    responses = lengths(batch["response_tokens"])
    read = lengths(batch["prompt_tokens"]) + responses - 1
    return int(read[responses > 0].sum())


def uses_of(layout: PackedLayout, *, filling: bool = False) -> Tensor:
    """How many rows each flat token is part of, float32 `[tokens]`; 0 of what only fills up."""
    found = np.zeros(len(layout.of_all.tokens), dtype=np.float32)
    rows = layout.rows
    if not filling and rows is not None:
        found += np.bincount(rows.path, minlength=len(found)).astype(np.float32)
        times = np.bincount(rows.row_group, minlength=len(rows.group_start))
        starts, sizes = rows.group_start, rows.prompt_length
        places = np.arange(int(sizes.sum())) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
        found[places] += np.repeat(times, sizes).astype(np.float32)
    return layout.taken(torch.from_numpy(found).to(layout.tokens.device), 0)
