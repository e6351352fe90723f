"""A plan on its way to another process: a user's own functions travel with it by value.

The receiving process need not have the user's files. This file runs nothing of a plan.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import cloudpickle

from rlflow.errors import Finding, UsageError, error_text
from rlflow.graph.pipeline import MODULE
from rlflow.scheduler.plan.plan import Plan
from rlflow.userfiles import dumped, own_modules


def shipped(plan: Plan, near: Path | None) -> bytes:
    """The plan as bytes; modules of the pipeline's own folder or package go by value.

    Raises UsageError naming what a function holds that cannot be sent.
    """
    with _by_value(near):
        try:
            return dumped(plan)
        except (TypeError, pickle.PicklingError, AttributeError) as error:
            raise UsageError(
                Finding(
                    code="E311",
                    what="a function of the pipeline cannot be sent to the worker processes",
                    got=error_text(error),
                    expected="functions that hold plain data: open files, locks and connections "
                    "belong inside the function",
                )
            ) from error


def unshipped(blob: bytes) -> Plan:
    """The plan again."""
    plan: Plan = cloudpickle.loads(blob)
    return plan


@contextmanager
def _by_value(near: Path | None) -> Iterator[None]:
    """Within it, what is defined in a pipeline's file, folder or package is pickled by value."""
    modules = _travelling(near)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _travelling(near: Path | None) -> list[ModuleType]:
    """The modules that belong to a pipeline's file, and pipelines' files from anywhere."""
    own = {module.__name__: module for module in (own_modules(near) if near is not None else ())}
    for name, module in list(sys.modules.items()):
        if name.rpartition(".")[2].startswith(MODULE):
            own[name] = module
    return list(own.values())
