"""Temporary."""

from __future__ import annotations

import ray


def wait(refs, seconds, *, doing, who=None):
    return ray.get(list(refs), timeout=seconds)


def cause_of(error):
    return f"{type(error).__name__}: {error}"
