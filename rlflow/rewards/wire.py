"""Values between two processes, one of which trusts the other: data by value, the rest lent.

It runs in jails, and imports nothing of rlflow. Data keeps its value whatever its class says of
itself: a subclass of a number, a text or a container travels as the plain one, with the
attributes of its class behind it. Anything else stays where it is, and the other side holds a
`Remote` of it, which is never equal to data, is not compared or reckoned with data, and has none
of the predicates of data: its class could answer whatever the other side would like to hear.
"""

from __future__ import annotations

import builtins
import importlib
import operator
import sys
from collections.abc import Callable
from typing import Any, Protocol

Encoded = Any
KEYED = {list: "l", tuple: "t", set: "S", frozenset: "F"}
MUTABLE = (list, dict, set, bytearray)
NUMBERS = "biufc"

ALONE: dict[str, Callable[..., Any]] = {
    "call": lambda found, *given, **named: found(*given, **named),
    "attribute": getattr,
    "set": setattr,
    "instance": lambda kind, found: isinstance(found, kind),
    "__len__": len,
    "__iter__": iter,
    "__next__": next,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__bool__": bool,
    "__int__": int,
    "__float__": float,
    "__index__": operator.index,
    "__str__": str,
    "__repr__": repr,
    "__hash__": hash,
    "__abs__": abs,
    "__neg__": operator.neg,
    "__round__": round,
    "__enter__": lambda found: found.__enter__(),
    "__exit__": lambda found, *_: found.__exit__(None, None, None),
}
OF_TWO = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod")
OF_TWO_MORE = ("pow", "matmul", "and_", "or_", "xor")
TOGETHER = {f"__{name.rstrip('_')}__": getattr(operator, name) for name in (*OF_TWO, *OF_TWO_MORE)}
PREDICATES = {
    name
    for kind in (str, bytes, list, tuple, dict, set, int, float)
    for name in dir(kind)
    if name.startswith("is") or name.endswith("with")
}


class PeerLostError(BaseException):
    """The other side is gone, or says what nobody asked; no `except Exception` holds it."""


