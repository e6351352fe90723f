"""Trackers that hang, refuse, are slow or are not there: a run hears of it and goes on."""

from __future__ import annotations

import json
import threading
import time

import pytest

import rlflow as rf
from rlflow.errors import GraphError, UsageError
from rlflow.runtime.record.trackers.facts import read_facts
from rlflow.runtime.record.trackers.feed import PATIENCE, Feed, Point
from rlflow.runtime.record.trackers.observer import Observer, chosen_trackers, read_ids

AT_ONCE = 1.0


class Kept:
    """A tracker that keeps what it is sent; `before` is called with every point."""

    def __init__(self, before=lambda iteration: None):
        self.before = before
        self.points = []
        self.closed = False

    def write(self, iteration, metrics):
        self.before(iteration)
        self.points.append((iteration, metrics))

    def write_table(self, iteration, table):
        self.points.append((iteration, table))

    def close(self):
        self.closed = True


def refuse(iteration):
    raise OSError(f"no {iteration}")


def observe(path, trackers, points, *, close=30.0):
    """What is said while `points` are sent to the trackers, and the seconds that sending took."""
    said = []
    observer = Observer(path, names=tuple(trackers), opened=trackers.__getitem__)
    observer.begin(said.append)
    began = time.monotonic()
    for point in points:
        observer.write(point, {"reward": float(point)})
    took = time.monotonic() - began
    observer.close(close)
    return said, took


def test_a_tracker_that_hangs_holds_neither_the_run_nor_the_others(tmp_path):
    never, good = threading.Event(), Kept()
    stuck = Kept(lambda _: never.wait())
    made = {"wandb": lambda *_: stuck, "mlflow": lambda *_: good}

    began = time.monotonic()
    said, took = observe(tmp_path, made, range(10), close=0.3)

    assert took < AT_ONCE
    assert time.monotonic() - began < 2 * AT_ONCE
    assert [(n, {"reward": float(n)}) for n in range(10)] == good.points
    assert good.closed
    assert "tracker wandb does not answer and is left behind" in said
    assert any("wandb is without 10 iterations of this run: 10 dropped" in line for line in said)
    never.set()


def test_one_that_hangs_while_it_opens_is_left_behind_too(tmp_path):
    never = threading.Event()

    said, took = observe(tmp_path, {"wandb": lambda *_: never.wait()}, range(3), close=0.1)

    assert took < AT_ONCE
    assert "3 dropped, 0 refused" in said[-1]
    never.set()


def test_one_that_cannot_be_opened_is_told_once(tmp_path):
    said, _ = observe(tmp_path, {"wandb": lambda *_: refuse("login")}, range(3))

    assert said[0] == (
        "tracker wandb cannot be opened: OSError: no login; the run goes on without it"
    )
    assert len(said) == 2


def test_one_that_ends_its_process_ends_its_thread(tmp_path):
    def leave(*_):
        raise SystemExit(1)

    said, _ = observe(tmp_path, {"wandb": leave}, range(3))

    assert "cannot be opened: SystemExit: 1" in said[0]


def test_one_that_refuses_is_given_up_after_some_iterations(tmp_path):
    tracker = Kept(refuse)

    said, _ = observe(tmp_path, {"wandb": lambda *_: tracker}, range(PATIENCE + 3))

    assert said[0] == "tracker wandb refused iteration 0: OSError: no 0"
    assert f"has refused {PATIENCE} iterations in a row; the run goes on without it" in said[1]
    assert f"3 dropped, {PATIENCE} refused" in said[2]
    assert tracker.closed


def test_one_that_fails_as_it_closes_has_all_points_and_says_so(tmp_path):
    tracker = Kept()
    tracker.close = lambda: refuse("flush")

    said, _ = observe(tmp_path, {"wandb": lambda *_: tracker}, range(3))

    assert ["tracker wandb was not closed: OSError: no flush"] == said
    assert [0, 1, 2] == [iteration for iteration, _ in tracker.points]


@pytest.mark.parametrize("fails", ["import no_such_part", "raise SystemExit(3)", "1 / 0"])
def test_a_package_that_fails_at_import_is_named_with_what_mends_it(tmp_path, monkeypatch, fails):
    (tmp_path / "swanlab.py").write_text(fails)
    monkeypatch.syspath_prepend(tmp_path)
    said = []
    observer = Observer(tmp_path, names=chosen_trackers(("swanlab",), ()))

    observer.begin(said.append)
    observer.write(0, {"reward": 1.0})
    observer.close()

    assert said[0].startswith(
        "tracker swanlab cannot be opened: ImportError: package 'swanlab' is installed and fails "
        "at import ("
    )
    assert 'pip install "rlflow-engine[swanlab]"' in said[0]
    assert said[0].endswith("; the run goes on without it")


