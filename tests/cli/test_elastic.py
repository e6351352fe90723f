"""Runs that lose devices: when they go on, on how many, what they say, and when they do not."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import rlflow as rf
from rlflow.cli.door.asking import run_values
from rlflow.cli.elastic import attempts, room
from rlflow.cli.elastic.attempts import TRIES, run_elastic
from rlflow.cli.elastic.room import WantedDevices, left_of, seen_twice
from rlflow.cli.running import Outcome
from rlflow.errors import DataError, DeviceLostError, Finding, RlflowError, RunError, UsageError
from rlflow.scheduler.devices.cluster import cpu_cluster
from tests.conftest import ROOT

PIPELINE = str(ROOT / "pipelines/grpo_arithmetic.py")
WHOLE = rf.Placement(pools={"all": "*"}, assign={"*": rf.on("all")})
APART = rf.Placement(
    pools={"train": "3/4", "gen": "1/4"},
    assign={"*": rf.on("train"), "actor.rollout": rf.on("gen")},
)


def lost(code="E759"):
    return DeviceLostError(
        Finding(code=code, what="rank 3 was lost", got="its process 7 died with its node"),
        summary="continue with: rlflow run ...",
    )


def outcome(path, iterations=8):
    return Outcome(run_dir=path, iterations=iterations, text="", metrics={})


class Attempts:
    """Attempts as scripted: an error, or the iterations that were done; what each was told."""

    def __init__(self, path, *script):
        self.path = path
        self.script = list(script)
        self.told = []

    def __call__(self, *, options):
        self.told.append(options)
        does = self.script.pop(0)
        begins = not isinstance(does, tuple)
        if begins:
            settings = SimpleNamespace(iterations=8)
            growth = options["growth"]
            growth.directory, growth.asked = self.path, settings.iterations
        if isinstance(does, RlflowError):
            raise does
        return outcome(self.path, does)


def options(placement=WHOLE, devices="cpu:4", **said):
    values = run_values(PIPELINE, {"placement": placement, "devices": devices, "elastic": True})
    return {**values, **said}


@pytest.fixture
def begun(tmp_path):
    """The directory of a run that has begun and saved nothing."""
    for name in ("run.json", "plan.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


@pytest.fixture
def cluster(monkeypatch):
    """A cluster in which so many devices answer, so many of them free."""
    has = SimpleNamespace(there=4, free=4)
    monkeypatch.setattr(room, "answering_at", lambda address, cluster: (has.there, has.free))
    monkeypatch.setattr(room, "SETTLED_SECONDS", 0.05)
    monkeypatch.setattr(room, "POLL_SECONDS", 0.01)
    return has


def test_a_loss_goes_on_from_the_run_on_what_is_left_and_says_so(begun, cluster):
    cluster.there = cluster.free = 2
    tried, said = Attempts(begun, lost(), 8), []

    done = run_elastic(tried, options(address="h:1"), said.append)

    assert 8 == done.iterations
    assert [4, 2] == [each["left"] for each in tried.told]
    assert [None, str(begun)] == [each["resume"] for each in tried.told]
    assert ["ray", "ray"] == [each["backend"] for each in tried.told]
    assert ["cpu:4", "cpu:4"] == [each["devices"] for each in tried.told]
    assert said == [
        "elastic: rank 3 was lost (its process 7 died with its node); going on from the newest "
        "checkpoint on 2 of 4 cpu devices where it had 4 (all: 2)"
    ]


def test_shares_say_which_numbers_of_devices_do(begun, cluster):
    cluster.there = cluster.free = 7
    tried = Attempts(begun, lost(), 8)

    run_elastic(tried, options(APART, "cpu:8", address="h:1"), lambda text: None)

    assert [8, 4] == [each["left"] for each in tried.told]


def test_too_few_devices_end_the_run_with_the_loss_and_the_line_that_continues(begun, cluster):
    cluster.there = cluster.free = 3
    tried = Attempts(begun, lost(), 8)

    with pytest.raises(RunError) as raised:
        run_elastic(tried, options(APART, "cpu:8", address="h:1"), lambda text: None)

    assert ["E759", "E780"] == [finding.code for finding in raised.value.findings]
    assert "at least 4 cpu" in raised.value.findings[1].expected
    assert "continue with: rlflow run ..." == raised.value.summary


def test_devices_that_come_back_in_time_are_waited_for(begun, cluster):
    cluster.there = cluster.free = 0
    back = threading.Timer(0.3, lambda: (setattr(cluster, "there", 4), setattr(cluster, "free", 4)))
    back.start()

    begin = time.monotonic()
    run_elastic(Attempts(begun, lost(), 8), options(address="h:1", wait=30.0), lambda text: None)

    assert 0.25 < time.monotonic() - begin < 20


def test_devices_that_a_run_still_holds_are_waited_for_a_little(cluster):
    placed = WantedDevices(placement=WHOLE, cluster=cpu_cluster(4, 1), address="h:1")
    cluster.there, cluster.free = 4, 1

    assert 1 == left_of(placed, 0.0)

    released = threading.Timer(0.1, setattr, (cluster, "free", 4))
    released.start()
    room.SETTLED_SECONDS = 30.0
    assert 4 == left_of(placed, 0.0)


def test_the_same_loss_without_a_checkpoint_between_is_no_device(begun):
    tried = Attempts(begun, *(lost() for _ in range(TRIES + 1)))

    with pytest.raises(RunError):
        run_elastic(tried, options(), lambda text: None)

    assert TRIES + 1 == len(tried.told)


def test_losses_with_checkpoints_between_go_on_for_ever(begun, monkeypatch):
    done = iter(range(100))
    monkeypatch.setattr(attempts, "_saved", lambda path: next(done))
    tried = Attempts(begun, *(lost() for _ in range(10)), 8)

    assert 8 == run_elastic(tried, options(), lambda text: None).iterations


@pytest.mark.parametrize(
    "error",
    [
        RunError(Finding(code="E751", what="the run failed")),
        RunError(Finding(code="E777", what="the Ray cluster is gone")),
        DataError(Finding(code="E605", what="unusable row")),
    ],
)
def test_what_is_no_loss_ends_the_run(begun, error):
    tried = Attempts(begun, error, 8)

    with pytest.raises(type(error)):
        run_elastic(tried, options(), lambda text: None)

    assert 1 == len(tried.told)


def test_a_loss_before_anything_has_begun_is_an_error_as_ever():
    def attempt(*, options):
        raise lost("E776")

    with pytest.raises(RunError):
        run_elastic(attempt, options(), lambda text: None)


def test_a_run_that_is_handed_over_goes_on_with_what_there_is(begun, cluster):
    cluster.there = cluster.free = 2
    tried, said = Attempts(begun, lost(), 5, 8), []

    def grow(*, options):
        if len(tried.told) == 1:
            cluster.there = cluster.free = 4
        return tried(options=options)

    assert 8 == run_elastic(grow, options(address="h:1"), said.append).iterations
    assert [4, 2, 4] == [each["left"] for each in tried.told]
    assert "elastic: 4 of 4 cpu devices where it had 2 (all: 4): going on with them" == said[1]


def test_more_devices_are_believed_when_they_are_seen_twice():
    placed = WantedDevices(placement=WHOLE, cluster=cpu_cluster(4, 1), address="h:1")
    sights = iter([4, 2, 4, 9])
    more = seen_twice(placed, 2, lambda: next(sights))

    assert [False, False, False, True] == [more() for _ in range(4)]


def test_a_placement_of_fixed_numbers_is_refused_with_its_shares():
    fixed = rf.Placement(
        pools={"train": 3, "gen": 1},
        assign={"*": rf.on("train"), "actor.rollout": rf.on("gen")},
    )

    with pytest.raises(UsageError) as raised:
        run_elastic(Attempts(Path()), options(fixed), lambda text: None)

    (finding,) = raised.value.findings
    assert "E257" == finding.code
    assert "pools={'train': '3/4', 'gen': '1/4'}" == finding.fix


def test_the_local_backend_has_nothing_to_lose():
    with pytest.raises(UsageError) as raised:
        run_elastic(Attempts(Path()), options(backend="local"), lambda text: None)

    assert "E257" == raised.value.findings[0].code


def test_a_run_that_had_not_begun_starts_anew(tmp_path):
    tried = Attempts(tmp_path, lost(), 8)

    run_elastic(tried, options(), lambda text: None)

    assert [None, None] == [each["resume"] for each in tried.told]
