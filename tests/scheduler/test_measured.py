"""The file of measured costs: what it keeps, what it forgets, and what no damage does to it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from rlflow.scheduler.devices import measured
from rlflow.scheduler.devices.measured import (
    MOST_RUNS,
    NOTHING,
    MeasuredCosts,
    Sample,
    Setting,
    add_to_file,
    costs_path,
    load_measured,
)

HERE = Setting("grpo", 2, 0)


def sample(seconds: float, wait: float = 0.0, origin: str = "run") -> Sample:
    return Sample(origin, 3, seconds, wait)


def filled(*seconds: float, key: str = "a") -> MeasuredCosts:
    found = NOTHING
    for value in seconds:
        found = found.adding([(key, HERE, sample(value))])
    return found


def test_the_median_over_the_last_runs_is_what_counts() -> None:
    record = filled(9, 9, 9, 1, 2, 3, 4, 5).find("a", HERE)

    assert record is not None
    assert MOST_RUNS == len(record.samples)
    assert 3 == record.seconds
    assert "measured, 5 runs" == record.source


def test_runs_come_before_profiles() -> None:
    profiled = NOTHING.adding([("a", HERE, sample(1.0, origin="profile"))])
    ran = profiled.adding([("a", HERE, sample(2.0, 0.5))])
    one, two = profiled.find("a", HERE), ran.find("a", HERE)

    assert one is not None
    assert two is not None
    assert ("profile", 1.0, 0.0) == (one.source, one.seconds, one.wait)
    assert ("measured, 1 run", 2.0, 0.5) == (two.source, two.seconds, two.wait)


def test_the_setting_most_alike_is_found() -> None:
    """The same pipeline counts most, then as many devices, then the staleness, then the newest."""
    settings = [
        Setting("ppo", 2, 0),
        Setting("grpo", 1, 0),
        Setting("grpo", 2, 1),
        Setting("grpo", 2, 0),
    ]
    found = NOTHING
    for number, setting in enumerate(settings):
        found = found.adding([("a", setting, sample(float(number)))])
    for number in (3, 2, 1, 0):
        record = found.find("a", HERE)
        assert record is not None
        assert number == record.seconds
        left = tuple(r for r in found.records if r.setting != settings[number])
        found = MeasuredCosts(records=left)
    assert found.find("a", HERE) is None
    assert filled(1).find("b", HERE) is None


def test_old_records_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "MOST_RECORDS", 3)
    found = NOTHING
    for key in "abcda":
        found = found.adding([(key, HERE, sample(1.0))])

    assert ["c", "d", "a"] == [record.key for record in found.records]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "costs.json"
    given = [("a", HERE, Sample("run", 7, 0.1, 0.002, 12.5, 40.0)), ("b", HERE, sample(3.0))]

    made = add_to_file(path, given)

    assert made == load_measured(path)
    assert ["costs.json", ".costs.json.lock"] == sorted(
        (entry.name for entry in path.parent.iterdir()), reverse=True
    )
    assert made.to_json() == json.loads(path.read_text())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"version": 2, "serial": 1, "records": []}',
        b'{"version": 1, "serial": "x", "records": []}',
        b'{"version": 1, "serial": 1, "records": [{"key": "a"}]}',
        b'{"version": 1, "serial": 1, "records": [{"key": "a", "setting": ["g", 1, 0], '
        b'"serial": 1, "samples": []}]}',
        b'{"version": 1, "serial": 1, "records": [{"key": "a", "setting": ["g", 1, 0], '
        b'"serial": 1, "samples": [["run", 1, -1, 0, 0, 0]]}]}',
        b'{"version": 1, "serial": 1, "records": [{"key": "a", "setting": ["g", 1, 0], '
        b'"serial": 1, "samples": [["run", 1, NaN, 0, 0, 0]]}]}',
        b"\xff\xfe\x00",
    ],
)
def test_a_damaged_file_is_ignored_with_a_word_and_begun_anew(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(text)
    found = load_measured(path)

    assert () == found.records
    assert str(path) in found.problem

    add_to_file(path, [("a", HERE, sample(1.0))])
    assert "" == load_measured(path).problem
    assert 1 == len(load_measured(path).records)


def test_a_directory_in_the_place_of_the_file_is_said(tmp_path: Path) -> None:
    found = load_measured(tmp_path)

    assert () == found.records
    assert "cannot be read" in found.problem


def test_without_a_file_there_is_nothing_and_no_problem(tmp_path: Path) -> None:
    found = load_measured(tmp_path / "none.json")

    assert ((), "") == (found.records, found.problem)


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert costs_path() is None
    assert NOTHING == load_measured()
    monkeypatch.setenv("RLFLOW_COSTS", str(tmp_path / "mine.json"))
    assert tmp_path / "mine.json" == costs_path()
    monkeypatch.delenv("RLFLOW_COSTS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path / "rlflow" / "costs.json" == costs_path()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path / ".cache" / "rlflow" / "costs.json" == costs_path()


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"

    def write(key: str) -> None:
        for _ in range(5):
            add_to_file(path, [(key, HERE, sample(1.0))])

    threads = [threading.Thread(target=write, args=(key,)) for key in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = load_measured(path)

    assert 15 == found.serial
    assert {"a": 5, "b": 5, "c": 5} == {r.key: len(r.samples) for r in found.records}
