"""The parts of a module that training leaves as they are.

They need no gradient, so that a backward ends where the last trained part begins. This file knows
neither optimizers nor ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from rlflow.errors import UsageError
from rlflow.modelfiles.pictures.towers import FREEZABLE, frozen_findings, model_part


def freeze(module: nn.Module, parts: Sequence[str], path: str) -> frozenset[str]:
    """Have the parameters of some parts need no gradient; their names.

    Works on modules on the meta device. Raises UsageError E555 for a part that the module has not.
    """
    if not parts:
        return frozenset()
    named = dict(module.named_parameters())
    there = {model_part(name) for name in named}
    findings = frozen_findings(path, parts, [part for part in FREEZABLE if part in there])
    if findings:
        raise UsageError(*findings)
    names = frozenset(name for name in named if model_part(name) in parts)
    for name in names:
        named[name].requires_grad_(False)
    return names
