"""Assertion tests: what they may ask of a program, and what a program cannot make them believe."""

from __future__ import annotations

import asyncio
import json

import pytest

import rlflow as rf
from rlflow.rewards.walls import Limits

LIES = "class Yes(int):\n    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = lambda *_: True\n"
LIES += "    __ne__ = lambda *_: False\n    __hash__ = int.__hash__\n"
LIES += "    __sub__ = __rsub__ = lambda *_: Yes(0)\n    __abs__ = lambda s: s\n"
LIAR = "class Liar:\n" + "".join(
    f"    __{name}__ = lambda *_: True\n" for name in ("eq", "lt", "gt", "contains", "bool")
)
LIAR += "    __sub__ = __rsub__ = __abs__ = lambda s, *_: s\n    __hash__ = lambda s: 4\n"
LIAR += "    def __getattr__(self, name): return lambda *_: True\n"


def scored(program, test):
    made = rf.rewards.code(limits=Limits(cpu=2, wall=10), isolation="limits")
    return asyncio.run(made(response=program, tests=json.dumps([test])))


ATTACKS = {
    "descriptors": (
        "import json, os\nfor fd in range(3, 64):\n    try:\n        os.set_blocking(fd, False)\n"
        "        token = json.loads(os.read(fd, 10000))[1]\n"
        "        for out in range(1, 64):\n            try: os.write(out, token.encode())\n"
        "            except OSError: pass\n        os._exit(0)\n"
        "    except (OSError, ValueError, TypeError, IndexError): pass\ndef double(x): return 0"
    ),
    "answers of its own": (
        "import json, os\nfor number in range(1, 9):\n"
        "    for fd in range(1, 64):\n        try: os.write(fd, (json.dumps("
        "['told', number, True, True, ['i', '0x4']]) + '\\n').encode())\n"
        "        except OSError: pass\ndef double(x): return 0"
    ),
    "json": (
        "import json\nold = json.loads\njson.load = lambda file: ['', old(file.read())[1]]\n"
        "def double(x): return 0"
    ),
    "compile": (
        "import builtins\nold = compile\n"
        "builtins.compile = lambda text, *a, **k: old('pass', 'x', 'exec')\n"
        "builtins.exec = lambda *_: None\ndef double(x): return 0"
    ),
    "equality": f"{LIES}def double(x): return Yes(0)",
    "an object that equals": f"{LIAR}def double(x): return Liar()",
    "a class in place of a function": f"{LIAR}class double(Liar):\n    def __init__(self, x): pass",
    "builtins": "import builtins\nbuiltins.AssertionError = None\ndef double(x): return 0",
    "the harness": (
        "import gc, sys\nfor found in gc.get_objects():\n"
        "    if type(found).__name__ == 'Peer': found._answer = lambda m: None\n"
        "for name, module in list(sys.modules.items()):\n"
        "    if 'dialogue' in name or 'wire' in name:\n"
        "        module.Names = dict\n        module.ask = lambda: None\n"
        "def double(x): return 0"
    ),
    "an end in the call": "def double(x):\n    import os; os._exit(0)",
    "an error of another kind": "def double(x): raise SystemExit(0)",
    "the library of the tests": (
        f"{LIAR}import sys\nmath = Liar()\nsys.modules['math'] = math\n"
        "len = abs = isinstance = lambda *_: True\ndef double(x): return 0"
    ),
}
DOUBLES = (
    "assert double(2) == 4",
    "assert 4 == double(2)",
    "assert abs(double(2) - 4) < 1e-6",
    "assert double(2) in [4, 5] and 3 < double(2) < 5",
    "assert math.isclose(double(2), 4)",
)


ANY = "import math\nheld = False\n" + "\n".join(
    f"try:\n    {line}\n    held = True\nexcept Exception: pass" for line in DOUBLES
)


def test_a_right_program_passes_each_of_them():
    assert 1.0 == scored("def double(x): return 2 * x", "import math\n" + "\n".join(DOUBLES))


@pytest.mark.rows(5)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_verdict_cannot_be_forged(attack):
    """Not one of the lines holds, though an error in another is no end."""
    assert 0.0 == scored(ATTACKS[attack], f"{ANY}\nassert held")


@pytest.mark.slow
def test_predicates_and_members_are_those_of_data():
    program = f"{LIAR}def f(x): return Liar()"
    for test in ("f(1).startswith('a')", "4 in f(1)", "f(1).issuperset({4})", "f(1) == 'a'"):
        assert 0.0 == scored(program, f"assert {test}"), test


def test_tests_that_ask_nothing_do_not_pass():
    assert 0.0 == scored("def total(x): return 0", "assert sum([1, 2]) == 3")


