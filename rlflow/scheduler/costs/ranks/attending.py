"""What computes attention on a rank's device, by how its model is computed.

Knows neither rows nor bytes.
"""

from __future__ import annotations

from functools import lru_cache

from rlflow.modelfiles.kernels.attention import AttentionAsked, AttentionChoice, attention_choice
from rlflow.scheduler.devices.hardware import ROCM

DTYPES = {2: "bfloat16", 4: "float32"}


@lru_cache(maxsize=256)
def attention_there(
    on_cpu: bool, size: int, head: int, softcap: float | None, chip: str
) -> AttentionChoice:
    """What computes attention of such numbers; asked for every step of a rollout."""
    asked = AttentionAsked(
        device="cpu" if on_cpu else "cuda",
        dtype=DTYPES.get(size, "float64"),
        head=head,
        value=head,
        softcap=softcap,
        rocm=chip in ROCM,
    )
    return attention_choice(asked)
