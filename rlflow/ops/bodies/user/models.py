"""The model of a user's op, as its function sees it: `rf.Scorer`, `rf.Sampler`.

Rows go through the engine that holds the model, so layouts, sleeps and versions are those of the
plan. A response is drawn with the number of its row, so it is the same whatever part that is in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlflow.batch import make_batch, ragged_like, ragged_rows
from rlflow.errors import Finding, RunError
from rlflow.ops.bodies.common import (
    inputs_of,
    model_of,
    num_rows,
    row_numbers,
    token_rows,
    too_long,
    total_rows,
)
from rlflow.ops.bodies.rollout import as_texts, drawn
from rlflow.ops.body import Call


class Using:
    """The model of one call; it is both kinds, and an op's signature says which is meant."""

    def __init__(self, call: Call) -> None:
        self._call = call
        model = model_of(call)
        self._model = model.base if ("adapters", "off") in call.params.items() else model
        self._calls = 0

    def log_probs(
        self,
        prompts: Tensor | Sequence[str],
        responses: Tensor | Sequence[str],
        *,
        temperature: float = 1.0,
    ) -> Tensor:
        """See `rf.Scorer`."""
        return self._scored("log_probs", prompts, responses, temperature)

    def entropy(
        self,
        prompts: Tensor | Sequence[str],
        responses: Tensor | Sequence[str],
        *,
        temperature: float = 1.0,
    ) -> Tensor:
        """See `rf.Scorer`."""
        return self._scored("entropy", prompts, responses, temperature)

    def values(self, prompts: Tensor | Sequence[str], responses: Tensor | Sequence[str]) -> Tensor:
        """See `rf.Scorer`."""
        return self._scored("values", prompts, responses, 1.0)

    def generate(self, prompts: Sequence[str]) -> list[str]:
        """See `rf.Sampler`; each call of a function draws other random numbers."""
        texts = list(prompts)
        self._require_rows("prompts", len(texts))
        tokens = token_rows(self._call, self._model.tokenizer, texts, chat=False)
        options = drawn({"temperature": 1.0, **self._call.params})
        new, numbers = options["max_new_tokens"], row_numbers(self._call)
        too_long(self._call, tokens, texts, new, self._model.context, numbers.tolist())
        ids = numbers + self._calls * total_rows(self._call)
        self._calls += 1
        made = self._model.generate(tokens, ids, n=1, **options)
        return as_texts(self._model.tokenizer, made.response_tokens)

    def _scored(
        self,
        output: str,
        prompts: Tensor | Sequence[str],
        responses: Tensor | Sequence[str],
        temperature: float,
    ) -> Tensor:
        asked, said = self._tokens("prompts", prompts), self._tokens("responses", responses)
        batch = make_batch({"prompt_tokens": asked, "response_tokens": said}, self._rows)
        made = self._model.forward(batch, outputs=(output,), temperature=temperature)
        return ragged_like(made[output], said)

    @property
    def _rows(self) -> int:
        return num_rows(inputs_of(self._call))

    def _tokens(self, what: str, given: Tensor | Sequence[str]) -> Tensor:
        """Token fields as they are, texts as the model's tokenizer reads them."""
        if isinstance(given, Tensor):
            self._require_rows(what, len(given.offsets()) - 1 if given.is_nested else -1)  # type: ignore[attr-defined]
            return given
        texts = list(given)
        self._require_rows(what, len(texts))
        tokenizer = self._model.tokenizer
        if what == "prompts":
            return token_rows(self._call, tokenizer, texts, chat=False)
        rows = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return ragged_rows(rows, torch.int64)

    def _require_rows(self, what: str, count: int) -> None:
        """Raise RunError unless there is one of something for every row of the call."""
        if count == self._rows:
            return
        got = f"{count} {what}" if count >= 0 else f"{what} that are no ragged tokens, and no texts"
        raise RunError(
            Finding(
                code="E796",
                what=f"op {self._call.node} asks its model about other rows than it was given",
                where=self._call.where,
                got=f"{got}; the call has {self._rows} rows",
                expected="one prompt, and one response, for every row",
            )
        )
