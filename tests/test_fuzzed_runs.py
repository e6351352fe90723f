"""Run directories with anything in their files are read, or refused by name: no error of ours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import hypothesis.strategies as st
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings

from rlflow.cli.main import cli
from tests.budget import examples
from tests.conftest import PIPELINES, SMALL
from tests.test_fuzzed_models import VALUES

pytestmark = pytest.mark.torch

PIPELINE = PIPELINES / "grpo_arithmetic.py"
RUN = ("run", PIPELINE, *SMALL, "--threads", "1", "--save-every", "1")
# What reads a run; the last one trains another iteration.
READERS = ("report", "trace", "idle", "samples", "bisect", "diff", "export", "resume", "train")
fuzzed = settings(
    max_examples=max(2, examples(1)),  # the first one is the simplest there is
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two iterations."""
    run = tmp_path_factory.mktemp("whole") / "run"
    words = [str(word) for word in (*RUN, "--iterations", "2", "--run-dir", run)]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    return run


def words_of(reader: str, run: Path) -> tuple[object, ...]:
    """The words of a command that reads a run, and writes inside of it alone."""
    return {
        "bisect": ("bisect", run, run),
        "diff": ("diff", run / "plan.json", run / "plan.json"),
        "export": ("export", run, "-o", run / "exported"),
        "resume": (*RUN, "--resume", run, "--dry-run"),
        "train": (*RUN, "--resume", run, "--iterations", "3"),
    }.get(reader, (reader, run))


def files_of(run: Path) -> list[Path]:
    """All files of a run, as paths in it."""
    return sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file())


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where values are in what a JSON file holds, from the whole down."""
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    return [path, *(found for key, each in inner for found in places(each, (*path, key)))]


def put(whole: object, path: tuple[str | int, ...], value: object) -> object:
    """What a JSON file holds, with another value in one place."""
    if not path:
        return value
    *above, last = path
    holder = whole
    for key in above:
        holder = holder[key]
    holder[last] = value
    return whole


def changed_json(draw, text: str) -> str:
    """A JSON text with another value in a place that is drawn."""
    read = json.loads(text)
    return json.dumps(put(read, draw(st.sampled_from(places(read))), draw(VALUES)))


def changed_bytes(draw, content: bytes) -> bytes:
    """Some bytes taken out, others put in their place."""
    begin = draw(st.integers(0, len(content)))
    end = draw(st.integers(begin, min(len(content), begin + 40)) | st.just(len(content)))
    return content[:begin] + draw(st.binary(max_size=8)) + content[end:]


@st.composite
def contents(draw, name: Path, content: bytes):
    """What stands in a file instead: for JSON, half of the time, still JSON."""
    lines = content.decode().splitlines() if name.suffix in (".json", ".jsonl") else []
    if not lines or draw(st.booleans()):
        return changed_bytes(draw, content)
    if name.suffix == ".json":
        return changed_json(draw, content.decode()).encode()
    line = draw(st.integers(0, len(lines) - 1))
    lines[line] = changed_json(draw, lines[line])
    return "\n".join([*lines, ""]).encode()


@pytest.mark.parametrize("reader", READERS)
@fuzzed
@given(data=st.data())
def test_any_content_of_a_file_of_a_run(reader, rlflow, whole, tmp_path, data):
    run = tmp_path / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole, run)
    name = data.draw(st.sampled_from(files_of(whole)))
    (run / name).write_bytes(data.draw(contents(name, (whole / name).read_bytes())))
    result = rlflow(*words_of(reader, run))
    assert "E900" not in result.err, (name, result.err)
    assert result.code in (0, 1, 2, 3, 4), (name, result)
    assert result.code == 0 or result.err, (name, "nothing is said")
