"""Log-probs, entropies, values and optimizer steps of one model, on packed micro-batches.

A batch is cut into micro-batches of bounded tokens; gradients of micro-batches add up, so a
loss must already be scaled by the count of the whole batch. This file knows no algorithm: the
loss is a function that it is given.
"""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from rlflow.batch import Batch, lengths, prompt_groups, select_rows
from rlflow.contract.engines import OptimizerSpec, RouterSpec
from rlflow.contract.progress import advance
from rlflow.contract.values import LossFunction, Shard, StepResult, Temperature
from rlflow.engines.hf.forward.ahead import PackedRows, PackingAhead
from rlflow.engines.hf.forward.attention import PackedAttention
from rlflow.engines.hf.forward.head import Predictor
from rlflow.engines.hf.forward.token_scores import token_scores, widen
from rlflow.engines.hf.forward.vocabulary import CHOSEN, SUMS, TOP, distributions
from rlflow.engines.hf.microbatches import (
    WantedOutputs,
    add_metrics,
    blank_outputs,
    cut_by_tokens,
    half_of_largest,
    in_batch_order,
    numbers_of,
    one_token,
    ran_out,
)
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.optim.adamw import AdamWState
from rlflow.engines.hf.optim.kinds import WHOLE, Kinds, optimizer_kind
from rlflow.engines.hf.routing.following import FollowedRouters
from rlflow.engines.hf.routing.replays import PROMPTS, RESPONSES
from rlflow.errors import Finding, RunError
from rlflow.graph.fields import PIXELS
from rlflow.modelfiles.chunks import CHUNK_BYTES
from rlflow.modelfiles.widths import length_finding

Computed = TypeVar("Computed")
SCORES = ("log_probs", "entropy")
EXPERTS = {PROMPTS, RESPONSES}
OUTPUTS = {"lm": (*SCORES, *SUMS, *TOP, *CHOSEN, PROMPTS, RESPONSES), "value": ("values",)}


