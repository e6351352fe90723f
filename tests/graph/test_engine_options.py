"""Engines as values: what may be said of them, how it is printed, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow.errors import GraphError, PlanError
from rlflow.graph.user import engine_options
from rlflow.graph.user.engine_options import EngineOptions, options_from_json
from rlflow.graph.user.engines import SAID_ELSEWHERE, SAID_ELSEWHERE_VLLM


def test_an_engine_is_named_or_has_options() -> None:
    assert rf.on("gen", engine="torch").options is None
    assert rf.on("gen").options is None
    assert rf.SGLang() == rf.on("gen", engine="sglang").options
    assert (
        0.5 == rf.on("gen", engine=rf.SGLang(mem_fraction_static=0.5)).options.mem_fraction_static
    )


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


class Mine(rf.EngineOptions):
    """An engine of somebody's own."""

    engine = "mine"
    title = "my engine"

    words: int = 3

    def load(self, path: str, **how: object) -> tuple[object, object]:
        return path, how


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(engine_options, "_ENGINES", dict(engine_options._ENGINES))


@pytest.mark.usefixtures("known")
def test_a_registered_engine_is_known_by_name_and_by_options() -> None:
    with pytest.raises(PlanError, match=r"E245.*no engine 'mine'"):
        rf.on("gen", engine="mine")
    with pytest.raises(PlanError, match=r"E263(.|\n)*rf.register_engine\(Mine\)"):
        rf.on("gen", engine=Mine())
    assert Mine is rf.register_engine(Mine)
    assert Mine() == rf.on("gen", engine="mine").options
    where = rf.on("gen", engine=Mine(words=4, max_total_tokens=9))
    assert "gen engine=mine(max_total_tokens=9, words=4)" == where.describe()
    assert {where} == {rf.on("gen", engine=Mine(words=4, max_total_tokens=9))}
    assert ("p", {"name": "n"}) == where.options.load("p", name="n")
    with pytest.raises(PlanError, match=r"E246.*Mine\(args=...\) sets 'words'"):
        Mine(args={"words": 1})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"engine": "", "loader": "a:b"}, "its name is ''"),
        ({"engine": "torch", "loader": "a:b"}, "its name is 'torch'"),
        ({"engine": "a/b", "loader": "a:b"}, "its name is 'a/b'"),
        ({"engine": "mine"}, "nothing says how it is started"),
    ],
)
@pytest.mark.usefixtures("known")
def test_what_cannot_be_an_engine_is_refused(body: dict[str, str], why: str) -> None:
    kind = type("Mine", (EngineOptions,), {"__module__": __name__, **body})
    with pytest.raises(GraphError) as refused:
        rf.register_engine(kind)
    (finding,) = refused.value.findings
    assert ("E262", f"Mine cannot be an engine: {why}") == (finding.code, finding.what)


def test_no_class_of_options_is_no_engine() -> None:
    with pytest.raises(GraphError, match=r"E262.*int cannot be an engine: it is no subclass"):
        rf.register_engine(int)


@pytest.mark.parametrize(
    "options", [rf.SGLang(), rf.VLLM(max_total_tokens=9, args={"block_size": 16})]
)
def test_options_come_back_from_their_json(options: EngineOptions) -> None:
    assert options == options_from_json(options.as_json())
    assert rf.SGLang() != rf.VLLM()


def test_options_of_an_unknown_engine_come_back_as_data() -> None:
    document = {"engine": "theirs", "max_total_tokens": 4, "speed": "high"}
    found = options_from_json(document)
    assert ("theirs", document) == (found.engine, found.as_json())
    with pytest.raises(ValueError, match="without its name"):
        options_from_json({"speed": "high"})


def test_engines_of_equal_options_are_told_apart_in_json() -> None:
    texts = {rf.on("gen", engine=kind()).model_dump_json() for kind in (rf.SGLang, rf.VLLM)}
    assert 2 == len(texts)


@pytest.mark.parametrize("name", [*SAID_ELSEWHERE_VLLM, "max_running_requests"])
def test_arguments_of_vllm_that_are_said_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match=r"E246.*rf.VLLM\(args=...\)"):
        rf.VLLM(args={name: 1})


def test_what_is_not_replayable() -> None:
    assert "ignores seeds" in rf.SGLang(deterministic=True).unseeded(on_cpu=True)
    assert "depends on what else" in rf.SGLang().unseeded(on_cpu=False)
    assert "" == rf.SGLang(deterministic=True).unseeded(on_cpu=False)
    assert "" == rf.VLLM().unseeded(on_cpu=True) == rf.VLLM().unseeded(on_cpu=False)


def test_layers_that_an_engine_adapts_go_by_the_last_part_of_their_names() -> None:
    targets = ("q_proj", "self_attn.o_proj", "dense", "1.mlp.dense")
    assert ["dense"] == rf.SGLang.unadapted(targets)
    assert ["q_proj", "o_proj", "dense"] == rf.VLLM.unadapted(targets)
    assert [] == rf.VLLM.unadapted(())
