"""Variables of this process, set for a while; Ray is told to read its own again.

Knows no cluster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray._raylet


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables, and put back what they were before."""
    with kept_variables(*values):
        os.environ.update(values)
        yield


@contextmanager
def kept_variables(*names: str) -> Iterator[None]:
    """Put back what variables were before, whatever happens to them meanwhile."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def ray_settings(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables that Ray reads once and keeps, such as its token; it forgets them after."""
    try:
        with variables(values):
            _forget()
            yield
    finally:
        _forget()


def _forget() -> None:
    """Have Ray read its settings again; versions without tokens have nothing to forget."""
    config = getattr(ray._raylet, "Config", None)
    if config is not None:
        config.initialize("")
    loader = getattr(ray._raylet, "AuthenticationTokenLoader", None)
    if loader is not None:
        loader.instance().reset_cache()
