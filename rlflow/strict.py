"""Options of the type that they say: True is no number, text is none, and NaN is none either.

Python takes a boolean for 1, and pydantic a text for what it spells; both hide a mistake. One
rule reads the annotation of an option and what was given: `Strict` classes apply it to their
fields, `strict` to the parameters of a function. It holds no option.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from rlflow.errors import Finding, GraphError, Source

P = ParamSpec("P")
R = TypeVar("R")
NUMBERS = {"int", "float"}
CONTAINERS = {"list", "tuple", "dict", "set", "Sequence", "Mapping", "None"}
SAVED = ("Infinity", "-Infinity")


def kinds_of(annotation: Any) -> frozenset[str]:
    """The names of all types in an annotation, those inside of containers too.

    A text is an annotation that has not been evaluated.
    """
    if isinstance(annotation, str):
        return _kinds_of_text(annotation)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return frozenset({"Literal", *(type(one).__name__ for one in inner)})
    if origin is typing.Annotated:
        return kinds_of(inner[0])
    own = {"None" if annotation is types.NoneType else getattr(annotation, "__name__", "Any")}
    if origin is not None:
        own = set() if origin in (typing.Union, types.UnionType) else {origin.__name__}
    return frozenset(own).union(*(kinds_of(one) for one in inner if one is not ...))


@functools.cache
def _kinds_of_text(annotation: str) -> frozenset[str]:
    found = set()
    for node in ast.walk(ast.parse(annotation, mode="eval")):
        if isinstance(node, ast.Name | ast.Attribute):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Constant):
            found.add("None" if node.value is None else type(node.value).__name__)
    return frozenset(found)


def problem(
    value: object, kinds: Iterable[str], *, infinite: bool = False, text: bool = False
) -> str:
    """What an option should have been, or nothing where it is of its kinds.

    `infinite` options may be infinity; of those that come as `text`, texts are left to others.
    """
    names = set(kinds)
    for leaf in _leaves(value):
        if isinstance(leaf, bool):
            wrong = bool(names & NUMBERS) and "bool" not in names
        elif isinstance(leaf, str):
            wrong = not text and leaf not in SAVED and names <= {*NUMBERS, *CONTAINERS, "bool"}
        elif isinstance(leaf, float) and names & NUMBERS:
            wrong = math.isnan(leaf) or (math.isinf(leaf) and not infinite)
            wrong = wrong or ("float" not in names and not (text and leaf.is_integer()))
        else:
            wrong = isinstance(leaf, int | float) and names <= {"bool", "None"}
        if wrong:
            return _said(names)
    return ""


def _leaves(value: object) -> Iterable[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def _said(names: set[str]) -> str:
    if not names & NUMBERS:
        return "True or False"
    number = "a finite number" if "float" in names else "a whole number"
    return number if not names & CONTAINERS - {"None"} else f"{number} in each place"


def strict(
    *, infinite: tuple[str, ...] = (), where: Callable[[], Source | None]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Refuse arguments of a function that are not of their types.

    `infinite` names parameters that may be infinity; `where` finds the user's line. The function
    raises GraphError (E655) with all of them.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*given: P.args, **named: P.kwargs) -> R:
            try:
                found = signature.bind(*given, **named).arguments
            except TypeError:
                return function(*given, **named)  # which says what is wrong
            findings = [
                _wrong(function.__qualname__, name, value, expected, where())
                for name, value in found.items()
                if (expected := _expected(signature.parameters[name], value, name in infinite))
            ]
            if findings:
                raise GraphError(*findings)
            return function(*given, **named)

        return checked

    return decorate


def require(options: object) -> None:
    """Refuse fields of a frozen dataclass that are not of their types, as `strict` does."""
    findings = [
        _wrong(type(options).__name__, field.name, value, expected, None)
        for field in dataclasses.fields(options)  # type: ignore[arg-type]
        if (expected := problem(value := getattr(options, field.name), kinds_of(field.type)))
    ]
    if findings:
        raise GraphError(*findings)


def _expected(parameter: inspect.Parameter, value: object, infinite: bool) -> str:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    if parameter.kind in variable or parameter.annotation is inspect.Parameter.empty:
        return ""
    return problem(value, kinds_of(parameter.annotation), infinite=infinite)


def _wrong(function: str, name: str, value: object, expected: str, where: Source | None) -> Finding:
    own = function.removesuffix(".__init__")
    return Finding(
        code="E655",
        what=f"{own} with {name}={value!r:.60}",
        where=where,
        got=f"{type(value).__name__}",
        expected=expected,
    )
