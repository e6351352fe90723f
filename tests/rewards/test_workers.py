"""Processes that run reward functions: packed once, and every answer is that of its call."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import pytest

from rlflow.errors import RewardError
from rlflow.rewards import workers
from rlflow.rewards.bounds import Bounds
from rlflow.rewards.judging import judge
from rlflow.rewards.workers import Packed, WorkerLost, Workers, packed_function

BOUNDS = Bounds(timeout=20, concurrency=2)
LOCK = threading.Lock()


def itself(x: int) -> float:
    return float(x)


def forks_and_raises(x: int) -> float:
    """Every third call leaves a copy that raises out of the function at once."""
    if x % 3 == 0:
        copy = os.fork()
        if copy == 0:
            raise ValueError("in the copy")
        os.waitpid(copy, 0)
    return float(x)


def forks_and_returns(x: int) -> float:
    copy = os.fork()
    if copy:
        os.waitpid(copy, 0)
    return float(x) if copy else -1.0


def exits_in_copy(x: int) -> float:
    copy = os.fork()
    if copy == 0:
        raise SystemExit(7)
    return float(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]))


def locked(x: int) -> float:
    with LOCK:
        return float(x)


def leaves_a_child(path: str) -> float:
    copy = os.fork()
    if copy == 0:
        time.sleep(60)
    Path(path).write_text(str(copy))
    time.sleep(60)
    return 0.0


@pytest.mark.slow
def test_packing_from_many_threads(monkeypatch):
    """The register of cloudpickle is one for all threads: none may take back what others need."""
    really, turn = workers.dumped, itertools.count()

    def dumped(function):
        time.sleep(0.02 * (next(turn) % 3))
        return really(function)

    monkeypatch.setattr(workers, "dumped", dumped)
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: packed_function(itself), range(12)))
    assert {made[0]} == set(made)
    assert __name__ not in cloudpickle.list_registry_pickle_by_value()


def test_a_module_that_the_user_registered_stays_so():
    module = __import__(__name__, fromlist=["x"])
    cloudpickle.register_pickle_by_value(module)
    try:
        packed_function(itself)
        assert __name__ in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.parametrize("function", [forks_and_raises, forks_and_returns])
def test_a_forked_copy_does_not_answer(function):
    samples = [{"x": x} for x in range(12)]
    assert [float(x) for x in range(12)] == judge(function, samples, bounds=BOUNDS).values


def test_a_forked_copy_ends_with_its_code():
    assert [7.0] == judge(exits_in_copy, [{"x": 0}], bounds=BOUNDS).values


@pytest.mark.slow
def test_an_answer_to_another_call_is_not_taken():
    """As from a function that writes on the pipe: the process is lost, the next call is right."""
    pool = Workers(1)
    stale = Packed("forged", cloudpickle.dumps(_forged_answer))
    with pytest.raises(WorkerLost, match="answered call 99 when asked call 0"):
        pool.call(stale, {}, 20)
    assert 5.0 == pool.call(packed_function(itself), {"x": 5}, 20)
    pool.close()


def _forged_answer() -> float:
    import gc
    import io
    import pickle

    body = pickle.dumps((99, True, 0.5))
    for found in gc.get_objects():
        if isinstance(found, io.BufferedWriter) and found.fileno() > 2:
            found.write(len(body).to_bytes(8, "little") + body)
            found.flush()
    return 1.0


def test_a_function_that_cannot_be_packed_is_no_failure_of_a_sample():
    with pytest.raises(RewardError) as caught:
        judge(locked, [{"x": 1}], bounds=BOUNDS)
    finding = caught.value.findings[0]
    assert "E654" == finding.code
    assert "'locked'" in finding.what
    assert "lock" in finding.got


@pytest.mark.slow
def test_what_a_call_started_ends_with_it(tmp_path):
    path = tmp_path / "pid"
    pool = Workers(1)
    with pytest.raises(TimeoutError):
        pool.call(packed_function(leaves_a_child), {"path": str(path)}, 2)
    assert not _alive(int(path.read_text()))


def leaves_a_daemon(path: str) -> float:
    """A child in a session of its own, then an end without a word."""
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    Path(path).write_text(str(child.pid))
    os._exit(0)


def raises_ctrl_c() -> float:
    raise KeyboardInterrupt


def test_what_a_call_started_ends_with_a_process_that_left(tmp_path):
    path, pool = tmp_path / "pid", Workers(1)
    with pytest.raises(WorkerLost, match="exit code 0"):
        pool.call(packed_function(leaves_a_daemon), {"path": str(path)}, 20)
    assert not _alive(int(path.read_text()))
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        pool.call(packed_function(raises_ctrl_c), {}, 20)
    pool.close()


def floods_standard_error() -> float:
    for _ in range(40):
        os.write(2, b"x" * 2**16)
    return 1.0


def test_what_a_call_writes_to_standard_error_has_a_bound(capfd):
    pool = Workers(1)
    assert 1.0 == pool.call(packed_function(floods_standard_error), {}, 20)
    assert 1.0 == pool.call(packed_function(floods_standard_error), {}, 20)
    pool.close()
    said = capfd.readouterr().err
    assert 2**20 == said.count("x") - workers.NO_MORE.decode().count("x")
    assert said.endswith(workers.NO_MORE.decode())


def says_last_words() -> None:
    os.write(2, b"last words")
    os._exit(3)


def test_last_words_are_shown_before_the_error(capfd):
    pool = Workers(1)
    with pytest.raises(WorkerLost, match="exit code 3"):
        pool.call(packed_function(says_last_words), {}, 20)
    assert "last words" == capfd.readouterr().err


def writes_too_much(path: str) -> float:
    """One byte beyond half of what the disk has free; the file has no blocks."""
    with Path(path).open("wb") as file:
        file.truncate(resource.getrlimit(resource.RLIMIT_FSIZE)[0] + 1)
    return 1.0


def test_a_file_of_a_call_leaves_half_of_the_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pool, path = Workers(1), tmp_path / "much"
    with pytest.raises(OSError, match="File too large"):
        pool.call(packed_function(writes_too_much), {"path": str(path)}, 20)
    assert 0 == path.stat().st_size
    pool.close()


def _alive(pid: int) -> bool:
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.02)
    return True
