"""The source of a user's function, and of all of the user's own that it names, as digests.

Read from the files alone, so that no value of a running program counts: a function, class or
constant is the text that Python's own parser makes of its statement, without comments, blanks
and docstrings. What is installed, rlflow's own and Python's, is not looked at.
"""

from __future__ import annotations

import ast
import hashlib
import linecache
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from pydantic import BaseModel

from rlflow.userfiles import INSTALLED, OWN

DIGITS = 12
PLAIN = (bool, int, float, str, bytes, type(None))
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
Digests = dict[str, str]


def source_digests(value: object) -> Digests:
    """A digest by name of every function of the user's in a value, and of what those name."""
    found: Digests = {}
    for function in functions_in(value):
        _Reader(found).function(function)
    return found


def functions_in(value: object, depth: int = 4) -> Iterator[FunctionType]:
    """The plain functions that a value is or holds: in collections, objects and partial calls."""
    if isinstance(value, FunctionType):
        yield value
        return
    if depth:
        for part in _parts(value):
            yield from functions_in(part, depth - 1)


def _parts(value: object) -> list[object]:
    """What a value holds that may be called."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, BaseModel):
        return list(vars(value).values())
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, each.name) for each in fields(value) if each.name[0] != "_"]
    held = [getattr(value, name, None) for name in ("functions", "function", "fn", "op")]
    return [*held, getattr(type(value), "__call__", None)]  # noqa: B004  the method is looked at


@dataclass(frozen=True, slots=True)
class _Reader:
    """Adds the digests of what it reads to those `found`."""

    found: Digests

    def function(self, function: FunctionType) -> None:
        """Add a function's own, and what its names and the variables around it stand for."""
        code = function.__code__
        if not _own(code.co_filename):
            return
        node = _definition(code)
        if not self._add(function.__qualname__, _text(node) if node else _compiled(code)):
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._held(f"{function.__qualname__}.{name}", cell, code)
        names = _names(node) if node else set(code.co_names)
        self._named(code.co_filename, names, function.__globals__)

    def _held(self, name: str, cell: Any, code: CodeType) -> None:
        """Add a variable of the function around: its plain value, or those of its fields named."""
        try:
            value = cell.cell_contents
        except ValueError:
            return
        if isinstance(value, FunctionType):
            self.function(value)
        elif isinstance(value, PLAIN):
            self._add(name, repr(value))
        else:
            read = {key: getattr(value, key, None) for key in code.co_names}
            plain = {key: each for key, each in read.items() if isinstance(each, PLAIN)}
            self._add(name, repr(plain))

    def _named(self, file: str, names: set[str], space: Mapping[str, Any]) -> None:
        """Add what names stand for in a file: its own statements, or what it imports."""
        there = _statements(file)
        for name in sorted(names):
            value = space.get(name)
            if name in there:
                text = "\n".join(_text(node) for node in there[name])
                if self._add(name, text):
                    used = set[str]().union(*(_names(node) for node in there[name]))
                    self._named(file, used, space)
            elif isinstance(value, FunctionType):
                self.function(value)
            elif isinstance(value, ModuleType) and _own(getattr(value, "__file__", None)):
                self._named(str(value.__file__), names, vars(value))
            elif isinstance(value, type):
                home = sys.modules.get(value.__module__)
                if home is not None and _own(getattr(home, "__file__", None)):
                    self._named(str(home.__file__), {value.__name__}, vars(home))
            else:
                for function in functions_in(value):
                    self.function(function)

    def _add(self, name: str, text: str) -> bool:
        """Whether it was not there yet."""
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:DIGITS]
        known = self.found.get(name)
        if known is not None and digest in known.split("+"):
            return False
        self.found[name] = "+".join(sorted({digest, *(known.split("+") if known else ())}))
        return True


def _own(file: str | None) -> bool:
    """Whether a file is the user's: not installed, not Python's, not rlflow's."""
    if file is None:
        return False
    path = Path(file)
    installed = INSTALLED & set(path.parts) or path.is_relative_to(_library())
    return not installed and not path.is_relative_to(OWN)


@cache
def _library() -> str:
    return sysconfig.get_path("stdlib")


def _tree(file: str) -> ast.Module:
    """A file as it is now, parsed; empty where there is none, or it is no Python."""
    linecache.checkcache(file)
    return _parsed("".join(linecache.getlines(file)))


@cache
def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def _statements(file: str) -> dict[str, list[ast.stmt]]:
    """The statements of a file that define each name; imports define nothing."""
    found: dict[str, list[ast.stmt]] = {}
    for node in _tree(file).body:
        for name in _defined(node):
            found.setdefault(name, []).append(node)
    return found


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {name.id for name in stored if isinstance(name.ctx, ast.Store)}


def _definition(code: CodeType) -> Definition | None:
    """The statement or expression that a function was made of; None where it is not to be found."""
    for node in ast.walk(_tree(code.co_filename)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if (node.name, first) == (code.co_name, code.co_firstlineno):
                return node
        elif isinstance(node, ast.Lambda) and node.lineno == code.co_firstlineno:
            return node
    return None


def _names(node: ast.AST) -> set[str]:
    """All names that a piece of source uses, those behind a dot too."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def _text(node: ast.AST) -> str:
    """A piece of source in the parser's words, without docstrings."""
    return ast.unparse(_Plain().visit(ast.parse(ast.unparse(node))))


class _Plain(ast.NodeTransformer):
    """Leaves docstrings out."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        return node


def _compiled(code: CodeType) -> str:
    """A function without source, as the interpreter has it."""
    inner = [
        _compiled(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {inner}"
