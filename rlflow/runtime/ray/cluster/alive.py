"""Whether the cluster of this process still lives, and calls to it that may never return.

Left alone, Ray waits a minute for a head node that is gone and then ends the process. Knows
a function that looks, no cluster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from rlflow.errors import DeviceLostError, Finding, RunError

T = TypeVar("T")
PACE = 1.0
_looks: list[Callable[[], str]] = []
_looked = {"last": -PACE}


def watch(look: Callable[[], str]) -> None:
    """Ask this function from now on: what of the cluster is gone, or nothing."""
    _looks.append(look)


def forget(look: Callable[[], str]) -> None:
    """Ask it no longer."""
    if look in _looks:
        _looks.remove(look)


def require_cluster() -> None:
    """Raise RunError if the cluster of this process is gone; looks once a second at most."""
    if time.monotonic() - _looked["last"] < PACE:
        return
    _looked["last"] = time.monotonic()
    for look in _looks:
        gone = look()
        if gone:
            raise RunError(
                Finding(
                    code="E777",
                    what="the Ray cluster is gone",
                    got=gone,
                    expected="a cluster that lives as long as the run",
                )
            )


def bounded(ask: Callable[[], T], seconds: float, *, doing: str) -> T:
    """What a call returns that may hang, within so many seconds, or else RunError.

    The call is made in a thread of its own, which is left behind if it does hang.
    """
    made: list[T] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            made.append(ask())
        except BaseException as error:  # raised again below
            raised.append(error)

    thread = threading.Thread(target=call, name=doing, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not made:
        raise DeviceLostError(
            Finding(
                code="E779",
                what=f"{doing}: Ray does not answer",
                got=f"nothing within {seconds:.3g} s",
                expected="an answer in milliseconds",
            )
        )
    return made[0]
