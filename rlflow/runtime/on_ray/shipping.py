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

from ray import cloudpickle

import rlflow
from rlflow.errors import Finding, UsageError
from rlflow.graph.pipeline import MODULE
from rlflow.scheduler.plan import Plan

OWN = Path(rlflow.__file__).parent


def shipped(plan: Plan, near: Path | None) -> bytes:
    """The plan as bytes; modules of the pipeline's own folder go by value.

    Raises UsageError naming what a function holds that cannot be sent.
    """
    with _by_value(near):
        try:
            found: bytes = cloudpickle.dumps(plan)
        except (TypeError, pickle.PicklingError, AttributeError) as error:
            raise UsageError(
                Finding(
                    code="E311",
                    what="a function of the pipeline cannot be sent to the worker processes",
                    got=f"{type(error).__name__}: {error}",
                    expected="functions that hold plain data: open files, locks and connections "
                    "belong inside the function",
                )
            ) from error
    return found


def unshipped(blob: bytes) -> Plan:
    """The plan again."""
    plan: Plan = cloudpickle.loads(blob)
    return plan


@contextmanager
def _by_value(near: Path | None) -> Iterator[None]:
    """Within it, what is defined in a pipeline's file or folder is pickled by value."""
    modules = [module for module in list(sys.modules.values()) if _is_near(module, near)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _is_near(module: ModuleType, near: Path | None) -> bool:
    """Whether a module is of the pipeline's folder, or a pipeline's file from anywhere."""
    file = getattr(module, "__file__", None)
    if getattr(module, "__name__", "").startswith(MODULE):
        return True
    if file is None or near is None:
        return False
    path = Path(file).resolve()
    return path.is_relative_to(near.resolve().parent) and not path.is_relative_to(OWN)