def test_one_that_refuses_now_and_then_gets_the_rest(tmp_path):
    tracker = Kept(lambda n: refuse(n) if n == 2 else None)

    said, _ = observe(tmp_path, {"wandb": lambda *_: tracker}, range(8))

    assert [0, 1, 3, 4, 5, 6, 7] == [iteration for iteration, _ in tracker.points]
    assert "0 dropped, 1 refused" in said[-1]


def test_a_slow_one_is_waited_for_at_the_end_alone(tmp_path):
    tracker = Kept(lambda _: time.sleep(0.05))

    said, took = observe(tmp_path, {"wandb": lambda *_: tracker}, range(8))

    assert took < 0.2
    assert list(range(8)) == [iteration for iteration, _ in tracker.points]
    assert [] == said


def test_what_finds_the_queue_full_is_dropped_and_counted():
    started, go, said = threading.Event(), threading.Event(), []

    def hold(_):
        started.set()
        go.wait()

    tracker = Kept(hold)
    feed = Feed("wandb", lambda: tracker, said.append, capacity=3)
    feed.put(Point(0, {}))
    assert started.wait(30)
    for number in range(1, 6):
        feed.put(Point(number, {}))
    go.set()
    feed.end()
    feed.join(30)

    assert [0, 1, 2, 3] == [iteration for iteration, _ in tracker.points]
    assert "tracker wandb is without 2 iterations of this run: 2 dropped, 0 refused" in said[0]


def test_the_id_under_which_a_tracker_knows_the_run_is_kept(tmp_path):
    known = []

    def opened(facts, keep):
        known.append(facts.known)
        keep(f"id of start {len(known)}" if facts.known is None else facts.known)
        return Kept()

    (tmp_path / "run.json").write_text(json.dumps({"name": "grpo", "id": "abc"}))
    observe(tmp_path, {"mlflow": opened}, [1])
    observe(tmp_path, {"mlflow": opened}, [2])

    assert [None, "id of start 1"] == known
    assert {"mlflow": "id of start 1"} == read_ids(tmp_path)


def test_nothing_named_like_a_key_leaves(tmp_path):
    said = {"lr": 1e-3, "openaiApiKey": "b", "store": "https://me:password@host/path"}
    (tmp_path / "config.json").write_text(json.dumps(said))  # as an older release may have left it

    facts = read_facts(tmp_path, known=None, after=None, picture=b"")

    assert {"lr": 1e-3, "openaiApiKey": "***", "store": "https://***@host/path"} == facts.config


def test_trackers_are_chosen_by_the_command_line_else_by_the_pipeline():
    assert ("tensorboard",) == chosen_trackers((), ("tensorboard",))
    assert () == chosen_trackers(("none",), ("tensorboard",))
    assert ("tensorboard",) == chosen_trackers(("tensorboard", "tensorboard"), ())


def test_an_unknown_tracker_is_an_error_before_the_run():
    with pytest.raises(UsageError) as raised:
        chosen_trackers(("tensorbord",), ())
    assert "E340" in str(raised.value)
    assert "did you mean 'tensorboard'" in str(raised.value)

    with pytest.raises(UsageError, match="others are named beside it"):
        chosen_trackers(("none", "tensorboard"), ())


def test_a_tracker_that_is_not_installed_says_what_to_type(monkeypatch):
    module = "rlflow.runtime.record.trackers.observer.find_spec"
    monkeypatch.setattr(module, lambda name: None)

    with pytest.raises(UsageError) as raised:
        chosen_trackers((), ("tensorboard",))
    assert "error[E341]: tracker 'tensorboard' is not installed" in str(raised.value)
    assert "pip install tensorboard" in str(raised.value)


def test_a_pipeline_names_its_trackers():
    with pytest.raises(GraphError) as raised:
        rf.pipeline(track="tensorbord")
    assert "did you mean 'tensorboard'" in str(raised.value)
    assert "test_trackers.py" in str(raised.value)

    @rf.pipeline(track="none")
    def quiet(cfg: rf.Config) -> None: ...

    assert () == quiet.track
