"""Whether Triton's kernels take a head's distributions, and what they move: engine and plan.

Operators of torch read and write each logit many times. The kernels read it once in a forward, and
read and write it once in a backward, in the model's dtype. They are for what updates and log-probs
ask, at one temperature; other numbers of distributions stay with torch's operators.
`RLFLOW_HEAD_KERNEL=off` leaves all to them. Knows neither tensors nor plans.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

VARIABLE = "RLFLOW_HEAD_KERNEL"
OFF = "off"
DTYPES = ("bfloat16", "float16", "float32")
# How often a logit is read or written, each time in the model's dtype: by the product that makes it
# and the kernel that reads it; and in an update made again, read, and its gradient written.
SCORED, LEARNED = 2, 5
# Bytes for each weight of a head whose gradient is summed in float32, in each chunk: the chunk's
# own is written and read in bfloat16, the sum read and written.
SUMMED = 2 + 2 + 4 + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAsked:
    """What is asked of distributions: `more` than log-probs and entropies at one temperature.

    `device` is torch's name of a type. A `biased` head has a gradient in float32. Triton is there
    where it `compiles`.
    """

    device: str
    dtype: str
    more: bool = False
    biased: bool = False
    compiles: bool = True


def head_by_rows(asked: HeadAsked) -> bool:
    """Whether the kernels compute what is asked; a CPU, whose results are the reference, never."""
    if asked.more or asked.biased or asked.dtype not in DTYPES:
        return False
    if os.environ.get(VARIABLE) == OFF:
        return False
    return asked.device == "cuda" and asked.compiles
