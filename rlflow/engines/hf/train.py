"""Log-probs, entropies, values and optimizer steps of one model, on packed micro-batches.

A batch is cut into micro-batches of bounded tokens; gradients of micro-batches add up, so a
loss must already be scaled by the count of the whole batch. This file knows no algorithm: the
loss is a function that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.batch import (
    Batch,
    column_index,
    flat,
    lengths,
    make_batch,
    ragged_like,
    ragged_rows,
    select_rows,
)
from rlflow.contract.engines import OptimizerSpec
from rlflow.contract.progress import advance
from rlflow.contract.values import LossFunction, Shard, StepResult, Temperature
from rlflow.engines.hf.forward.ahead import PackedRows, PackingAhead
from rlflow.engines.hf.forward.attention import PackedAttention
from rlflow.engines.hf.forward.head import Predictor
from rlflow.engines.hf.forward.packed import prompt_groups
from rlflow.engines.hf.forward.token_scores import token_scores, widen
from rlflow.engines.hf.forward.vocabulary import CHOSEN, IDS, SUMS, TOP, distributions
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.optim.adamw import AdamWState
from rlflow.engines.hf.optim.kinds import WHOLE, Kinds, optimizer_kind
from rlflow.errors import Finding, RunError
from rlflow.modelfiles.chunks import CHUNK_BYTES

SCORES = ("log_probs", "entropy")
OUTPUTS = {"lm": (*SCORES, *SUMS, *TOP, *CHOSEN), "value": ("values",)}


class TrainEngine:
    """Computes with `model`, and updates it if there is an optimizer.

    `micro_tokens` bounds the tokens of one forward pass; a single row may exceed it. None
    takes every batch in one pass. Distributions are made in chunks of tokens that hold at most
    `chunk_bytes`; None makes them all at once on a CPU, and in chunks of `CHUNK_BYTES` on an
    accelerator. A model without a `predictor` makes them all at once anywhere. The state of a
    `visiting` optimizer stays on the host. Micro-batches are packed `ahead` by a thread beside, on
    CUDA where nothing is said.
    """

    steps_with: Kinds = WHOLE

    def __init__(
        self,
        model: TorchModel,
        optimizer: OptimizerSpec | None,
        *,
        micro_tokens: int | None,
        chunk_bytes: int | None = None,
        visiting: bool = False,
        ahead: bool | None = None,
    ) -> None:
        self.model = model
        on_cpu = model.device.type == "cpu"
        self.packing = PackingAhead(model.device, beside=ahead)
        self.chunk_bytes = CHUNK_BYTES if chunk_bytes is None and not on_cpu else chunk_bytes
        self.optimizer = None
        if optimizer is not None:
            steps_with = self.steps_with[optimizer_kind(optimizer)]
            self.optimizer = steps_with(model, optimizer, visiting=visiting)
        self.micro_tokens = micro_tokens

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
        makes, with `top_k` and the batch's `top_ids`; a value belongs to the state
        before its token. Log-probs and entropy are of log_softmax(logits / temperature), for
        several temperatures `[total, temperatures]`.
        float64 models give float64. Raises RunError while the model is asleep.
        """
        parts = list(self.micro_batches(batch))
        passes = self.passes(len(parts))
        computed = []
        for _, micro in self.packing.over(parts):
            computed.append(self.compute(micro, outputs, temperature, top_k))
            advance(1, "micro-batches")
        for _ in range(len(parts), passes):
            self.compute(one_token(batch), outputs, temperature, top_k)
        return in_batch_order(batch, [rows for rows, _ in parts], computed)

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
        optimizer = self.require_optimizer()
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
        return self.finish(numbers_of(total), max_grad_norm)

    def finish(self, metrics: dict[str, float], max_grad_norm: float | None) -> StepResult:
        """Update the weights with the gradients of the whole batch, if all is finite."""
        optimizer = self.require_optimizer()
        norm = float(optimizer.grad_norm())
        applied = math.isfinite(norm) and math.isfinite(metrics.get("loss", 0.0))
        if applied:
            clip = max_grad_norm is not None and norm > max_grad_norm
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
        layout = packed.layout
        self.require_context(layout.longest)
        if not layout.predictions:
            return nothing(batch, outputs, temperature, top_k, self.model.device)
        if self.chunk_bytes is not None and self.model.predictor is not None:
            return self.in_chunks(packed, batch, outputs, temperature, top_k)
        attention = PackedAttention(layout)
        logits = self.model.logits(layout.tokens, layout.positions, attention, layout.targets)
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
        found |= distributions(logits, outputs, temperature, top_k, chosen_ids(batch))
        return {name: found[name] for name in outputs}

    def in_chunks(
        self,
        packed: PackedRows,
        batch: Batch,
        outputs: Collection[str],
        temperature: Temperature,
        top_k: int,
    ) -> dict[str, Tensor]:
        """The same, of a language model's head on a few tokens at a time."""
        limit, several, layout = self.chunk_bytes, isinstance(temperature, tuple), packed.layout
        assert limit is not None
        given = temperature if isinstance(temperature, tuple) else (temperature,)

        def compute(predictor: Predictor, hidden: Tensor) -> dict[str, Tensor]:
            hidden = hidden[: layout.predictions]
            ids, tokens = chosen_ids(batch), packed.responses
            return predictor.scores(hidden, tokens, ids, outputs, given, top_k, limit)

        found: dict[str, Tensor] = self.model.predicted(
            layout.tokens, layout.positions, PackedAttention(layout), layout.targets, compute
        )
        if not several:
            found |= {name: found[name][:, 0] for name in SCORES if name in found}
        return {name: found[name] for name in outputs}

    def micro_batches(self, batch: Batch) -> Iterator[tuple[Tensor | None, Batch]]:
        """Rows int64 and the micro-batch of them; None and the batch where it is not cut."""
        prompts, responses = batch["prompt_tokens"], batch["response_tokens"]
        if self.micro_tokens is None:
            yield None, batch
            return
        groups = prompt_groups(prompts)
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
        context = self.model.context
        if context is not None and longest > context:
            raise RunError(
                Finding(
                    code="E505",
                    what=f"a row is longer than the context of model {self.model.name!r}",
                    got=f"{longest} tokens",
                    expected=f"at most {context}",
                )
            )

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


