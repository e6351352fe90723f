"""How weights reach SGLang, as options."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.graph.user.engine_options import options_from_json


@pytest.mark.parametrize(
    ("said", "hosts", "way"),
    [
        (None, 1, "memory"),
        (None, 2, "group"),
        ("memory", 1, "memory"),
        ("group", 1, "group"),
        ("disk", 3, "disk"),
    ],
)
def test_the_way_follows_from_the_hosts_unless_it_is_said(
    said: str | None, hosts: int, way: str
) -> None:
    assert way == rf.SGLang(updates=said).way(hosts)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"updates_dir": "/shared"}, "would do nothing"),
        ({"updates": "group", "updates_dir": "/shared"}, "would do nothing"),
        ({"updates": "disk", "updates_dir": "shared"}, "another directory for every process"),
    ],
)
def test_a_directory_that_nothing_uses(options: dict[str, str], what: str) -> None:
    with pytest.raises(PlanError) as caught:
        rf.SGLang(**options)
    (finding,) = caught.value.findings
    assert "E670" == finding.code
    assert what in finding.what


def test_a_way_that_there_is_not() -> None:
    with pytest.raises(ValidationError, match="updates"):
        rf.SGLang(updates="post")


def test_ways_are_printed_and_read_back() -> None:
    made = rf.SGLang(updates="disk", updates_dir="/shared")
    assert "sglang(updates=disk, updates_dir=/shared)" == made.describe()
    assert made == options_from_json(made.as_json())
    assert "sglang" == rf.SGLang().describe()
