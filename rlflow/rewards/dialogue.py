"""Tests and the program they test, in two processes: the tests ask, the program answers data.

It runs in both jails. `ask` runs the assertions: a name that they do not define is asked of the
program. What is compared is made and compared beside the tests. `answer` runs the program, which
gets arguments, never what a test expects, and may call what a test passes to it, nothing else.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
from typing import Any

from rlflow.rewards.wire import ALONE, MUTABLE, TOGETHER, PeerLostError, Remote, Values

Message = list[Any]
LARGEST = 2**24
ALIASES = {("np", "numpy"), ("pd", "pandas")}
OF_TESTS = ("call", "__iter__", "__next__")


class Peer:
    """One end of two pipes: sends requests, and answers those of the other side meanwhile.

    The program has names to tell; with them it lets the tests do all that there is to do.
    """

    def __init__(self, reading: int, writing: int, names: dict[str, Any] | None = None) -> None:
        self._in = os.fdopen(reading, "rb")
        self._out = os.fdopen(writing, "wb")
        self._names = names
        self._number = 0
        self.values = Values(self.operate, trusts=names is not None)

    def operate(
        self, operation: str, handle: int, given: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Do something with an object of the other side; mutable arguments change as there."""
        encoded = self.values.encoded
        value, after = self.request(operation, handle, encoded(given), encoded(named))
        for one, changed in zip((*given, *named.values()), after, strict=True):
            if changed is not None:
                _replace(one, self.values.decoded(changed))
        return self.values.decoded(value)

    def name(self, name: str) -> tuple[bool, Any]:
        """Whether the program has a name, and its value."""
        known, value = self.request("name", name)
        return known is True, self.values.decoded(value)

    def request(self, *body: Any) -> Message:
        """What came of a request; raises what the other side raised."""
        self._number += 1
        number = self._number
        self._send(["ask", number, *body])
        while (message := self._receive())[0] == "ask":
            self._answer(message)
        if message[:2] != ["told", number] or len(message) != 5:
            raise PeerLostError(f"an answer that nobody asked for: {message[:2]}")
        _, _, worked, first, second = message
        if worked is True:
            return [first, second]
        raise _error(self.values.decoded(first), self.values.decoded(second))

    def serve(self) -> None:
        """Answer until the other side ends."""
        while True:
            self._answer(self._receive())

    def _answer(self, message: Message) -> None:
        """Do what a request asks for and send what came of it."""
        _, number, kind, *body = message
        try:
            told = self._name_of(*body) if kind == "name" else self._operated(kind, *body)
            self._send(["told", number, True, *told])
        except BaseException as error:
            self._send(["told", number, False, *self._raised(error)])

    def _name_of(self, name: str) -> Message:
        names = self._names or {}
        return [name in names, self.values.encoded(names.get(name))]

    def _operated(self, kind: str, handle: int, arguments: Any, named: Any) -> Message:
        lent = self.values.lent
        if handle not in lent or (self._names is None and kind not in OF_TESTS):
            raise TypeError(f"{kind} is not for this object")
        given, keywords = self.values.decoded(arguments), self.values.decoded(named)
        operate = ALONE.get(kind) or TOGETHER[kind]
        value = self.values.encoded(operate(lent[handle], *given, **keywords))
        after = (*given, *keywords.values())
        return [value, [self.values.encoded(a) if type(a) in MUTABLE else None for a in after]]

    def _raised(self, error: BaseException) -> Message:
        """An error's class and its arguments as texts."""
        kind = type(error) if isinstance(error, Exception) else RuntimeError
        try:
            return [self.values.encoded(kind), self.values.encoded([str(a) for a in error.args])]
        except Exception:
            return [self.values.encoded(RuntimeError), self.values.encoded([])]

    def _send(self, message: Message) -> None:
        self._out.write(json.dumps(message).encode() + b"\n")
        self._out.flush()

    def _receive(self) -> Message:
        line = self._in.readline(LARGEST)
        if not line.endswith(b"\n"):
            raise PeerLostError("the other side is gone")
        message = json.loads(line)
        if not isinstance(message, list) or len(message) < 3:
            raise PeerLostError("no message")
        return message


def _error(kind: Any, arguments: Any) -> Exception:
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise PeerLostError("an error of no class")
    try:
        return kind(*arguments)
    except Exception:
        return RuntimeError(*arguments)


def _replace(old: Any, new: Any) -> None:
    """Make a mutable value equal to another, in place."""
    if type(old) not in MUTABLE or type(old) is not type(new):
        return
    old.clear()
    (old.extend if isinstance(old, list | bytearray) else old.update)(new)


class Names(dict[str, Any]):
    """The names of tests; one that they lack is the program's, never a builtin or a library's."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(__name__="tests")
        self._peer = peer
        self.asked = False

    def __missing__(self, name: str) -> Any:
        """What the program has by this name, looked up each time."""
        if hasattr(builtins, name):
            raise KeyError(name)
        known, value = self._peer.name(name)
        if not known:
            raise KeyError(name)
        module = value._module if isinstance(value, Remote) else ""
        if name in sys.stdlib_module_names:
            return importlib.import_module(name)
        if module and (name == module or (name, module) in ALIASES):
            return importlib.import_module(module)
        self.asked = True
        return value


def answer(program: str) -> None:
    """Run a program and answer on standard output what is asked on standard input."""
    reading, writing = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    space = {"__name__": "solution"}
    exec(compile(program, "solution.py", "exec", dont_inherit=True), space)  # noqa: S102  the program
    try:
        Peer(reading, writing, space).serve()
    except PeerLostError:
        os._exit(0)


def ask() -> None:
    """Run the tests that standard input holds; their token is the output where they hold."""
    tests, token, reading, writing = json.load(sys.stdin)
    said = os.dup(1)
    os.dup2(2, 1)
    names = Names(Peer(reading, writing))
    exec(compile(tests, "tests.py", "exec", dont_inherit=True), names)  # noqa: S102  data of the user
    if names.asked:
        os.write(said, token.encode())
    os._exit(0)