def chosen_ids(batch: Batch) -> Tensor | None:
    """At which ids of each response token log-probs may be asked for, int64 `[total, k]`."""
    ids = batch.get(IDS, None)
    return None if ids is None else flat(ids)


def nothing(
    batch: Batch,
    outputs: Collection[str],
    temperature: Temperature,
    top_k: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """What a forward makes of no response token."""
    several = (len(temperature),) if isinstance(temperature, tuple) else ()
    ids = chosen_ids(batch)
    width: dict[str, tuple[int, ...]] = {"top_log_probs": (top_k,), "top_ids": (top_k,)}
    width["log_probs_at"] = () if ids is None else tuple(ids.shape[1:])
    return {
        name: torch.zeros(
            (0, *width.get(name, several)),
            dtype=torch.int64 if name == "top_ids" else None,
            device=device,
        )
        for name in outputs
    }


def one_token(like: Batch) -> Batch:
    """The smallest row that a model can be asked about, with ids where another batch has them."""
    token = ragged_rows([[0]], torch.int64)
    fields = {"prompt_tokens": token, "response_tokens": token}
    ids = chosen_ids(like)
    if ids is not None:
        fields[IDS] = ragged_like(torch.arange(ids.shape[1])[None], token)
    return make_batch(fields, 1)


def numbers_of(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """0-d metrics as numbers, brought from their device all at once."""
    if not metrics:
        return {}
    read = torch.stack([value.double() for value in metrics.values()]).tolist()
    return dict(zip(metrics, read, strict=True))


def add_metrics(total: dict[str, Tensor], metrics: Mapping[str, Tensor]) -> None:
    """Add the metrics of a micro-batch to those of the batch."""
    for name, value in metrics.items():
        now = value.detach()
        if name not in total:
            total[name] = now
        elif name.endswith("_max"):
            total[name] = torch.maximum(total[name], now)
        else:
            total[name] = total[name] + now


def in_batch_order(
    batch: Batch, cuts: list[Tensor | None], computed: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Outputs of micro-batches, whose rows `cuts` has, in the batch's order, on the CPU."""
    if len(cuts) == 1:
        return {name: values.cpu() for name, values in computed[0].items()}
    size = lengths(batch["response_tokens"])
    places = torch.cat([flat_places(size, rows) for rows in cuts])
    whole = {}
    for name in computed[0]:
        joined = torch.cat([values[name].cpu() for values in computed])
        whole[name] = torch.empty_like(joined).index_copy_(0, places, joined)
    return whole


def flat_places(size: Tensor, rows: Tensor | None) -> Tensor:
    """Where the flat values of `rows` lie among all rows' of lengths `size`, int64."""
    if rows is None:
        return torch.arange(int(size.sum()))
    picked = size[rows]
    starts = (size.cumsum(0) - size)[rows]
    return torch.repeat_interleave(starts, picked) + column_index(picked)


def cut_by_tokens(
    groups: np.ndarray[Any, np.dtype[np.int64]],
    prompts: np.ndarray[Any, np.dtype[np.int64]],
    responses: np.ndarray[Any, np.dtype[np.int64]],
    budget: int,
) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Cut rows into micro-batches of at most `budget` tokens, int64 row numbers each.

    Rows of one prompt (`groups` has its first row) stand together and count it once; a row
    beyond the budget is a micro-batch of its own. Order within the batch is kept otherwise.
    """
    cuts: list[list[int]] = []
    room, last = 0, -1
    for row in np.argsort(groups, kind="stable").tolist():
        own = int(responses[row])
        whole = own + int(prompts[row])
        needed = own if groups[row] == last else whole
        if not cuts or needed > room:
            cuts.append([])
            room, needed = budget, whole
        cuts[-1].append(row)
        room -= needed
        last = groups[row]
    return [np.array(cut, dtype=np.int64) for cut in cuts]