class TrainEngine:
    """Computes with `model`, and updates it if there is an optimizer.

    `micro_tokens` bounds the tokens of one forward pass; a single row may exceed it. None
    takes every batch in one pass. Distributions are made in chunks of tokens that hold at most
    `chunk_bytes`; None makes them all at once on a CPU, and in chunks of `CHUNK_BYTES` on an
    accelerator. A model without a `predictor` makes them all at once anywhere. The state of a
    `visiting` optimizer stays on the host. Micro-batches are packed `ahead` by a thread beside, on
    CUDA where nothing is said. `router` says how the routers of a mixture of experts are trained.
    """

    steps_with: Kinds = WHOLE
    # Whether micro-batches may become smaller here without a word to anybody else.
    alone = True
    alike = 1

    def __init__(
        self,
        model: TorchModel,
        optimizer: OptimizerSpec | None,
        *,
        micro_tokens: int | None,
        chunk_bytes: int | None = None,
        visiting: bool = False,
        ahead: bool | None = None,
        router: RouterSpec | None = None,
    ) -> None:
        self.model = model
        self.routers = FollowedRouters(model, router, self.total_of_rows, self.alike)
        on_cpu = model.device.type == "cpu"
        self.packing = PackingAhead(
            model.device, beside=ahead, shared=model.shared_rows, sight=model.sight
        )
        self.chunk_bytes = CHUNK_BYTES if chunk_bytes is None and not on_cpu else chunk_bytes
        self.optimizer = None
        if optimizer is not None:
            steps_with = self.steps_with[optimizer_kind(optimizer)]
            self.optimizer = steps_with(model, optimizer, visiting=visiting)
        self.micro_tokens = self.planned_tokens = micro_tokens

    @torch.no_grad()
    def forward(
        self,
        batch: Batch,
        *,
        outputs: Collection[str],
        temperature: Temperature,
        top_k: int = 0,
    ) -> dict[str, Tensor]:
        """Per response token in the batch's order: flat float32 `[total]`, on the CPU.

        `outputs` names log_probs, entropy (nats), values, or what `vocabulary.distributions`
        makes, with `top_k` and the batch's `top_ids`; none of them runs the layers alone. A value
        belongs to the state before its token. Log-probs and entropy are of log_softmax(logits /
        temperature), for several temperatures `[total, temperatures]`; of experts that tokens chose
        see `routing.replays`.
        float64 models give float64. Raises RunError while the model is asleep.
        """

        def computed() -> dict[str, Tensor]:
            return self.forward_parts(batch, outputs, temperature, top_k)

        return self.in_less_memory(batch, computed)

    def forward_parts(
        self, batch: Batch, outputs: Collection[str], temperature: Temperature, top_k: int
    ) -> dict[str, Tensor]:
        """The outputs of a batch, from a pass over each of its micro-batches."""
        parts = list(self.micro_batches(batch))
        passes = self.passes(len(parts))
        computed = []
        for _, micro in self.packing.over(parts):
            computed.append(self.compute(micro, outputs, temperature, top_k))
            advance(1, "micro-batches")
        for _ in range(len(parts), passes):
            self.fill(batch, outputs, temperature, top_k)
        found = in_batch_order(batch, [rows for rows, _ in parts], computed)
        return self.told(found, batch, WantedOutputs(tuple(outputs), temperature, top_k))

    def told(
        self, found: dict[str, Tensor], batch: Batch, asked: WantedOutputs
    ) -> dict[str, Tensor]:
        """The outputs of a batch, of what was found here of them."""
        return found

    def passes(self, own: int) -> int:
        """How many passes a model makes here where so many are of its own rows."""
        return own

    def step(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        *,
        outputs: Collection[str],
        temperature: float,
        max_grad_norm: float | None,
    ) -> StepResult:
        """Make one optimizer step on the sum of the micro-batches' losses.

        `loss_fn(outputs, micro)` gets flat tensors with gradient, row lengths in
        `micro["response_tokens"]`, and returns a 0-d loss and 0-d metrics. Metrics add up over
        micro-batches, those named `*_max` take the largest; `loss` joins them. If the loss or
        the gradient's norm is not finite, nothing changes and `applied` is false. Raises
        RunError without an optimizer or while asleep.
        """

        def summed() -> dict[str, float]:
            return self.sum_gradients(batch, loss_fn, outputs, temperature)

        return self.finish(self.in_less_memory(batch, summed), max_grad_norm)

    def sum_gradients(
        self, batch: Batch, loss_fn: LossFunction, outputs: Collection[str], temperature: float
    ) -> dict[str, float]:
        """Add up the gradients of all micro-batches, from zero; their metrics."""
        optimizer = self.require_optimizer()
        self.routers.begin(batch, self.count_routing)
        optimizer.zero_grad()
        total: dict[str, Tensor] = {}
        for _, micro in self.packing.over(self.micro_batches(batch)):
            with torch.enable_grad():
                loss, metrics = loss_fn(self.compute(micro, outputs, temperature), micro)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.accumulate()
            add_metrics(total, {"loss": loss, **metrics})
            advance(1, "micro-batches")
        return numbers_of(total)

    def in_less_memory(self, batch: Batch, compute: Callable[[], Computed]) -> Computed:
        """What `compute()` makes of a batch; where it runs out of memory, of one that is cut finer.

        The largest micro-batch is cut in two, from then on; gradients are those of the batch for
        every cut. Raises the error where ranks would have to cut alike, and where a single row has
        no room.
        """
        while True:
            try:
                return compute()
            except (MemoryError, RuntimeError) as error:
                finer = self.finer_cut(batch) if self.alone and ran_out(error) else None
                if finer is None:
                    raise
                traceback.clear_frames(error.__traceback__)
            self.release_gradients()
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()
            self.micro_tokens = finer
            warnings.warn(
                f"{self.model.name}: out of memory; micro-batches have {finer} tokens at most from "
                f"here on. micro_tokens={finer} in rf.on plans them so",
                stacklevel=2,
            )

    def finer_cut(self, batch: Batch) -> int | None:
        """Tokens of a micro-batch that cut the largest one of a batch in two, if anything does."""
        prompts, responses = batch["prompt_tokens"], batch["response_tokens"]
        groups = prompt_groups(prompts, batch.get(PIXELS, None))
        sizes = lengths(prompts).numpy(), lengths(responses).numpy()
        return half_of_largest(groups, *sizes, self.micro_tokens)

    def finish(self, metrics: dict[str, float], max_grad_norm: float | None) -> StepResult:
        """Update the weights with the gradients of the whole batch, if all is finite."""
        optimizer = self.require_optimizer()
        metrics = self.routers.end(metrics)
        norm = float(optimizer.grad_norm())
        applied = math.isfinite(norm) and math.isfinite(metrics.get("loss", 0.0))
        if applied:
            clip = max_grad_norm is not None and norm > max_grad_norm
            with self.routers.corrected():
                optimizer.step(max_grad_norm / norm if clip and max_grad_norm is not None else 1.0)
            self.model.version += 1
        return StepResult(metrics=metrics, grad_norm=norm, applied=applied)

    def compute(
        self, batch: Batch, outputs: Collection[str], temperature: Temperature, top_k: int = 0
    ) -> dict[str, Tensor]:
        """One forward pass; with gradient where that is enabled."""
        self.require_outputs(outputs)
        self.model.require_ready()
        packed = self.packing.rows(batch)
        layout, records = packed.layout, not EXPERTS.isdisjoint(outputs)
        asked = WantedOutputs(tuple(n for n in outputs if n not in EXPERTS), temperature, top_k)
        self.require_context(layout.longest)
        if not layout.predictions:
            none = blank_outputs(batch, asked, 0, device=self.model.device)
            return none | (self.routers.unread(batch) if records else {})
        in_chunks = self.chunk_bytes is not None and self.model.predictor is not None
        scored = self.in_chunks if in_chunks and asked.outputs else self.at_once
        with self.routers.attention(layout, batch, records=records) as attention:
            attention.pictures = packed.pictures
            found = scored(packed, attention, asked)
        if (shared := self.model.shared_rows) is not None:
            found = {name: shared.joined(values, layout) for name, values in found.items()}
        return found | (self.routers.recorded(attention, batch) if records else {})

    def at_once(
        self, packed: PackedRows, attention: PackedAttention, asked: WantedOutputs
    ) -> dict[str, Tensor]:
        """The outputs of one pass, with the logits of all of its tokens; without any, no head."""
        layout, outputs, temperature = packed.layout, asked.outputs, asked.temperature
        keep = layout.targets if outputs else layout.targets[:1]
        logits = self.model.logits(layout.tokens, layout.positions, attention, keep)
        if not outputs:
            return {}
        if len(logits) > layout.predictions:
            logits = logits[: layout.predictions]
        if self.model.head == "value":
            return {"values": widen(logits[:, 0])}
        found: dict[str, Tensor] = {}
        tokens, with_entropy = packed.responses, "entropy" in outputs
        if isinstance(temperature, tuple):
            scores = [token_scores(logits, tokens, t, with_entropy) for t in temperature]
            return {name: torch.stack([one[name] for one in scores], -1) for name in outputs}
        if not set(outputs).isdisjoint(SCORES):
            found = token_scores(logits, tokens, temperature, with_entropy)
        found |= distributions(logits, outputs, temperature, asked.top_k, packed.ids)
        return {name: found[name] for name in outputs}

    def in_chunks(
        self, packed: PackedRows, attention: PackedAttention, asked: WantedOutputs
    ) -> dict[str, Tensor]:
        """The same, of a language model's head on a few tokens at a time."""
        limit, layout, outputs = self.chunk_bytes, packed.layout, asked.outputs
        temperature, several = asked.temperature, isinstance(asked.temperature, tuple)
        assert limit is not None
        given = temperature if isinstance(temperature, tuple) else (temperature,)

        def compute(predictor: Predictor, hidden: Tensor) -> dict[str, Tensor]:
            hidden = hidden[: layout.predictions]
            tokens, ids = packed.responses, packed.ids
            return predictor.scores(hidden, tokens, ids, outputs, given, asked.top_k, limit)

        found: dict[str, Tensor] = self.model.predicted(
            layout.tokens, layout.positions, attention, layout.targets, compute
        )
        if not several:
            found |= {name: found[name][:, 0] for name in SCORES if name in found}
        return {name: found[name] for name in outputs}

    def fill(
        self, like: Batch, outputs: Collection[str], temperature: Temperature, top_k: int = 0
    ) -> dict[str, Tensor]:
        """A pass that is nobody's rows, which ranks make where others have some."""
        with self.routers.filling():
            return self.compute(one_token(like), outputs, temperature, top_k)

    def count_routing(self, batch: Batch) -> None:
        """Let routers see what all rows of a batch choose."""
        with torch.no_grad():
            self.forward(batch, outputs=(), temperature=1.0)

    def total_of_rows(self, values: Tensor) -> Tensor:
        """A tensor added up over all who have other rows of a batch, `alike` of them the same."""
        return values

    def micro_batches(self, batch: Batch) -> Iterator[tuple[Tensor | None, Batch]]:
        """Rows int64 and the micro-batch of them; None and the batch where it is not cut."""
        prompts, responses = batch["prompt_tokens"], batch["response_tokens"]
        if self.micro_tokens is None:
            yield None, batch
            return
        groups = prompt_groups(prompts, batch.get(PIXELS, None))
        cuts = cut_by_tokens(
            groups, lengths(prompts).numpy(), lengths(responses).numpy(), self.micro_tokens
        )
        if len(cuts) <= 1:
            yield None, batch
            return
        for cut in cuts:
            rows = torch.from_numpy(cut)
            yield rows, select_rows(batch, rows)

    def require_outputs(self, outputs: Collection[str]) -> None:
        """Raise RunError for an output that the model's head does not give."""
        known = OUTPUTS[self.model.head]
        for name in outputs:
            if name not in known:
                raise RunError(
                    Finding(
                        code="E510",
                        what=f"model {self.model.name!r} has no output {name!r}",
                        got=f"a model with a {self.model.head!r} head",
                        expected=", ".join(known),
                    )
                )

    def require_context(self, longest: int) -> None:
        """Raise RunError for rows longer than the model's context."""
        what = f"a row is longer than the context of model {self.model.name!r}"
        got, context = f"{longest} tokens", self.model.context or 0
        found = length_finding(what, got, longest, 0, context)
        if found is not None:
            raise RunError(found)

    def require_optimizer(self) -> AdamWState:
        """The optimizer; RunError where there is none or it sleeps."""
        if self.optimizer is None:
            what = f"model {self.model.name!r} has no optimizer, so it cannot be updated"
            raise RunError(
                Finding(code="E514", what=what, fix="rf.Model(..., optimizer=rf.AdamW(lr=1e-4))")
            )
        self.model.require_ready()
        self.optimizer.require_awake()
        return self.optimizer

    def adapters_off(self) -> AbstractContextManager[None]:
        """Score as the model that adapters were added to, within the block."""
        return self.model.adapters_off()

    def saved_weights(self) -> dict[str, Shard]:
        """What training changes, where it is: of lower weights their float32 copies alone."""
        masters = {} if self.optimizer is None else self.optimizer.saved_masters()
        return self.model.resting(self.model.trained_names() - masters.keys()) | masters

    def optimizer_meta(self) -> dict[str, int]:
        """What belongs to that state and is no tensor; plain JSON."""
        return {} if self.optimizer is None else {"steps": self.optimizer.steps}

    def release_gradients(self) -> None:
        """Give back the memory of the gradients; the next step takes it again."""
        if self.optimizer is not None:
            self.optimizer.release_gradients()

    def sleep_optimizer(self) -> None:
        """Move the optimizer's state to the host and free the gradients."""
        if self.optimizer is not None:
            self.optimizer.sleep()

    def wake_optimizer(self) -> None:
        """Bring the optimizer's state back."""
        if self.optimizer is not None:
            self.optimizer.wake()
