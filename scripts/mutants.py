"""Small changes to the source, one at a time, and whether the tests notice.

    python scripts/mutants.py map  -m "not slow and not ray"     which functions each test runs
    python scripts/mutants.py run --count 100 --seed 14 --results before.jsonl

A mutant is a comparison, an operator, a constant, a condition or a returned value that is another
one. It is tried on a copy of the tree, with the tests that run its function, the most specific
first; a test that is late counts as one that fails. Results are appended as they come, so a run
that was stopped goes on. With the same seed and sources the mutants are the same.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("rlflow/scheduler", "rlflow/runtime", "rlflow/ops/math")
COMPARED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COUNTED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip


# What is changed of these is a part of them.
TESTED = (ast.If, ast.IfExp, ast.While, ast.Return)


class Mutant(NamedTuple):
    """Where a file is changed: a span of its text, what stands there, and what is put there."""

    path: str
    function: str
    kind: str
    line: int
    start: int
    end: int
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.kind}: {self.was} -> {self.now}"


def changed(node: ast.AST) -> tuple[str, ast.AST] | None:
    """A mutation of a node by its kind, if it has one."""
    found: tuple[str, ast.AST] | None = None
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in COMPARED:
            found = "comparison", ast.Compare(left, [COMPARED[type(op)]()], right)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in COUNTED:
            if not any(_is_text(side) for side in (left, right)):
                found = "arithmetic", ast.BinOp(left, COUNTED[type(op)](), right)
        case ast.Constant(value=bool(value)):
            found = "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            found = "constant", ast.Constant(value + 1)
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            found = "boolean", ast.BoolOp(other, values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            found = "boolean", operand
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            found = "boolean", ast.UnaryOp(ast.Not(), test)
        case ast.Return(value=ast.AST()):
            found = "return", ast.Constant(None)
    return found


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def mutants(root: Path, path: str) -> Iterator[Mutant]:
    """The mutants of a file, in the order of its functions; nothing outside of functions."""
    text = (root / path).read_text()
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in _own_nodes(function):
            found = changed(node)
            where: Any = getattr(node, "test", getattr(node, "value", None))
            where = where if isinstance(node, TESTED) else node
            if found is None or _is_none(where):
                continue
            start = starts[where.lineno - 1] + where.col_offset
            end = starts[where.end_lineno - 1] + where.end_col_offset
            was = " ".join(text.encode()[start:end].decode().split())
            now = f"({ast.unparse(ast.fix_missing_locations(found[1]))})"
            place = f"{function.name}:{function.lineno}"
            yield Mutant(path, place, found[0], where.lineno, start, end, was, now)


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's body without functions within it, annotations and f-strings."""
    for child in getattr(function, "body", []):
        waiting = [child]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.JoinedStr):
                continue
            yield node
            left_out = {getattr(node, "annotation", None)}
            waiting += [one for one in ast.iter_child_nodes(node) if one not in left_out]


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def sampled(root: Path, options: argparse.Namespace) -> list[Mutant]:
    """So many mutants of the folders, the same for a seed; kinds come by their share."""
    files = sorted(p for folder in options.under for p in (root / folder).rglob("*.py"))
    found = [each for file in files for each in mutants(root, str(file.relative_to(root)))]
    return random.Random(options.seed).sample(found, min(options.count, len(found)))  # noqa: S311