class Operate(Protocol):
    """Does something with an object of the other side."""

    def __call__(
        self, operation: str, handle: int, given: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """What came of it."""


class Remote:
    """An object of the other side."""

    def __init__(self, operate: Operate, handle: int, module: str = "") -> None:
        for name, value in (("_operate", operate), ("_handle", handle), ("_module", module)):
            object.__setattr__(self, name, value)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call it there."""
        return self._operate("call", self._handle, given, named)

    def __getattr__(self, name: str) -> Any:
        """Its attribute there; not what only data has, nor what Python asks for by itself."""
        if name.startswith("__") or name in PREDICATES:
            raise AttributeError(f"an object of the program has no {name!r} here")
        return self._operate("attribute", self._handle, (name,), {})

    def __setattr__(self, name: str, value: Any) -> None:
        """Set its attribute there."""
        self._operate("set", self._handle, (name, value), {})

    def __instancecheck__(self, found: Any) -> bool:
        """Whether an object of the same side is one of this class."""
        remote = type(found).__dict__.get("_remote", found)
        if not isinstance(remote, Remote):
            return False
        return self._operate("instance", self._handle, (remote,), {}) is True

    def __hash__(self) -> int:
        """Asked there, as the dictionaries and sets of there would."""
        return int(self._operate("__hash__", self._handle, (), {}))

    def __eq__(self, other: object) -> Any:
        """Asked there, between objects of there; never equal to data."""
        if not isinstance(other, Remote):
            return False
        same = self._handle == other._handle
        return same or self._operate("__eq__", self._handle, (other,), {})

    def __ne__(self, other: object) -> Any:
        """Asked there, between objects of there; always other than data."""
        if not isinstance(other, Remote):
            return True
        return self._operate("__ne__", self._handle, (other,), {})


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Remote, *given: Any) -> Any:
        if name in TOGETHER and not isinstance(given[0], Remote):
            return NotImplemented
        return self._operate(name, self._handle, given, {})

    return method


for _name in (*ALONE, *TOGETHER):
    if _name.startswith("__") and _name not in Remote.__dict__:
        setattr(Remote, _name, _forwarded(_name))


class Values:
    """Values to JSON and back, and what of this side has been lent.

    With `trusts` this side takes functions of the standard library from the other one.
    """

    def __init__(self, operate: Operate, *, trusts: bool) -> None:
        self.lent: dict[int, Any] = {}
        self._operate = operate
        self._trusts = trusts
        self._handles: dict[int, int] = {}
        self._remotes: dict[int, Any] = {}

    def encoded(self, value: Any) -> Encoded:
        """A value as JSON: data by value, the other side's objects as theirs, others lent."""
        if value is None or type(value) is bool:
            return value
        value = type(value).__dict__.get("_remote", value)
        if isinstance(value, Remote):
            return ["own", value._handle]
        for base, tag, plain in self._plain():
            if isinstance(value, base):
                beside = [] if type(value) is base else [self._lend(value)]
                return [tag, plain(value), *beside]
        return self._encoded_object(value)

    def _plain(self) -> list[tuple[type, str, Callable[[Any], Any]]]:
        """Kinds of data, their signs, and how each is read whatever a subclass says."""
        each = self.encoded
        pairs = lambda found: [[each(key), each(one)] for key, one in dict.items(found)]  # noqa: E731
        listed = [
            (kind, tag, lambda found, kind=kind: [each(one) for one in kind.__iter__(found)])
            for kind, tag in KEYED.items()
        ]
        return [
            (str, "s", lambda found: str.__str__(found)),
            (bytes, "b", lambda found: bytes.hex(found)),
            (bytearray, "y", lambda found: bytearray.hex(found)),
            (int, "i", lambda found: hex(int.__index__(found))),
            (float, "f", lambda found: float.hex(found)),
            (complex, "c", lambda found: [found.real.hex(), found.imag.hex()]),
            (dict, "d", pairs),
            *listed,
        ]

    def _encoded_object(self, value: Any) -> list[Any]:
        name, module = getattr(value, "__name__", None), getattr(value, "__module__", None)
        if type(value) is range:
            return ["r", [value.start, value.stop, value.step]]
        if isinstance(name, str) and getattr(builtins, name, self) is value:
            return ["builtin", name]
        if isinstance(value, type) and issubclass(value, Exception):
            base = next(one for one in value.__mro__ if of_module("builtins", one.__name__) is one)
            return ["error", [base.__name__, name], self._lend(value)]
        if module in sys.stdlib_module_names and of_module(module, name) is value:
            return ["library", [module, name], self._lend(value)]
        if isinstance(value, type(sys)):
            return ["module", name, self._lend(value)]
        array = _as_array(value)
        return ["lent", None, self._lend(value)] if array is None else ["array", array]

    def _lend(self, value: Any) -> int:
        handle = self._handles.setdefault(id(value), len(self.lent))
        self.lent[handle] = value
        return handle

    def decoded(self, found: Encoded) -> Any:
        """The value of what `encoded` has made on the other side; LostError for anything else."""
        if found is None or found is True or found is False:
            return found
        try:
            tag, body, *beside = found
            made = self._made(tag, body)
            if made is self:
                return self._object(tag, body, beside[0])
            return self._shadow(made, beside[0]) if beside else made
        except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
            raise PeerLostError(f"a value that is none: {found!r:.80}") from error

    def _made(self, tag: str, body: Any) -> Any:
        """Data of its sign and body; this object itself for what is no data."""
        readers: dict[str, Callable[[Any], Any]] = {
            "s": str,
            "b": bytes.fromhex,
            "y": bytearray.fromhex,
            "i": lambda text: int(text, 16),
            "f": float.fromhex,
            "c": lambda parts: complex(*map(float.fromhex, parts)),
            "d": lambda pairs: {self.decoded(key): self.decoded(one) for key, one in pairs},
            "r": lambda parts: range(*parts),
            "own": lambda handle: self.lent[handle],
            "builtin": self._builtin,
            "array": _array_of,
        }
        for kind, sign in KEYED.items():
            if sign == tag:
                return kind(map(self.decoded, body))
        return readers[tag](body) if tag in readers else self

    def _builtin(self, name: str) -> Any:
        """A type that is built in; a function only of a side that is trusted."""
        found = getattr(builtins, name)
        if not self._trusts and not isinstance(found, type):
            raise ValueError(name)
        return found

    def _object(self, tag: str, body: Any, handle: int) -> Any:
        """A class, a function or another object of the other side."""
        if tag == "library" and self._trusts:
            return of_module(*body)
        if not isinstance(handle, int):
            raise ValueError(handle)
        if handle not in self._remotes:
            self._remotes[handle] = (
                type(str(body[1]), (_error_class(body[0]),), {})
                if tag == "error"
                else Remote(self._operate, handle, body if tag == "module" else "")
            )
        return self._remotes[handle]

    def _shadow(self, value: Any, handle: int) -> Any:
        """Data, with the attributes of the class that it has on the other side."""
        remote, base = Remote(self._operate, handle), type(value)
        attributes = {"_remote": remote, "__getattr__": lambda _, name: getattr(remote, name)}
        return type(base.__name__, (base,), attributes)(value)


def of_module(module: Any, name: Any) -> Any:
    """What a module has by a name; a value that nobody else has without it."""
    try:
        return getattr(importlib.import_module(module), name, of_module)
    except (ImportError, TypeError):
        return of_module


def _error_class(name: str) -> type[Exception]:
    found = getattr(builtins, name, Exception)
    return found if isinstance(found, type) and issubclass(found, Exception) else Exception


def _as_array(value: Any) -> list[Any] | None:
    """An array or a number of numpy; None for what is none."""
    if type(value).__module__ != "numpy" or not hasattr(value, "tobytes"):
        return None
    kind = value.dtype
    return [kind.str, list(value.shape), value.tobytes().hex()] if kind.kind in NUMBERS else None


def _array_of(parts: list[Any]) -> Any:
    import numpy

    text, shape, body = parts
    kind = numpy.dtype(text)
    if kind.kind not in NUMBERS:
        raise ValueError(text)
    made = numpy.frombuffer(bytes.fromhex(body), kind).reshape(shape).copy()
    return made if shape else made.item()