PROGRAM = """
import collections, enum, math
import numpy as np
LIMIT = 7
class Odd(ValueError):
    pass
class Point(collections.namedtuple("Point", "x y")):
    def flipped(self): return Point(self.y, self.x)
class Color(enum.IntEnum):
    RED = 1
class Stack:
    size = 0
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item); self.size += 1
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
    def __hash__(self): return 0
    def __add__(self, other): return Stack(*self.items, *other.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, place): return self.items[place]
    def __str__(self): return f"Stack{self.items}"
    def __enter__(self): return self
    def __exit__(self, *_): self.items = ["left"]
def half(x):
    if x % 2: raise Odd(f"{x} is odd")
    return x // 2
def value(kind):
    return {"set": {1, 2}, "tuple": (1, (2.5, None)), "bytes": b"ab", "dict": {(1, 2): [3]},
            "float": float("inf"), "complex": 1j, "big": 3 ** 5000, "text": "\\ud800é\\n",
            "frozen": frozenset("a"), "array": bytearray(b"x"), "range": range(3)}[kind]
def sort(items, done=None): items.sort(); done is not None and done.append("yes")
def each(function, items): return [function(item) for item in items]
def count(most):
    for number in range(most): yield number
def counter():
    state = [0]
    def step(): state[0] += 1; return state[0]
    return step
def histogram(text): return collections.Counter(text)
def scaled(x): return np.asarray(x) * 2.0
def first_two(items): return [next(items), next(items)]
def missing(items): return {}[items]
"""
HOLD = [
    "assert LIMIT == 7 and half(8) == 4 and isinstance(half(8), int)",
    "assert value('set') == {1, 2} and value('tuple') == (1, (2.5, None))",
    "assert value('bytes') == b'ab' and value('dict') == {(1, 2): [3]} and value('big') == 3**5000",
    "assert value('float') == float('inf') and value('complex') == 1j and value('text') == "
    "'\\ud800é\\n'",
    "assert value('frozen') == frozenset('a') and type(value('array')) is bytearray",
    "assert list(value('range')) == [0, 1, 2] and LIMIT in value('range') or True",
    "try: half(3); assert False\nexcept Odd as error: assert str(error) == '3 is odd'",
    "try: half(3); assert False\nexcept ValueError: pass",
    "try: missing('k'); assert False\nexcept KeyError: pass",
    "x = [3, 1, 2]; d = []; sort(x, done=d); assert x == [1, 2, 3] and d == ['yes']",
    "assert each(lambda x: x + LIMIT, (1, 2)) == [8, 9] and each(len, ['ab']) == [2]",
    "import operator\nassert each(operator.neg, range(3)) == [0, -1, -2]",
    "assert list(count(3)) == [0, 1, 2] and next(count(2)) == 0 and sum(count(4)) == 6",
    "assert first_two(iter([1, 2, 3])) == [1, 2] and first_two(x for x in 'abc') == ['a', 'b']",
    "c = counter(); assert (c(), c()) == (1, 2)",
    "s = Stack(1); s.push(2); assert s.pop() == 2 and len(s) == 1 and s.size == 1",
    "s = Stack(1); s.size = 5; assert s.size == 5 and isinstance(s, Stack) and s[0] == 1",
    "assert Stack(1) == Stack(1) and Stack(1) != Stack(2) and len({Stack(1), Stack(1)}) == 1",
    "assert Stack(1) + Stack(2) == Stack(1, 2) and list(Stack(1)) == [1] and 2 in Stack(1, 2)",
    "assert str(Stack(1)) == 'Stack[1]' and f'{Stack(2)}' == 'Stack[2]' and bool(Stack(1))",
    "with Stack() as s: pass\nassert s.pop() == 'left'",
    "p = Point(1, 2); assert p == (1, 2) and p.x == 1 and p.flipped() == (2, 1)",
    "assert isinstance(Point(1, 2), Point) and not isinstance(3, Stack)",
    "assert Color.RED == 1 and Color.RED.name == 'RED'",
    "assert histogram('aab') == {'a': 2, 'b': 1} and histogram('aab').most_common(1) == [('a', 2)]",
    "assert (scaled([1, 2]) == np.array([2, 4])).all() and scaled(2) == 4.0",
    "assert math.isclose(half(8), 4)",
    "def check(candidate):\n    assert candidate(8) == 4\ncheck(half)",
    "class T:\n    def run(self): return half(2)\nassert T().run() == 1",
]


@pytest.mark.slow
def test_what_tests_may_ask():
    """One jail for all of them; each is a function, so that the first that fails is named."""
    listed = [f"exec({test!r}, globals())" for test in HOLD]
    told = [f"except Exception as error: raise Exception({test!r}) from error" for test in HOLD]
    lines = (f"try: {test}\n{error}" for test, error in zip(listed, told, strict=True))
    assert 1.0 == scored(PROGRAM, "\n".join(lines))
