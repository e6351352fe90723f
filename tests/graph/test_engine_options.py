"""Engines as values: what may be said of them, how it is printed, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.graph.engines import SAID_ELSEWHERE


def test_an_engine_is_named_or_has_options() -> None:
    assert rf.on("gen", engine="torch").sglang is None
    assert rf.on("gen").sglang is None
    assert rf.SGLang() == rf.on("gen", engine="sglang").sglang
    assert 0.5 == rf.on("gen", engine=rf.SGLang(mem_fraction_static=0.5)).sglang.mem_fraction_static


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (rf.on("gen", engine="sglang", tp=2), "gen tp=2 engine=sglang"),
        (rf.on("gen", engine=rf.SGLang()), "gen engine=sglang"),
        (
            rf.on("gen", engine=rf.SGLang(max_total_tokens=9, args={"page_size": 1})),
            "gen engine=sglang(max_total_tokens=9, args={'page_size': 1})",
        ),
    ],
)
def test_the_printed_form_says_what_differs_from_the_defaults(where: rf.On, text: str) -> None:
    assert text == where.describe()


def test_options_are_values() -> None:
    one, same = (rf.SGLang(args={"page_size": 1}) for _ in range(2))
    assert {one} == {same}
    assert one != rf.SGLang(args={"page_size": 2})
    with pytest.raises(ValidationError):
        one.cuda_graph = False


@pytest.mark.parametrize("name", ["sgland", "SGLang"])
def test_an_unknown_engine_is_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(PlanError) as refused:
        rf.On(pool="gen", engine=name)
    (finding,) = refused.value.findings
    assert ("E245", ("sglang",)) == (finding.code, finding.near)
    assert f"there is no engine {name!r}" == finding.what


@pytest.mark.parametrize("name", [*SAID_ELSEWHERE, "mem_fraction_static", "quantization"])
def test_arguments_that_are_said_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(PlanError) as refused:
        rf.SGLang(args={name: 1, "page_size": 1})
    (finding,) = refused.value.findings
    assert "E246" == finding.code
    assert repr(name) in finding.what


def test_arguments_are_plain_data_for_another_process() -> None:
    with pytest.raises(PlanError) as refused:
        rf.SGLang(args={"page_size": object()})
    assert "no plain data" in refused.value.findings[0].what


@pytest.mark.parametrize(
    "options",
    [
        {"mem_fraction_static": 0},
        {"mem_fraction_static": 1.5},
        {"max_total_tokens": 0},
        {"start_seconds": -1},
        {"mem_fraction": 0.5},
    ],
)
def test_options_out_of_range_or_unknown_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        rf.SGLang(**options)
