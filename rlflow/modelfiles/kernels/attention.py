"""By what the attention of a layer is computed, and why: one rule for the engine and for the plan.

Torch's `varlen_attn` (2.11 to 2.13) can be told a scale and a window; sinks are a part that is
merged by its log-sum (`spans.attend_merged`). It has no soft cap, and its kernel, FlashAttention-2
(Dao, arXiv:2307.08691), takes neither float32 nor values of another width than keys. FlexAttention
(Dong et al., arXiv:2412.05496) compiles a kernel for those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

AttentionBy = Literal["masks", "varlen", "flex", "blocks"]

# Sizes of heads that FlashAttention-2 takes, in steps and up to a limit, from Ampere on.
FLASH_STEP, FLASH_LARGEST, FLASH_CAPABILITY = 8, 256, (8, 0)
FLASH_DTYPES = ("bfloat16", "float16")
# Those that FlexAttention's kernels multiply: a Triton product takes 16 numbers or more, and beyond
# 256 tiles do not fit a multiprocessor.
FLEX_SMALLEST, FLEX_LARGEST = 16, 256
FLEX_DTYPES = (*FLASH_DTYPES, "float32")
CAPPED, GEMMA_CAP = ("gemma2", "vaultgemma"), 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionAsked:
    """What a layer asks, and of which device.

    `head` and `value` are the widths of a head's keys and values. `device` is torch's name of a
    type. A build of torch for ROCm is `rocm`; it `compiles` where Triton is installed; its varlen
    kernel takes windows where it `knows_windows`.
    """

    device: str
    dtype: str
    head: int
    value: int
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False
    capability: tuple[int, int] = FLASH_CAPABILITY
    rocm: bool = False
    compiles: bool = True
    knows_windows: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """What computes it, and the reason, as a plan prints it."""

    by: AttentionBy
    reason: str


def attention_choice(asked: AttentionAsked) -> AttentionChoice:
    """The kernel of a layer: varlen where it can be told all, FlexAttention, or blocks of products.

    A CPU has masks, whose results are the reference. Sinks decide nothing: each way gives the
    log-sums that they are merged by.
    """
    if asked.device == "cpu":
        return AttentionChoice(by="masks", reason="a CPU computes rectangles with masks")
    if asked.device != "cuda":
        return AttentionChoice(by="blocks", reason=f"no kernel is known of {asked.device} devices")
    missing = lacks_varlen(asked)
    if missing is None:
        return AttentionChoice(by="varlen", reason="torch's varlen kernel takes all of it")
    refused = lacks_flex(asked)
    if refused is None:
        return AttentionChoice(by="flex", reason=f"the varlen kernel {missing}")
    return AttentionChoice(
        by="blocks", reason=f"the varlen kernel {missing}, FlexAttention {refused}"
    )


def lacks_varlen(asked: AttentionAsked) -> str | None:
    """Why torch's varlen kernel does not compute it, None where it does."""
    too_wide = asked.head % FLASH_STEP or asked.head > FLASH_LARGEST
    reasons = {
        "needs an Ampere or later": asked.capability < FLASH_CAPABILITY,
        "pads its log-sums with ROCm": asked.rocm,
        "has no soft cap": asked.softcap is not None,
        f"has no {asked.dtype}": asked.dtype not in FLASH_DTYPES,
        "of this torch knows no window": asked.window is not None and not asked.knows_windows,
        "takes no values wider than keys": asked.value > asked.head,
        f"takes no head of {asked.head}": bool(too_wide),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def lacks_flex(asked: AttentionAsked) -> str | None:
    """Why FlexAttention does not compute it, None where it does."""
    widths = (asked.head, asked.value)
    odd = [width for width in widths if not FLEX_SMALLEST <= width <= FLEX_LARGEST]
    reasons = {
        "needs Triton, which is not installed": not asked.compiles,
        "needs an Ampere or later": asked.capability < FLASH_CAPABILITY,
        f"has no {asked.dtype}": asked.dtype not in FLEX_DTYPES,
        f"takes no head of {odd[0] if odd else 0}": bool(odd),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def softcap_of(text: Mapping[str, Any]) -> float | None:
    """The soft cap of attention scores that a text config has, or that its family has unsaid.

    It is Gemma 2's (report, arXiv:2408.00118, section 2).
    """
    unsaid = GEMMA_CAP if text.get("model_type") in CAPPED else None
    found = text.get("attn_logit_softcapping", unsaid)
    return float(found) if found else None
