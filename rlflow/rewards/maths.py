"""Whether a response ends in the same mathematical object as the known answer.

The work is that of the package `math-verify`, run in processes that can be killed: a response
may hold an expression that takes for ever. Install it: `pip install -e '.[rewards]'` in the clone.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import logging

from rlflow.errors import Finding, UsageError
from rlflow.rewards.workers import Packed, packed_function, workers

SECONDS = 10.0


async def math_verify(response: str, answer: str) -> float:
    """1 where the response's last answer equals `answer`, else 0; both LaTeX or plain numbers.

    Raises ValueError where nothing can be read in the answer, TimeoutError where the
    comparison takes more than ten seconds, and UsageError (E286) without the package.
    """
    require_package()
    keywords = {"response": response, "answer": answer}
    return float(await asyncio.to_thread(workers().call, _comparison(), keywords, SECONDS))


@functools.cache
def require_package() -> None:
    """Raise UsageError (E286) unless `math-verify` is installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise UsageError(
            Finding(
                code="E286",
                what="rf.rewards.math_verify needs the package math-verify",
                fix="pip install -e '.[rewards]'",
            )
        )


math_verify.require = require_package  # type: ignore[attr-defined]


@functools.cache
def _comparison() -> Packed:
    return packed_function(same_mathematics)


def same_mathematics(response: str, answer: str) -> bool:
    """Compare the two texts in this process, without a time limit."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    marked = "$" in answer or "\\boxed" in answer
    known = parse(answer if marked else f"${answer}$", parsing_timeout=None)
    if not known:
        raise ValueError(f"no mathematics in the answer {answer!r:.60}")
    given = parse(response, parsing_timeout=None)
    return bool(verify(known, given, timeout_seconds=None))
