"""Every option of the public interface refuses what is not of its type, by one rule."""

from __future__ import annotations

import inspect
import math
import typing

import pytest
from pydantic import ValidationError

import rlflow as rf
from rlflow import ops
from rlflow.errors import GraphError, RlflowError
from rlflow.graph.strict_model import Strict
from rlflow.rewards import Limits
from rlflow.strict import NUMBERS, kinds_of, problem, strict


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (True, "float", "a finite number"),
        (True, "int | None", "a whole number"),
        (True, "bool | float", ""),
        (True, "bool", ""),
        (1, "bool", "True or False"),
        (0.0, "bool | None", "True or False"),
        ("yes", "bool", "True or False"),
        (True, "bool | Chat", ""),
        ("1", "float", "a finite number"),
        ("auto", "int | Literal['auto']", ""),
        ("auto", int | typing.Literal["auto"], ""),
        (2.0, "int", "a whole number"),
        (2, "float", ""),
        (None, "int | None", ""),
        (math.nan, "float", "a finite number"),
        (math.inf, "float", "a finite number"),
        ((1.0, True), tuple[float, float], "a finite number in each place"),
        ({"a": True}, "Mapping[str, int]", "a whole number in each place"),
        ({"a": [0, True]}, dict[str, int | list[int]], "a whole number in each place"),
        ("x", "OnError", ""),
    ],
)
def test_the_rule(value, annotation, expected):
    assert expected == problem(value, kinds_of(annotation))


def test_infinity_and_text_where_they_mean_something():
    assert "" == problem(math.inf, {"float"}, infinite=True)
    assert problem(math.nan, {"float"}, infinite=True)
    assert "" == problem("1e-4", {"float"}, text=True)
    assert problem(True, {"float"}, text=True)


def test_all_wrong_arguments_of_a_function_come_at_once():
    @strict(where=lambda: None)
    def made(a: int, *rest: int, b: float = 1.0, c: bool = False, **more: int) -> int:
        return a

    assert 1 == made(1, True, b=2, c=True, d=True)
    with pytest.raises(RlflowError) as caught:
        made(True, b="3", c=1)
    got = [(found.code, found.expected) for found in caught.value.findings]
    expected = ["a whole number", "a finite number", "True or False"]
    assert [("E655", each) for each in expected] == got
    with pytest.raises(TypeError, match="missing 1 required"):
        made()


def options(kind):
    """Numeric and boolean fields of a class of options."""
    for name, field in kind.model_fields.items():
        kinds = kinds_of(field.annotation)
        if kinds & {*NUMBERS, "bool"}:
            yield name, kinds


def subclasses(kind):
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


PUBLIC = sorted(
    {kind for kind in subclasses(Strict) if kind.__module__.startswith("rlflow.")},
    key=lambda kind: kind.__qualname__,
)
WRONG = {
    "number": (True, "1", "1.0", math.nan, [True], {"x": True}),
    "flag": (1, 0, "true", 1.0),
}


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__qualname__)
def test_every_field_of_every_class_of_options(kind):
    """As pydantic sees it: the one error that counts is that of the field."""
    needed = {name: "x" for name, field in kind.model_fields.items() if field.is_required()}
    for name, kinds in options(kind):
        wrongs = WRONG["number"] if kinds & NUMBERS and "bool" not in kinds else ()
        wrongs = WRONG["flag"] if kinds <= {"bool", "None"} else wrongs
        for wrong in wrongs:
            if isinstance(wrong, str) and (kind.TEXT or kinds - NUMBERS - {"None", "tuple"}):
                continue
            with pytest.raises(ValidationError) as caught:
                kind.__pydantic_validator__.validate_python({**needed, name: wrong})
            told = [e for e in caught.value.errors() if e["loc"][:1] == (name,)]
            assert told, (name, wrong)


def test_the_classes_that_a_user_writes_are_among_them():
    named = {name for name in rf.__all__ if inspect.isclass(getattr(rf, name))}
    walked = {kind.__name__ for kind in PUBLIC}
    plain = {"Chat", "Environment", "Handle", "Pipeline", "Row", "Step", "Token", "ToolEnvironment"}
    given = {"CompiledPlan", "Evaluation", "Interval", "IterationDone", "RunHandle", "Simulated"}
    given |= {"TunedPlacements"}
    # Lengths check themselves: what is wrong of them is an E355 wherever it is said.
    checked = {"Length", "Lengths"}
    for wrong in ({"mean": True}, {"mean": "x"}, {"mean": math.nan}, {"mean": 9, "p95": -3}):
        with pytest.raises(GraphError, match="E355"):
            rf.Length(**wrong)
    assert named - plain - given - checked - {"Iterations", "Sampler", "Scorer"} <= walked
    with pytest.raises(RlflowError):
        rf.Iterations(True)


def called(function, name, wrong):
    """The findings of a call with one argument wrong and the others left to their names."""
    given = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        given[parameter.name] = None
    given[name] = wrong
    try:
        function(**given)
    except RlflowError as error:
        return [found for found in error.findings if found.code == "E655"]
    except Exception:
        return []
    return []


SOURCES = ["arithmetic", "generator", "huggingface", "jsonl", "mix", "parquet"]
FUNCTIONS = [getattr(ops, name) for name in ops.__all__]
FUNCTIONS += [getattr(rf.data, name) for name in SOURCES]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_number_of_every_function(function):
    for parameter in inspect.signature(function).parameters.values():
        kinds = kinds_of(str(parameter.annotation))
        variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if variable or not kinds & {*NUMBERS, "bool"}:
            continue
        wrongs = (True, math.nan, "1") if kinds & NUMBERS and "bool" not in kinds else ()
        wrongs = (1, "yes") if kinds <= {"bool", "None"} else wrongs
        for wrong in wrongs:
            found = called(function, parameter.name, wrong)
            if isinstance(wrong, str) and kinds & {"str", "Literal", "Callable"}:
                continue
            assert any(f"{parameter.name}=" in each.what for each in found), (parameter, wrong)


def test_numbers_within_a_mapping():
    source = rf.data.arithmetic(digits=2)
    for wrong in (True, math.nan):
        with pytest.raises(RlflowError) as caught:
            rf.data.mix({"a": source}, {"a": wrong})
        assert "E655" == caught.value.findings[0].code


def test_limits_of_jails():
    for name in ("cpu", "wall", "memory", "disk", "output", "processes"):
        for wrong in (True, "1", math.nan):
            with pytest.raises(RlflowError, match="E655"):
                Limits(**{name: wrong})


def test_options_of_estimators():
    from rlflow.ops.estimator_options import RANGES, _within

    for low, high in RANGES.values():
        assert not any(_within(wrong, low, high) for wrong in (True, "1", math.nan, math.inf))


def test_a_finding_at_the_line():
    @rf.pipeline()
    def made(cfg: rf.Config) -> None:
        ops.prompts(rf.data.arithmetic(digits=2), batch=True)

    with pytest.raises(RlflowError) as caught:
        made.trace()
    (found,) = caught.value.findings
    assert ("E655", "prompts with batch=True") == (found.code, found.what)
    assert "batch=True" in found.where.text


def test_settings_of_a_config():
    class Mine(rf.Config):
        rate: float = 0.1

    assert 0.2 == Mine(rate="0.2").rate
    for wrong in ({"iterations": True}, {"rate": True}, {"rate": math.nan}):
        with pytest.raises(ValidationError):
            Mine(**wrong)
