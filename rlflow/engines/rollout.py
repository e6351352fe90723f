"""Generation: every prompt prefilled once for its samples, rows dropped when they end.

A sample's tokens depend on the weights, its prompt and its own random numbers, which come of
(seed, iteration, stream, sample id, position). This file knows neither rewards nor updates.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from rlflow.batch import lengths, ragged
from rlflow.engines.attention import DecodeAttention, PackedAttention
from rlflow.engines.cache import KeyValueCache
from rlflow.engines.models import TorchModel
from rlflow.engines.packed import pack_prompts
from rlflow.engines.protocol import Generation, SampleKey, Sampling, SleepMode
from rlflow.engines.rng import uniforms
from rlflow.engines.sampling import choose
from rlflow.errors import Finding, RunError

# Random numbers are drawn for this many positions at a time.
DRAWN = 64


class Responses:
    """The rows of one generation as they grow; live rows stand in the cache's order."""

    def __init__(
        self, sampling: Sampling, key: SampleKey, ids: Tensor, device: torch.device
    ) -> None:
        rows = len(ids)
        self.sampling = sampling
        self.key = key
        self.ids = ids.cpu().numpy().astype(np.int64)
        self.stops = torch.tensor(sampling.stop_tokens, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(rows, sampling.max_new_tokens, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(self.tokens.shape, dtype=torch.float32, device=device)
        self.sizes = torch.zeros(rows, dtype=torch.int64, device=device)
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self.live = torch.arange(rows, device=device)
        self.drawn = torch.zeros(rows, 0, dtype=torch.float64, device=device)

    def uniform(self, position: int) -> Tensor:
        """The random numbers of the live rows at a position, float64 `[live]`."""
        if self.sampling.temperature == 0:
            return self.drawn.new_zeros(len(self.live))
        if position % DRAWN == 0:
            count = min(DRAWN, self.sampling.max_new_tokens - position)
            key = self.key
            drawn = uniforms(key.seed, key.iteration, key.stream, self.ids, count, first=position)
            self.drawn = torch.from_numpy(drawn).to(self.live.device)
        return self.drawn[self.live, position % DRAWN]

    def add(self, position: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token of every live row; the tokens and which rows go on."""
        tokens, log_probs = self.choose(logits, self.uniform(position))
        self.tokens[self.live, position] = tokens
        self.log_probs[self.live, position] = log_probs
        self.sizes[self.live] = position + 1
        ended = (tokens[:, None] == self.stops).any(-1)
        self.finished[self.live] = ended
        return tokens, ~ended

    def choose(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the live rows and their log-probs; see `sampling.choose`."""
        return choose(logits, uniform, self.sampling)

    def result(self) -> Generation:
        """The rows as ragged fields, on the CPU."""
        sizes = self.sizes.cpu()
        columns = torch.arange(self.tokens.shape[1])
        used = columns[None, :] < sizes[:, None]
        return Generation(
            response_tokens=ragged(self.tokens.cpu()[used], sizes),
            log_probs=ragged(self.log_probs.cpu()[used], sizes),
            finished=self.finished.cpu(),
        )


class TorchRollout:
    """Generates with `model`, which may be the one being trained."""

    def __init__(self, model: TorchModel) -> None:
        self.model = model
        self._abort = threading.Event()
        self._stats = {"prompt_tokens": 0.0, "new_tokens": 0.0, "decode_passes": 0.0}

    def generate(
        self, prompts: Tensor, sampling: Sampling, key: SampleKey, sample_ids: Tensor
    ) -> Generation:
        """Draw `sampling.n` responses to each of `prompts` (ragged int64 `[prompts, j]`).

        Rows are prompt-major: row p * n + s is sample s of prompt p, and `sample_ids` int64
        `[prompts * n]` names each. Log-probs are of the whole distribution at the sampling
        temperature. Raises RunError for a prompt that leaves no room for `max_new_tokens` in
        the model's context, and while the model is asleep.
        """
        self._abort.clear()
        self.model.require_ready()
        sizes = lengths(prompts)
        self.require_room(sizes, sampling)
        with torch.inference_mode():
            responses = self.responses(sampling, key, sample_ids)
            if len(sample_ids):
                self.run(prompts, sizes, responses)
        self._stats["prompt_tokens"] += float(sizes.sum())
        self._stats["new_tokens"] += float(responses.sizes.sum())
        return responses.result()

    def responses(self, sampling: Sampling, key: SampleKey, sample_ids: Tensor) -> Responses:
        """Rows without tokens."""
        return Responses(sampling, key, sample_ids, self.model.device)

    def stopped(self) -> bool:
        """Whether the generation in flight was aborted."""
        return self._abort.is_set()

    def run(self, prompts: Tensor, sizes: Tensor, responses: Responses) -> None:
        """Prefill, then decode until every row has ended or is at its limit."""
        sampling = responses.sampling
        layout = pack_prompts(prompts, self.model.device)
        cache = KeyValueCache(sizes, sampling.n, sampling.max_new_tokens, self.model.device)
        state = PackedAttention(layout, cache)
        logits = self.model.logits(layout.tokens, layout.positions, state, layout.targets)
        logits = logits[: layout.predictions].repeat_interleave(sampling.n, 0)
        decode = DecodeAttention(cache)
        for position in range(sampling.max_new_tokens):
            tokens, going = responses.add(position, logits)
            if position + 1 == sampling.max_new_tokens or self.stopped():
                return
            if not bool(going.all()):
                places = cache.keep(going)
                responses.live, tokens = responses.live[places], tokens[places]
            if not len(tokens):
                return
            cache.advance()
            filled = nn.functional.pad(tokens, (0, cache.rows - len(tokens)))
            logits = self.model.logits(filled, cache.lengths + position, decode, None)
            logits = logits[: len(tokens)]
            self._stats["decode_passes"] += 1

    def require_room(self, sizes: Tensor, sampling: Sampling) -> None:
        """Raise RunError, naming the longest prompt, where one does not fit."""
        context = self.model.context
        if context is None or not len(sizes):
            return
        longest = int(sizes.argmax())
        size = int(sizes[longest])
        if size + sampling.max_new_tokens > context:
            raise RunError(
                Finding(
                    code="E505",
                    what=f"prompt {longest} is too long for model {self.model.name!r}",
                    got=f"{size} prompt tokens + {sampling.max_new_tokens} new tokens",
                    expected=f"at most {context}, the model's context",
                    fix=f"max_new_tokens={context - size}" if size < context else "",
                )
            )

    def update_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy new weights in place; see `TorchModel.load_tensors`."""
        self.model.load_tensors(tensors, version)

    def sleep(self, mode: SleepMode = "offload") -> None:
        """Free the device memory of the weights; a cache lives only within `generate`."""
        self.model.sleep(mode)

    def wake(self) -> None:
        """Bring the memory of the weights back."""
        self.model.wake()

    def abort(self) -> None:
        """Stop the generation now in flight after its current token, from any thread."""
        self._abort.set()

    def stats(self) -> Mapping[str, float]:
        """Counters since the engine was made."""
        return dict(self._stats)
