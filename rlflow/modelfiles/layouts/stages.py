"""Stages of a pipeline: which models can be cut into them.

Read by plans and by engines. Knows families and numbers of layers; neither tensors nor devices.
"""

from __future__ import annotations

from rlflow.errors import Finding
from rlflow.modelfiles.families import Family


def staging_finding(path: str, family: Family, layers: int, pp: int) -> Finding | None:
    """E531 where a model cannot be cut into `pp` stages of whole layers; None where it can."""
    if pp == 1:
        return None
    if not family.staged:
        return Finding(
            code="E531",
            what=f"pp={pp}: the layers of model {path!r} cannot be cut into stages",
            got="a family whose stages were never compared with the whole model",
            fix="rf.on(..., pp=1)",
        )
    if pp <= layers:
        return None
    return Finding(
        code="E531",
        what=f"pp={pp}: model {path!r} has fewer layers than stages",
        got=f"{layers} layers",
        expected="one layer in each stage at least",
        fix=f"rf.on(..., pp={layers})",
    )
