"""An update in plain torch: the side of `vs_torch.py` that uses nothing of rlflow.

Rows packed one after the other, attention by torch's varlen kernel on a GPU (row by row on a CPU),
log-probs by chunks of tokens through the head with recomputation, AdamW with float32 master
weights. What somebody would write who knows torch well, for a model of Hugging Face.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

CHUNK = 1024
WAY = "benchmark_packed"


@dataclass(slots=True)
class Packed:
    """Rows one after the other: where each begins, int32 on the device, and the longest."""

    starts: Tensor
    bounds: list[int]
    longest: int


_packed: list[Packed] = []


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention within rows, for `[1, heads, tokens, size]`."""
    packed = _packed[-1]
    if q.device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        known = inspect.signature(varlen_attn).parameters
        more = {"window_size": (-1, 0), "is_causal": True, "enable_gqa": q.shape[1] != k.shape[1]}
        told = {name: value for name, value in more.items() if name in known}
        flat = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
        sizes = (packed.starts, packed.starts, packed.longest, packed.longest)
        return varlen_attn(*flat, *sizes, scale=scaling, **told)[None], None
    made = [
        scaled_dot_product_attention(
            q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True, scale=scaling, enable_gqa=True
        )
        for a, b in zip(packed.bounds, packed.bounds[1:], strict=False)
    ]
    return torch.cat(made, 2).transpose(1, 2), None


class PlainTrainer:
    """A model with its optimizer; `step` makes one optimizer step on rows of tokens."""

    def __init__(
        self,
        path: str,
        weights: dict[str, Tensor],
        *,
        device: str,
        dtype: torch.dtype,
        micro_tokens: int,
        recompute: bool,
        lr: float,
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register(WAY, attend)
        config = AutoConfig.from_pretrained(path)
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=WAY
            )
        model.load_state_dict(weights, strict=False)
        if recompute:
            # Its name before version 6 of transformers.
            name = "activation_checkpointing_enable"
            enable = getattr(model, name, None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        model.train()
        self.model, self.micro_tokens, self.device = model, micro_tokens, device
        self.parameters = list(model.parameters())
        low = dtype != torch.float32
        self.master = [p.detach().float().clone() if low else p for p in self.parameters]
        for master in self.master:
            master.requires_grad_(True)
        fused = torch.device(device).type == "cuda"
        self.optimizer = torch.optim.AdamW(self.master, lr=lr, weight_decay=0.0, fused=fused)

    def step(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> float:
        """Minus the mean log-prob of the responses' tokens, before the step."""
        total = sum(len(row) for row in responses)
        loss = 0.0
        losses = []
        for rows in self._micro_batches(prompts, responses):
            made = self._loss(prompts, responses, rows) / total
            made.backward()  # type: ignore[no-untyped-call]
            losses.append(made.detach())
        loss = float(torch.stack(losses).sum())
        if self.master[0] is not self.parameters[0]:
            for master, parameter in zip(self.master, self.parameters, strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.master, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.master[0] is not self.parameters[0]:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.master)
        return loss

    def _micro_batches(
        self, prompts: Sequence[Tensor], responses: Sequence[Tensor]
    ) -> Iterator[list[int]]:
        """Rows in order, as many as have at most `micro_tokens` together."""
        held: list[int] = []
        tokens = 0
        for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            size = len(prompt) + len(response)
            if held and tokens + size > self.micro_tokens:
                yield held
                held, tokens = [], 0
            held.append(number)
            tokens += size
        yield held

    def _loss(
        self, prompts: Sequence[Tensor], responses: Sequence[Tensor], rows: Sequence[int]
    ) -> Tensor:
        """Minus the sum of the log-probs of some rows' responses."""
        whole = [torch.cat([prompts[row], responses[row]]) for row in rows]
        sizes = torch.tensor([0, *(len(row) for row in whole)]).cumsum(0)
        tokens = torch.cat(whole).to(self.device)
        positions = torch.cat([torch.arange(len(row)) for row in whole]).to(self.device)
        where = [
            torch.arange(start + len(prompts[row]) - 1, start + len(one) - 1)
            for start, row, one in zip(sizes.tolist(), rows, whole, strict=False)
        ]
        places = torch.cat(where).to(self.device)
        longest = max(len(row) for row in whole)
        _packed[:] = [Packed(sizes.int().to(self.device), sizes.tolist(), longest)]
        hidden = self.model.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state[0][places]
        wanted = tokens[places + 1]
        parts = [
            checkpoint(self._chunk, some, ids, use_reentrant=False)
            for some, ids in zip(hidden.split(CHUNK), wanted.split(CHUNK), strict=True)
        ]
        return torch.stack(parts).sum()

    def _chunk(self, hidden: Tensor, wanted: Tensor) -> Tensor:
        logits = self.model.lm_head(hidden).float()
        return -log_softmax(logits, -1).gather(-1, wanted[:, None]).sum()
