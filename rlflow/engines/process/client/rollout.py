"""Generation by an SGLang engine: prompts and answers are tokens, never text.

All rows of a call are submitted at once and come back as they end. This file knows neither
processes nor how weights get to an engine.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import joined_rows, lengths, ragged_rows, select_field
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
from rlflow.engines.hf.generate.speculative import require_drafter
from rlflow.engines.process.client.link import LostError, PendingRequest, RefusedError
from rlflow.engines.process.client.model import EngineModel
from rlflow.engines.process.client.rows.answers import Rows, WrongAnswerError
from rlflow.engines.process.client.rows.in_rounds import Engine, InRounds
from rlflow.engines.process.sglang.experts import with_experts
from rlflow.engines.process.sglang.pictures import sent_pictures
from rlflow.errors import Finding, RunError
from rlflow.graph.user.speculative import slots
from rlflow.modelfiles.pictures.sights import Sight, sight_of
from rlflow.modelfiles.widths import length_finding

EVERYTHING = Reach()
# SGLang keeps so many tokens of its pool and of its context back.
KEPT_BACK = 8
LIKELIEST = 1e-9


class SGLangRollout:
    """Generates with the engine of `model`, SGLang or one that answers as it does.

    With `seeded` every sample has a seed of its own, which SGLang honours on accelerators in its
    deterministic mode; else what is drawn depends on what else is in a batch.
    """

    def __init__(self, model: EngineModel, *, seeded: bool = False) -> None:
        self.model = model
        self.seeded = seeded
        self._abort = threading.Event()
        counted = ("prompt_tokens", "new_tokens", "decode_passes", "cached_prompt_tokens")
        self._stats = dict.fromkeys((*counted, "drafted", "accepted"), 0.0)
        self._open: dict[SampleKey, Rows] = {}

    def generate(
        self,
        prompts: Tensor,
        sampling: Sampling,
        key: SampleKey,
        sample_ids: Tensor,
        reach: Reach = EVERYTHING,
        *,
        pictures: Pictures | None = None,
    ) -> Generation:
        """Draw `sampling.n` responses to each of `prompts` (ragged int64 `[prompts, j]`).

        Rows are prompt-major: row p * n + s is sample s of prompt p, and `sample_ids` int64
        `[prompts * n]` names each. Tokens of prompts may stand for `pictures`.
        Log-probs are of the whole distribution at the sampling temperature. Raises RunError for a
        prompt that leaves no room for `max_new_tokens` in the model's context or in the pool,
        while the model is asleep, and where the engine and its replacement were lost.
        """
        if not reach.piece:
            self._abort.clear()
        self.model.require_ready()
        rows = self._open.pop(key, None) if reach.piece else None
        if rows is None:
            rows = self._begun(prompts, sampling, key, sample_ids, reach, pictures)
        chosen = None
        with self._answering():
            if reach.pieces == 1:
                rows.run()
            else:
                chosen = rows.piece(reach, sampling.n)
        if reach.piece + 1 < reach.pieces:
            self._open[key] = rows
        self._require_version(rows)
        made = rows.result(chosen)
        if sampling.routing:
            made = with_experts(made, rows.experts, prompts, sampling.n, self.model)
        sizes = lengths(made.response_tokens)
        self._stats["new_tokens"] += float(sizes.sum())
        self._stats["decode_passes"] += float(sizes.max()) if len(sizes) else 0.0
        self._stats["cached_prompt_tokens"] += rows.cached
        self._stats["drafted"] += rows.drafted
        self._stats["accepted"] += rows.accepted
        rows.cached = rows.drafted = rows.accepted = 0
        return made

    def advance(self, rows: InFlight, sampling: Sampling, key: SampleKey) -> Advanced:
        """Go on with rows in flight: all of them, or of several replicas those that are dealt here.

        Once enough groups are complete the others are ended, and come back with what they have; so
        are rows that move to another replica, which reads anew what they have seen.
        Raises what `generate` raises.
        """
        self._abort.clear()
        self.model.require_ready()
        if len(rows.ids):
            self._require_room(lengths(rows.seen) - rows.made, sampling, EVERYTHING)
        single = replace(sampling, n=1)
        own: list[dict[str, int]] = []
        for draw, sample in zip(rows.draws.tolist(), rows.ids.tolist(), strict=True):
            seed = seed_of(replace(key, iteration=draw), sample)
            own.append({"sampling_seed": seed} if self.seeded else {})

        def begin(some: Sequence[int], brought: Mapping[int, array[int]]) -> Rows:
            chosen = torch.tensor(some, dtype=torch.int64)
            had = ragged_rows([brought.get(row, ()) for row in some], torch.int64)
            seen = joined_rows(select_field(rows.seen, chosen), had)
            self._stats["prompt_tokens"] += float(lengths(seen).sum())
            left = (sampling.max_new_tokens - rows.made[chosen] - lengths(had)).tolist()
            ends = zip(some, left, strict=True)
            wanted = [{"max_new_tokens": most, **own[row]} for row, most in ends]
            return self._rows(seen, single, wanted, EVERYTHING, stream=True)

        engine = Engine(
            begin=begin,
            runs=self.model.replica.runs,
            stopped=self._abort.is_set,
            abort=self.abort,
        )
        flight = InRounds(rows, engine)
        with self._answering():
            made = flight.run()
        for asked in flight.asked:
            self._require_version(asked)
            self._stats["cached_prompt_tokens"] += asked.cached
        sizes = lengths(made.response_tokens)
        self._stats["new_tokens"] += float(sizes.sum())
        self._stats["decode_passes"] += float(sizes.max()) if len(sizes) else 0.0
        return made

    def _begun(
        self,
        prompts: Tensor,
        sampling: Sampling,
        key: SampleKey,
        sample_ids: Tensor,
        reach: Reach,
        pictures: Pictures | None,
    ) -> Rows:
        """The rows of a generation that is to begin."""
        if reach.piece:
            raise AssertionError(f"piece {reach.piece} of a generation that has not begun")
        if len(sample_ids):
            sizes = lengths(prompts)
            self._require_room(sizes, sampling, reach)
            if self.model.draft is not None:
                require_drafter(self.model.draft, self.model, sizes, sampling, reach)
            self._stats["prompt_tokens"] += float(sizes.sum())
        seeds: list[dict[str, int]] = [
            {"sampling_seed": seed_of(key, number)} if self.seeded else {}
            for number in sample_ids.tolist()
        ]
        streamed = reach.pieces > 1
        return self._rows(prompts, sampling, seeds, reach, stream=streamed, pictures=pictures)

    def _rows(
        self,
        prompts: Tensor,
        sampling: Sampling,
        own: list[dict[str, int]],
        reach: Reach,
        *,
        stream: bool,
        pictures: Pictures | None = None,
    ) -> Rows:
        """Rows to ask for, each with what is its `own`; with `stream` they come as they end."""
        common = parameters(sampling, reach)
        given = [array("q", row.tolist()).tobytes() for row in prompts.unbind()]
        fields = {
            "prompts": given,
            "sampling": common,
            "stream": stream,
            "version": self.model.version,
        }
        fields |= {"routing": True} if sampling.routing else {}
        if pictures is not None:
            fields["pictures"] = sent_pictures(self._sight, prompts, pictures)

        def ask(rows: list[int]) -> PendingRequest:
            link = self.model.replica.link()
            wanted = [(row, row // sampling.n, own[row]) for row in rows]
            call = link.ask("generate", {**fields, "rows": wanted}, numbered=True)
            if self._abort.is_set():
                link.ask("abort", {})
            return call

        return Rows(
            len(own),
            ask,
            stopped=self._abort.is_set,
            give_up=self.model.replica.lost,
            vocabulary=self.model.config.get_text_config().vocab_size,
            most=lambda row: int({**common, **own[row]}["max_new_tokens"]),
        )

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Within it, an engine that refuses, or that answers what cannot be, is a RunError."""
        try:
            yield
        except RefusedError as error:
            raise self.model.refused("generate", error) from error
        except WrongAnswerError as error:
            raise RunError(
                Finding(
                    code="E592",
                    what=f"the engine of {self.model.name!r} answered what cannot be",
                    got=str(error),
                    expected="of every row once: its tokens, and a log-prob of each",
                )
            ) from error

    @cached_property
    def _sight(self) -> Sight:
        """How the model sees pictures, by what the engine reads of it."""
        directory = Path(self.model.replica.launch.directory, "model")
        found = sight_of(directory, self.model.config.to_dict())
        assert found is not None
        return found

    def _require_room(self, sizes: Tensor, sampling: Sampling, reach: Reach) -> None:
        """Raise RunError, naming the longest prompt, where one does not fit."""
        longest = int(sizes.argmax())
        size = int(sizes[longest]) - reach.first
        new = sampling.max_new_tokens
        what = f"prompt {longest} is too long for model {self.model.name!r}"
        got = f"{size} prompt tokens + {new} new tokens"
        found = length_finding(what, got, size, new, self.model.context or 0)
        if found is not None:
            raise RunError(found)
        pool = int(self.model.replica.facts["pool_tokens"]) - KEPT_BACK - slots(self._verified())
        if size + new > pool:
            raise RunError(
                Finding(
                    code="E589",
                    what=f"prompt {longest} is too long for the pool of {self.model.name!r}",
                    got=got,
                    expected=f"at most {pool}, what the engine's pool of keys and values holds",
                    fix=f"{self.model.replica.launch.options.spelled()}(max_total_tokens=...)",
                )
            )

    def _verified(self) -> int:
        """Tokens of a row that the engine verifies a turn; none where nothing drafts."""
        if self.model.draft is not None:
            return self.model.draft.tokens + 1
        said = getattr(self.model.replica.launch.options, "speculative", None)
        return 0 if said is None else int(said.verified)

    def _require_version(self, rows: Rows) -> None:
        """Raise RunError where a row says that other weights have made it."""
        other = rows.versions - {str(self.model.version)}
        if other:
            raise RunError(
                Finding(
                    code="E586",
                    what=f"the engine of {self.model.name!r} generates with other weights",
                    got=f"version {', '.join(sorted(other))}",
                    expected=f"version {self.model.version}",
                )
            )

    def update_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Copy new weights to the engine; see `EngineModel.load_tensors`."""
        self.model.load_tensors(tensors, version)

    def sleep(self, mode: SleepMode = "offload") -> None:
        """Free the device memory of the pool and of the weights."""
        self.model.sleep_pool()
        self.model.sleep(mode)

    def wake(self) -> None:
        """Bring the memory of the weights and of the pool back."""
        self.model.wake()
        self.model.wake_pool()

    def abort(self) -> None:
        """Stop the generation now in flight, from any thread."""
        self._abort.set()
        link = self.model.replica.present()
        if link is not None:
            with suppress(LostError):
                link.ask("abort", {})

    def stats(self) -> Mapping[str, float]:
        """Counters since the engine was made; prompt tokens too that the cache has given.

        `drafted` are all tokens that a drafter has proposed, those after the end of a row too.
        """
        return dict(self._stats)


def parameters(sampling: Sampling, reach: Reach) -> dict[str, Any]:
    """SGLang's sampling parameters.

    It takes `top_k=1` for greedy, and then leaves the temperature out of log-probs; a nucleus
    of the likeliest token alone it does not.
    """
    end = sampling.max_new_tokens
    one = sampling.top_k == 1
    if reach.until is not None:
        end = min(end, reach.until)
    return {
        "max_new_tokens": end - reach.first,
        "temperature": sampling.temperature,
        "top_p": LIKELIEST if one else sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k > 1 else -1,
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": not sampling.stop_tokens,
        "skip_special_tokens": False,
    }


def seed_of(key: SampleKey, sample: int) -> int:
    """A seed of one sample, below 2**31: it depends on nothing else."""
    words = f"{key.seed} {key.iteration} {key.stream} {sample}".encode()
    return int.from_bytes(hashlib.sha256(words).digest()[:4], "big") >> 1
