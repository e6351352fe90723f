"""Functions in all the forms that Python calls: plain ones, partial ones, objects, methods.

What a pipeline says of one: its name, the hints of its parameters, which of them are free, and
where it is written.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from types import CodeType
from typing import Any


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that has the code: what a partial one calls, an object's `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function) or isinstance(function, type):
        return function
    own = getattr(type(function), "__call__", None)  # noqa: B004  the method is looked at
    return function if own is None or not inspect.isfunction(own) else own


def name_of(function: Callable[..., Any]) -> str:
    """Its name; of an object that has none the name of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def full_name_of(function: Callable[..., Any]) -> str:
    """Its name behind its module's; of an object that has none that of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The evaluated annotations of its parameters and its result; none of what has none."""
    try:
        return typing.get_type_hints(plain(function))
    except TypeError:
        return {}


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that are left to give by name: not bound ones, and no `*` or `**`."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = inspect.signature(function).parameters.values()
    return [each for each in found if each.kind not in variable and each.name not in bound]


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """Its code, where it is Python's."""
    return getattr(inspect.unwrap(plain(function)), "__code__", None)
