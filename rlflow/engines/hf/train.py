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
from rlflow.engines.hf.forward.vocabulary import distributions
from rlflow.engines.hf.microbatches import (
    EXPERTS,
    SCORES,
    WantedOutputs,
    add_metrics,
    blank_outputs,
    cut_by_tokens,
    half_of_largest,
    in_batch_order,
    numbers_of,
    one_token,
    ran_out,
    require_outputs,
)
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.optim.adamw import AdamWState
from rlflow.engines.hf.optim.kinds import WHOLE, Kinds, optimizer_kind
from rlflow.engines.hf.routing.following import FollowedRouters
from rlflow.errors import Finding, RunError
from rlflow.graph.fields import PIXELS
from rlflow.modelfiles.chunks import CHUNK_BYTES

Computed = TypeVar("Computed")


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
            kind = optimizer_kind(optimizer)
            self.optimizer = self.steps_with[kind](model, optimizer, visiting=visiting)
        self.micro_tokens = self.planned_tokens = micro_tokens
        self.adding = False  # Whether gradients are there that further rows may add to.

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
        metrics = self.accumulate(batch, loss_fn, outputs=outputs, temperature=temperature)
        return self.finish(metrics, max_grad_norm)

    def accumulate(
        self,
        batch: Batch,
        loss_fn: LossFunction,
        *,
        outputs: Collection[str],
        temperature: float,
        goes_on: bool = False,
    ) -> dict[str, float]:
        """Add up the gradients of some rows of a step, as `step` does; their metrics.

        They begin from zero, or `goes_on` with those of the rows before; `finish` makes the step.
        Where memory runs out only the first rows are cut finer: others are added to by then.
        """

        def summed() -> dict[str, float]:
            if not goes_on:
                self.routers.begin(batch, self.count_routing)
                self.require_optimizer().zero_grad()
            return self.sum_gradients(batch, loss_fn, outputs, temperature)

        if goes_on:
            assert self.adding, f"gradients of {self.model.name} that others add to are gone"
            return summed()
        self.adding = False
        metrics = self.in_less_memory(batch, summed)
        self.adding = True
        return metrics

    def sum_gradients(
        self, batch: Batch, loss_fn: LossFunction, outputs: Collection[str], temperature: float
    ) -> dict[str, float]:
        """Add the gradients of all micro-batches to those that are there; their metrics."""
        optimizer = self.require_optimizer()
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
            if not self.adding:
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

    def finish(
        self, metrics: dict[str, float], max_grad_norm: float | None, scale: float = 1.0
    ) -> StepResult:
        """Update the weights with `scale` times the gradients of all rows, if all is finite."""
        optimizer = self.require_optimizer()
        self.adding = False
        self.join_gradients()
        metrics = self.routers.end(metrics)
        norm = float(optimizer.grad_norm()) * scale
        applied = math.isfinite(norm) and math.isfinite(metrics.get("loss", 0.0))
        if applied:
            if max_grad_norm is not None and norm > max_grad_norm:
                scale *= max_grad_norm / norm
            with self.routers.corrected():
                optimizer.step(scale)
            self.model.version += 1
        return StepResult(metrics=metrics, grad_norm=norm, applied=applied)

    def join_gradients(self) -> None:
        """Add up, once a step, what several ranks have of a gradient; here it is all in one."""

    def compute(
        self, batch: Batch, outputs: Collection[str], temperature: Temperature, top_k: int = 0
    ) -> dict[str, Tensor]:
        """One forward pass; with gradient where that is enabled."""
        require_outputs(outputs, self.model.name, self.model.head)
        self.model.require_ready()
        packed = self.packing.rows(batch)
        layout, records = packed.layout, not EXPERTS.isdisjoint(outputs)
        asked = WantedOutputs(tuple(n for n in outputs if n not in EXPERTS), temperature, top_k)
        self.model.require_context(layout.longest)
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
        self.adding = False
        if self.optimizer is not None:
            self.optimizer.release_gradients()

    def sleep_optimizer(self) -> None:
        """Move the optimizer's state to the host and free gradients that no rows add to."""
        if self.optimizer is not None:
            self.optimizer.sleep(keeps_gradients=self.adding)

    def wake_optimizer(self) -> None:
        """Bring the optimizer's state back."""
        if self.optimizer is not None:
            self.optimizer.wake()
