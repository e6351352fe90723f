"""Rewards that are more than a comparison, exposed as `rf.rewards`; each loads when it is named.

    math_verify                a mathematical answer against the known one
    code(tests="tests")        a program in the response, run against tests in a jail
    HTTPJudge(url)             a judge behind an address, JSON in and out
    Unscorable                 raised by a reward function: this sample has no reward
    extract_code(text)         the program in a model's text
    run_python(program)        a program in a jail, within Limits; gives a Ran

The first three are reward functions for `ops.reward`. This package knows no tensors and no
graphs.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from rlflow.rewards.bounds import Unscorable

if TYPE_CHECKING:
    from rlflow.rewards.maths import math_verify
    from rlflow.rewards.programs import code, extract_code
    from rlflow.rewards.remote import HTTPJudge
    from rlflow.rewards.sandbox import Ran, run_python
    from rlflow.rewards.walls import Limits

__all__ = [
    "HTTPJudge",
    "Limits",
    "Ran",
    "Unscorable",
    "code",
    "extract_code",
    "math_verify",
    "run_python",
]

FILES = {
    "HTTPJudge": "remote",
    "Limits": "walls",
    "Ran": "sandbox",
    "code": "programs",
    "extract_code": "programs",
    "math_verify": "maths",
    "run_python": "sandbox",
}


if not TYPE_CHECKING:  # to a checker a name that is not declared is a mistake

    def __getattr__(name: str) -> Any:
        if name not in FILES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return pkgutil.resolve_name(f"{__name__}.{FILES[name]}:{name}")
