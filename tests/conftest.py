"""The command line in this process, and in one of its own."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from tests.budget import DRAWS, SLOW_SHARE, drawn, examples
from tests.rewriting import rewrite

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

# Examples are not timed: the machine may be busy. CI draws the same ones every time.
settings.register_profile(
    "local",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if "CI" in os.environ else "local")

# Nothing that was measured on this machine reaches a test.
os.environ["RLFLOW_COSTS"] = "off"
# Tests plan on CPU devices wherever they run; those of GPUs say so.
os.environ["RLFLOW_GPUS"] = "off"

# Threads of OpenMP sleep while they wait: spinning ones of two processes cost both a factor of 40.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Trees of the whole package are kept for tests of its shape: few collections walk over them.
gc.set_threshold(100_000, 20, 20)

# Tests that wait for processes of their own more than they compute.
WAITING = ("ray", "sglang", "vllm")

# What takes a worker seconds to make for its first test of a kind, and how a file asks for it:
# the server that forks ranks, a cluster of two nodes, the trees of the package.
MADE = {
    "ranks": re.compile(r"\bworld\("),
    "nodes": re.compile(r"def test_\w+\((?:\w+, )*(?:two_nodes|join)\b"),
    "sources": re.compile(r"^from tests\.sources import ", re.MULTILINE),
}

# Marks of a few files each: where one of them is asked for no other files are imported.
FEW = frozenset({"slow", "sglang", "vllm", "chaos", "kills"})

ROOT = Path(__file__).resolve().parent.parent
PIPELINES = ROOT / "pipelines"
TINY = PIPELINES / "assets" / "arith-tiny"
SMALL = ("--set", "prompts_per_iteration=4")
QUICK = ("--set", "eval_every=5", "--threads", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Files go to the workers of pytest-xdist in the order below, not those of most tests first."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Asserts are rewritten before there are workers, where all files are asked for."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    tests = Path(__file__).parent
    rewrite(config, [*tests.rglob("test_*.py"), *tests.rglob("conftest.py")])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Files go to the workers whole, and those that ask for the same of `MADE` all to one."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return asked_for(config.rootpath / file) or file

    return Together(config, log)


@cache
def asked_for(file: Path) -> str | None:
    """The first of `MADE` that tests of a file ask for."""
    text = file.read_text()
    return next((name for name, words in MADE.items() if words.search(text)), None)


def pytest_collection_finish() -> None:
    """No collection walks over modules and tests, which live as long as the process."""
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file without the word has no test of that mark: hundreds are not imported."""
    asked = config.option.markexpr.partition(" ")[0]
    other = asked in FEW and " or " not in config.option.markexpr and collection_path.is_file()
    return True if other and asked not in collection_path.read_text() else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Leave out rows that other weeks run; begin with files that start Ray or an engine, or ranks.

    Nobody waits for those at the end. First, that marks are words of their files is looked at,
    then pytest leaves out what its own words do not ask for.
    """
    _marks_are_words(items)
    yield
    if DRAWS:
        left_out = _rows_of_other_weeks(items)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]
    waiting = {item.path for item in items for mark in WAITING if item.get_closest_marker(mark)}
    items.sort(key=lambda item: (item.path not in waiting, asked_for(item.path) != "ranks"))


def _marks_are_words(items: list[pytest.Item]) -> None:
    """Raise UsageError where a test has a mark of few that its file does not name."""
    marks: dict[Path, set[str]] = {}
    for item in items:
        marks.setdefault(item.path, set()).update(mark.name for mark in item.iter_markers())
    for path, names in marks.items():
        unsaid = [name for name in names & FEW if name not in path.read_text()]
        if unsaid:
            raise pytest.UsageError(f"{path}: the marks {unsaid} are to be named in the file")


def _rows_of_other_weeks(items: list[pytest.Item]) -> set[str]:
    """Of a table that says so all but as many rows, of a file's slow tests all but a share."""
    counts: dict[str, int] = {}
    drawn_from: dict[str, list[str]] = {}
    for item in items:
        mark = item.get_closest_marker("rows")
        if mark is not None or item.get_closest_marker("slow"):
            table = item.nodeid.partition("[")[0] if mark else str(item.path)
            drawn_from.setdefault(table, []).append(item.nodeid)
            if mark is not None:
                counts[table] = mark.args[0]
    left_out: set[str] = set()
    for table, rows in drawn_from.items():
        left_out |= set(rows) - drawn(rows, counts.get(table, -(-len(rows) // SLOW_SHARE)))
    return left_out


@pytest.fixture(autouse=True)
def _own_ops() -> Iterator[None]:
    """Ops and engines that a pipeline registers while a test runs are forgotten with it."""
    from rlflow.graph.op import REGISTRY
    from rlflow.graph.user.engine_options import _ENGINES

    known: tuple[dict[str, Any], ...] = (REGISTRY, _ENGINES)
    before = [dict(each) for each in known]
    yield
    for each, was in zip(known, before, strict=True):
        each.clear()
        each.update(was)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """What a run in this process sets, the threads of torch, ends with its test."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


class Result(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture
def rlflow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Call it with the words after `rlflow`: runs the command in this process."""
    from rlflow.cli.main import run_command

    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def call(*words: Any) -> Result:
        monkeypatch.setattr(sys, "argv", ["rlflow", *map(str, words)])
        capsys.readouterr()
        code = 0
        try:
            run_command()
        except SystemExit as ended:
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return call


def process(*words: Any, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Start `rlflow` in a process of its own."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "rlflow.cli.main", *map(str, words)],
        cwd=cwd,
        env={**settings, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(started: subprocess.Popen[str], timeout: float = 120) -> Result:
    """Wait for a process; its exit code and what it printed. One that is late is killed."""
    try:
        out, err = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        started.kill()
        raise
    return Result(started.returncode, out, err)
