"""The fields that losses read, with the line that makes each. Nothing here imports torch."""

from __future__ import annotations

from rlflow.graph.op import Input
from rlflow.ops.pairs import READ_BY_LOSSES

FIELD_INPUTS = {
    **READ_BY_LOSSES,
    "advantages": Input(
        name="advantages",
        dtype="float32",
        levels=("token", "row"),
        hint='adv = ops.advantage("grpo", samples, reward)',
    ),
    "old_log_probs": Input(
        name="old_log_probs",
        dtype="float32",
        levels=("token",),
        hint="old_log_probs = ops.log_probs(actor, samples)",
    ),
    "rollout_log_probs": Input(name="rollout_log_probs", dtype="float32", levels=("token",)),
    "ref_log_probs": Input(
        name="ref_log_probs",
        dtype="float32",
        levels=("token",),
        hint="ref_log_probs = ops.log_probs(ref, samples)",
    ),
    "version": Input(name="version", dtype="int64", levels=("token",)),
    "values": Input(name="values", dtype="float32", levels=("token",)),
    "returns": Input(
        name="returns",
        dtype="float32",
        levels=("token",),
        hint='adv = ops.advantage("gae", samples, reward, values)',
    ),
}
