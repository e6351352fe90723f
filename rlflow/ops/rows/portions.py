"""The operator that puts the parts of a rollout together, which several pools have drawn.

The contract only; the body is in `rlflow.ops.bodies.rows.portions`. Nothing here imports torch.
"""

from __future__ import annotations

from rlflow.graph.op import Op
from rlflow.graph.roles import PartsTogether, SamplingOptions

GATHER = Op(
    name="gather",
    body="rlflow.ops.bodies.rows.portions:put_together",
    roles=(SamplingOptions, PartsTogether),
    inputs=(),
    outputs=(),
    per="batch",
    rows="gather",
    dispatch="first",
    hands_on=True,
)