def copied(into: Path) -> Path:
    """A copy of what git tracks, and of what is new and not ignored."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(  # noqa: S603
        words, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)
    return into


class Called:
    """A plugin of pytest that notes which functions of the folders each test calls."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._calls: dict[str, set[str]] = defaultdict(set)
        self._seen: set[Any] = set()
        self._test = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins: what it calls from here on is its own."""
        self._test = nodeid
        self._seen.clear()
        import threading

        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def pytest_runtest_logfinish(self) -> None:
        """A test has ended."""
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        self._seen.add(code)
        _, found, rest = code.co_filename.partition("/rlflow/")
        if found and f"rlflow/{rest}".startswith(FOLDERS):
            self._calls[self._test].add(f"rlflow/{rest}:{code.co_name}")

    def pytest_sessionfinish(self) -> None:
        """Write what was found, beside what the file had of other tests."""
        if self._calls:
            held = json.loads(self._file.read_text()) if self._file.exists() else {}
            found = {test: sorted(calls) for test, calls in self._calls.items()}
            self._file.write_text(json.dumps(held | found))


def tests_of(mutant: Mutant, calls: dict[str, list[str]], root: Path) -> list[str]:
    """The tests that call a mutant's function, most specific first; else by what files import."""
    wanted = f"{mutant.path}:{mutant.function.partition(':')[0]}"
    found = [test for test, called in calls.items() if wanted in called]
    found = [test for test in found if (root / test.partition("::")[0]).exists()]
    if found:
        return sorted(found, key=lambda test: (len(calls[test]), test))
    module = mutant.path.removesuffix(".py").replace("/", ".")
    name = module.rpartition(".")[2]
    files = sorted(root.glob("tests/**/test_*.py"))
    return [str(f.relative_to(root)) for f in files if module in f.read_text() or name in f.name]


def tried(mutant: Mutant, tests: list[str], root: Path, late: float, most: float) -> str:
    """How a mutant ends: `killed`, `timeout`, `survived`, or `untested`."""
    if not tests:
        return "untested"
    file = root / mutant.path
    whole = file.read_bytes()
    file.write_bytes(whole[: mutant.start] + mutant.now.encode() + whole[mutant.end :])
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    words += ["--no-header", "--tb=no", f"--timeout={late}", "-m", "not ray and not sglang"]
    environment = {**os.environ, "PYTHONPATH": str(root), "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # A list of words is short; tests go in pieces of some hundred.
    ends = time.monotonic() + most
    try:
        for first in range(0, len(tests), 300):
            left = max(ends - time.monotonic(), 1)
            done = subprocess.run(  # noqa: S603
                [*words, *tests[first : first + 300]],
                cwd=root,
                env=environment,
                capture_output=True,
                timeout=left,
                check=False,
            )
            if done.returncode not in (0, 5):  # 5: nothing was selected
                return "killed"
        return "survived"
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        file.write_bytes(whole)


def run(options: argparse.Namespace) -> None:
    """Try a sample of mutants, but for those that the results already have."""
    known = options.results.read_text().splitlines() if options.results.exists() else []
    done = {json.loads(line)["mutant"]: json.loads(line)["end"] for line in known}
    calls = json.loads(options.calls.read_text()) if options.calls.exists() else {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = copied(Path(folder))
        for mutant in sampled(root, options):
            if str(mutant) in done:
                continue
            began = time.monotonic()
            tests = tests_of(mutant, calls, root)
            end = tried(mutant, tests, root, options.late, options.most)
            took = round(time.monotonic() - began, 1)
            done[str(mutant)] = end
            line = {"mutant": str(mutant), "end": end, "tests": len(tests), "seconds": took}
            with options.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            sys.stdout.write(f"{end:9} {took:6.1f}s {mutant}\n")
            sys.stdout.flush()
        chosen = {str(each) for each in sampled(root, options)}
    counted = Counter(end for name, end in done.items() if name in chosen)
    sys.stdout.write(f"{dict(counted)}\n")


def map_calls(options: argparse.Namespace, words: list[str]) -> None:
    """Run tests in this process and note what each of them calls."""
    import pytest

    sys.path.insert(0, str(ROOT))
    sys.exit(pytest.main(words, plugins=[Called(options.calls)]))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("command", choices=["map", "run"])
    parser.add_argument("--calls", type=Path, default=ROOT / ".mutants-calls.json")
    parser.add_argument("--results", type=Path, default=ROOT / ".mutants.jsonl")
    parser.add_argument("--under", nargs="+", default=FOLDERS, help="folders of the source")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--late", type=float, default=60, help="seconds that a test may take")
    parser.add_argument("--most", type=float, default=900, help="seconds that a mutant may take")
    options, words = parser.parse_known_args()
    if options.command == "map":
        map_calls(options, words)
    run(options)


if __name__ == "__main__":
    main()
