"""What an op of a user's own may ask of a model: annotate its first parameter with one of these.

This file knows no engine that answers, and no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rlflow.graph.op import Use

if TYPE_CHECKING:
    from torch import Tensor


class Scorer(Protocol):
    """Scores rows with a model, without gradient; an op is given one. The model's use is `forward`.

    Prompts and responses are the fields `prompt_tokens` and `response_tokens`, or texts, which
    the model's tokenizer reads. A call takes one prompt and one response for every row, and
    returns one number a response token: ragged float32 `[rows, tokens]`.
    """

    def log_probs(
        self,
        prompts: Tensor | Sequence[str],
        responses: Tensor | Sequence[str],
        *,
        temperature: float = 1.0,
    ) -> Tensor:
        """The log-probability of each response token."""

    def entropy(
        self,
        prompts: Tensor | Sequence[str],
        responses: Tensor | Sequence[str],
        *,
        temperature: float = 1.0,
    ) -> Tensor:
        """The entropy of the distribution from which each response token was drawn, in nats."""

    def values(self, prompts: Tensor | Sequence[str], responses: Tensor | Sequence[str]) -> Tensor:
        """The value of the state before each response token, for a model with `head="value"`."""


class Sampler(Protocol):
    """Generates with a model; an op is given one. The model's use is `rollout`.

    The op needs a keyword-only option `max_new_tokens`. It may have `temperature`, `top_p` and
    `top_k`, which sampling then follows.
    """

    def generate(self, prompts: Sequence[str]) -> list[str]:
        """One response to each prompt. A call takes one prompt for every row."""


USES: dict[object, Use] = {Scorer: "forward", Sampler: "rollout"}
"""How a model is used, by what the parameter that stands for it is annotated with."""
