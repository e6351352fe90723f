"""Functions that keep state where no checkpoint knows of it are told in the plan."""

from __future__ import annotations

import functools
from collections import deque

import pytest

from rlflow.graph.rules.remembering import remembers

SEEN: dict[str, int] = {}
QUEUE: deque[int] = deque()
TABLE = {"a": 1}
COUNT = 0


def sets_a_global(x):
    global COUNT  # noqa: PLW0603  what is looked for
    COUNT += x
    return COUNT


def sets_an_item(x):
    SEEN[x] = 1


def sets_deep(x):
    SEEN[x][0] = 1


def adds(x):
    QUEUE.append(x)


def has_a_default(x, kept=[]):  # noqa: B006  what is looked for
    kept.append(x)


def reads(x):
    local = []
    local.append(x)
    own = dict(TABLE)
    own["b"] = 2
    return TABLE[x], local, own


def hides(x):
    SEEN = {}
    SEEN[x] = 1
    return SEEN


def closed_over():
    total, calls = 0, []

    def inner(x):
        nonlocal total
        total += x
        calls.append(x)

    return inner


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (sets_a_global, ("COUNT",)),
        (sets_an_item, ("SEEN",)),
        (sets_deep, ("SEEN",)),
        (adds, ("QUEUE",)),
        (has_a_default, ("kept",)),
        (closed_over(), ("calls", "total")),
        (functools.partial(adds, 1), ("QUEUE",)),
        (functools.lru_cache(adds), ("QUEUE",)),
        (reads, ()),
        (hides, ()),
        (len, ()),
    ],
)
def test_what_a_function_keeps(function, names):
    assert names == remembers(function)
