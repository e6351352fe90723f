"""The embedded rollout engine: it generates with a model that lies in this process.

Every prompt is prefilled once for its samples, rows are dropped when they end. This file
knows neither rewards nor updates.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from rlflow.batch import lengths
from rlflow.contract.pictures import Pictures
from rlflow.contract.values import (
    Advanced,
    Generation,
    InFlight,
    Reach,
    SampleKey,
    Sampling,
    SleepMode,
)
from rlflow.engines.hf.generate.continuous import ContinuousDecoding
from rlflow.engines.hf.generate.decoding import Decoding, PlainDecoding, Responses
from rlflow.engines.hf.generate.graphs import cuda_graphs
from rlflow.engines.hf.generate.paged_decoding import PagedDecoding
from rlflow.engines.hf.generate.speculative import Draft, SpeculativeDecoding, require_drafter
from rlflow.engines.hf.models import TorchModel
from rlflow.errors import RunError, UsageError
from rlflow.modelfiles.mixtures.routers import replay_finding
from rlflow.modelfiles.paging import MOST_ROWS
from rlflow.modelfiles.widths import length_finding

EVERYTHING = Reach()


class TorchRollout:
    """Generates with `model`, which may be the one being trained.

    `paged` says whether keys and values lie in a pool of blocks and the host looks at its rows
    every few tokens, as it does on CUDA devices where nothing is said; there steps are replayed
    from graphs, and at most `rows_at_once` rows decode together, or one prompt's. Otherwise each
    row has its columns and the host looks at every token, as it does where experts are recorded.
    """

    def __init__(
        self, model: TorchModel, *, paged: bool | None = None, rows_at_once: int = MOST_ROWS
    ) -> None:
        self.model = model
        self.rows_at_once = rows_at_once
        self.paged = model.device.type == "cuda" if paged is None else paged
        self._abort = threading.Event()
        names = ("prompt_tokens", "new_tokens", "decode_passes", "drafted", "accepted")
        self._stats = dict.fromkeys(names, 0.0)
        self._open: dict[SampleKey, Decoding] = {}

    def generate(
        self,
        prompts: Tensor,
        sampling: Sampling,
        key: SampleKey,
        sample_ids: Tensor,
        reach: Reach = EVERYTHING,
        draft: Draft | None = None,
        *,
        pictures: Pictures | None = None,
    ) -> Generation:
        """Draw `sampling.n` responses to each of `prompts` (ragged int64 `[prompts, j]`).

        Rows are prompt-major: row p * n + s is sample s of prompt p, and `sample_ids` int64
        `[prompts * n]` names each. Log-probs are of the whole distribution at the sampling
        temperature. Between the pieces of a `reach` the cache stays as it is, and the weights
        have to. With a `draft` the tokens are the same, in fewer passes of the model. Tokens of
        prompts may stand for `pictures`. Raises
        RunError for a prompt that leaves no room for `max_new_tokens` in the model's context,
        for a drafter that does not fit, and while a model is asleep.
        """
        if not reach.piece:
            self._abort.clear()
        self.model.require_ready()
        if not len(sample_ids):
            none = sample_ids.new_empty(0) if reach.pieces > 1 else None
            return self.responses(sampling, key, sample_ids, reach).result(none)
        with torch.inference_mode():
            decoding = self._open.pop(key, None) if reach.piece else None
            if decoding is None:
                decoding = self._begun(prompts, sampling, key, sample_ids, reach, draft, pictures)
            rows = None
            if reach.pieces == 1:
                decoding.run()
            else:
                rows = decoding.piece(reach)
                if reach.piece + 1 < reach.pieces:
                    self._open[key] = decoding
        made = decoding.responses.result(rows)
        self._stats["new_tokens"] += float(lengths(made.response_tokens).sum())
        for name, count in decoding.spent().items():
            self._stats[name] += count
        return made

    def advance(self, rows: InFlight, sampling: Sampling, key: SampleKey) -> Advanced:
        """Go on with rows in flight; each row has its columns, and the host looks at every token.

        Raises RunError for a prompt that leaves no room for its response in the model's context,
        and while the model is asleep.
        """
        self._abort.clear()
        self.model.require_ready()
        self.require_room(lengths(rows.seen) - rows.made, sampling, EVERYTHING)
        decoding = ContinuousDecoding(self.model, rows, sampling, key, self.stopped)
        made = decoding.run()
        self._stats["prompt_tokens"] += float(decoding.part.read)
        self._stats["new_tokens"] += float(lengths(made.response_tokens).sum())
        self._stats["decode_passes"] += float(decoding.part.passes)
        return made

    def _begun(
        self,
        prompts: Tensor,
        sampling: Sampling,
        key: SampleKey,
        sample_ids: Tensor,
        reach: Reach,
        draft: Draft | None,
        pictures: Pictures | None,
    ) -> Decoding:
        """A generation whose prompts are prefilled."""
        if reach.piece:
            raise AssertionError(f"piece {reach.piece} of a generation that has not begun")
        sizes = lengths(prompts)
        self.require_room(sizes, sampling, reach)
        if draft is not None and not draft.tokens:
            draft = None
        if draft is not None:
            require_drafter(draft.model, self.model, sizes, sampling, reach)
        self._stats["prompt_tokens"] += float(sizes.sum())
        responses = self.responses(sampling, key, sample_ids, reach)
        if sampling.routing:
            self.require_routers()
        if draft is None and self.paged and not sampling.routing:
            return self.paged_decoding(prompts, sizes, responses, pictures)
        if draft is None:
            return PlainDecoding(self.model, prompts, sizes, responses, self.stopped, pictures)
        return SpeculativeDecoding(self.model, draft, prompts, sizes, responses, self.stopped)

    def paged_decoding(
        self,
        prompts: Tensor,
        sizes: Tensor,
        responses: Responses,
        pictures: Pictures | None = None,
    ) -> PagedDecoding:
        """A generation on a pool of blocks, replayed from graphs where a device has them."""
        graphs = self.model.device.type == "cuda" and self.model.layers is None
        record = cuda_graphs() if graphs else None
        stopped, most = self.stopped, self.rows_at_once
        return PagedDecoding(
            self.model, prompts, sizes, responses, stopped, record, at_once=most, pictures=pictures
        )

    def responses(
        self, sampling: Sampling, key: SampleKey, sample_ids: Tensor, reach: Reach
    ) -> Responses:
        """Rows without tokens."""
        return Responses(sampling, key, sample_ids, reach, self.model.device)

    def stopped(self) -> bool:
        """Whether the generation in flight was aborted."""
        return self._abort.is_set()

    def require_room(self, sizes: Tensor, sampling: Sampling, reach: Reach) -> None:
        """Raise RunError, naming the longest prompt, where one does not fit."""
        if not len(sizes):
            return
        longest, new = int(sizes.argmax()), sampling.max_new_tokens
        size = int(sizes[longest]) - reach.first
        what = f"prompt {longest} is too long for model {self.model.name!r}"
        got = f"{size} prompt tokens + {new} new tokens"
        found = length_finding(what, got, size, new, self.model.context or 0)
        if found is not None:
            raise RunError(found)

    def require_routers(self) -> None:
        """Raise UsageError (E536) where the model's routers cannot be recorded."""
        kind = self.model.config.get_text_config().model_type
        found = replay_finding(self.model.name, kind)
        if found is not None:
            raise UsageError(found)

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
        """Counters since the engine was made, tokens drafted and accepted among them."""
        return dict(self._stats)
