"""Kill the saving process at every failpoint, and fill its disk: a checkpoint is always there.

Each scenario is run in a forked child once per pass of each failpoint, until the child
survives because the point was not passed that often.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rlflow.errors import CheckpointError
from rlflow.runtime.record import durable
from rlflow.runtime.record.checkpoint import LATEST, list_checkpoints, save_checkpoint
from tests.runtime.whole_checkpoints import load_checkpoint

POINTS = [point for point in durable.fault_points() if point.startswith("ckpt:")]
PASSES_AT_MOST = 20


def components(iteration: int) -> dict[str, dict[str, np.ndarray]]:
    data = np.full(5000, iteration, np.float64)
    return {"actor": {"w": data, "b": data[:3]}, "actor.optimizer": {"m": -data}}


def save(root: Path, iteration: int, keep: int = 2) -> None:
    save_checkpoint(root, iteration, components(iteration), {"at": iteration}, {}, keep)


def damage(root: Path, iteration: int) -> None:
    (root / f"iteration-{iteration:06d}" / "actor.safetensors").write_bytes(b"")


def leave_a_dead_save(root: Path) -> None:
    (root / "iteration-000099.tmp-0123456789ab").mkdir()


# name -> what is there before, what is saved, with which keep, which iterations may be loaded
SCENARIOS = {
    "first": ([], 1, 2, {None, 1}),
    "second": ([1], 2, 2, {1, 2}),
    "rotation": ([1, 2], 3, 2, {2, 3}),
    "keep_one": ([1], 2, 1, {1, 2}),
    "keep_one_backlog": ([1, 2, 3], 4, 1, {3, 4}),
    "over_damaged": ([1, 2], 2, 2, {1, 2}),
    "everything": ([1, 2], 2, 1, {1, 2}),
}


def prepare(root: Path, scenario: str) -> None:
    before, saved, _, _ = SCENARIOS[scenario]
    root.mkdir()
    for iteration in before:
        save(root, iteration, keep=9)
    if saved in before:
        damage(root, saved)
    leave_a_dead_save(root)


def in_child(fault: str, work) -> int:
    """Run `work` in a forked child with `fault` armed; its wait status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ[durable.FAULT_VARIABLE] = fault
            durable.arm_from_environment()
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def assert_loads_whole(root: Path, allowed: set[int | None]) -> None:
    """What loads is one of `allowed`, unmixed."""
    loaded = load_checkpoint(root, framework="np")
    assert (loaded.iteration if loaded else None) in allowed
    if loaded:
        assert {"at": loaded.iteration} == loaded.state
        for name, tensors in components(loaded.iteration).items():
            for key, tensor in tensors.items():
                np.testing.assert_array_equal(tensor, loaded.components[name][key])


def kill_at_every_pass(tmp_path: Path, scenario: str, point: str) -> int:
    """Kill at pass 1, 2, ... of `point`; return how many passes there were."""
    _, saved, keep, allowed = SCENARIOS[scenario]
    for number in range(1, PASSES_AT_MOST):
        root = tmp_path / f"{scenario}-{point.replace(':', '-')}-{number}"
        prepare(root, scenario)
        status = in_child(f"{point}=kill9@{number}", partial(save, root, saved, keep))
        if os.WIFEXITED(status):
            assert 0 == os.WEXITSTATUS(status)
            return number - 1
        assert signal.SIGKILL == os.WTERMSIG(status)
        assert_loads_whole(root, allowed)
        save(root, 50, keep)
        assert_loads_whole(root, {50})
        assert not [entry for entry in root.iterdir() if durable.is_leftover(entry.name)]
    raise AssertionError(f"{point} passed {PASSES_AT_MOST} times")


@pytest.mark.slow
@pytest.mark.rows(2)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_kill_at_every_failpoint_leaves_the_old_or_the_new(tmp_path, scenario):
    passes = {point: kill_at_every_pass(tmp_path, scenario, point) for point in POINTS}
    assert 5 == passes["ckpt:component:write"]
    assert 1 == passes["ckpt:rename"] == passes["ckpt:latest:dirsync"]
    deleted = {"rotation": 1, "keep_one": 1, "keep_one_backlog": 3, "everything": 1}
    assert deleted.get(scenario, 0) == passes["ckpt:delete:rename"] == passes["ckpt:delete:unlink"]
    if scenario == "everything":
        assert 0 not in passes.values()


def test_kill_during_the_save_after_a_killed_save(tmp_path):
    save(tmp_path, 1)
    for point in POINTS:
        in_child(f"{point}=kill9", lambda: save(tmp_path, 2))
        assert_loads_whole(tmp_path, {1, 2})
        if load_checkpoint(tmp_path, framework="np").iteration == 2:
            break
    else:
        raise AssertionError("no save came through")


@pytest.fixture
def armed(monkeypatch):
    """Arm failpoints in this process; disarmed at the end."""

    def arm(fault: str) -> None:
        monkeypatch.setenv(durable.FAULT_VARIABLE, fault)
        durable.arm_from_environment()

    yield arm
    monkeypatch.delenv(durable.FAULT_VARIABLE)
    durable.arm_from_environment()


BEFORE_RENAME = [
    f"{point}@{number}"
    for point in ("ckpt:component:write", "ckpt:manifest:write", "ckpt:dirsync", "ckpt:mkdir")
    for number in (1, 2)
    if point == "ckpt:component:write" or number == 1
]


@pytest.mark.parametrize("place", BEFORE_RENAME)
def test_full_disk_keeps_the_previous_and_removes_the_rest(tmp_path, armed, place):
    save(tmp_path, 1)
    point, _, number = place.partition("@")
    armed(f"{point}=enospc@{number}")
    with pytest.raises(CheckpointError, match=r"E701.*cannot save iteration 2 in .*: no space"):
        save(tmp_path, 2)
    assert {LATEST, "iteration-000001"} == {entry.name for entry in tmp_path.iterdir()}
    assert_loads_whole(tmp_path, {1})
    save(tmp_path, 2)
    assert_loads_whole(tmp_path, {2})


@pytest.mark.parametrize("point", ["ckpt:latest:write", "ckpt:latest:fsync"])
def test_full_disk_at_latest_leaves_both_and_no_leftover(tmp_path, armed, point):
    save(tmp_path, 1)
    armed(f"{point}=enospc")
    with pytest.raises(CheckpointError, match="E701"):
        save(tmp_path, 2)
    assert {LATEST, "iteration-000001", "iteration-000002"} == {p.name for p in tmp_path.iterdir()}
    assert_loads_whole(tmp_path, {2})


def test_free_space_is_looked_at_first(tmp_path, monkeypatch):
    save(tmp_path, 1)
    disk = os.statvfs(tmp_path)
    full = os.statvfs_result((*disk[:4], 10, *disk[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    with pytest.raises(CheckpointError, match=r"E701.*\n.*40,960 bytes free\n.*expected +1,1"):
        save(tmp_path, 2)
    assert_loads_whole(tmp_path, {1})


def test_file_size_limit_is_named(tmp_path):
    save(tmp_path, 1)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        with pytest.raises(CheckpointError, match="E702"):
            save(tmp_path, 2)

    assert 0 == in_child("ckpt:rename=kill9@99", limited)
    assert {LATEST, "iteration-000001"} == {entry.name for entry in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EACCES, "E703"), (errno.EROFS, "E704"), (errno.EIO, "E705"), (errno.EDQUOT, "E701")],
)
def test_errors_of_fsync_are_translated(tmp_path, monkeypatch, number, code):
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(CheckpointError, match=code):
            save(tmp_path, 2)
    assert_loads_whole(tmp_path, {1})
    assert {LATEST, "iteration-000001"} == {entry.name for entry in tmp_path.iterdir()}


def test_directories_and_files_are_synced_before_they_are_named(tmp_path, monkeypatch):
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        events.append("sync " + name.split(".tmp-")[0])
        real_fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        events.append(f"name {target.name}")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    root = tmp_path / "checkpoints"
    save(root, 1)
    assert [
        "sync actor.safetensors",
        "sync actor.optimizer.safetensors",
        "sync manifest.json",
        "sync iteration-000001",
        "name iteration-000001",
        "sync checkpoints",
        "sync LATEST",
        "name LATEST",
        "sync checkpoints",
    ] == events


def test_interrupt_while_saving_leaves_nothing_behind(tmp_path, armed):
    save(tmp_path, 1)
    armed("ckpt:component:fsync=raise@2")
    with pytest.raises(durable.InjectedFault):
        save(tmp_path, 2)
    assert {LATEST, "iteration-000001"} == {entry.name for entry in tmp_path.iterdir()}


def test_half_deleted_checkpoint_never_bears_its_name(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def fail(path: Path, **_: object) -> None:
        (path / "actor.safetensors").unlink()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", fail)
        with pytest.raises(CheckpointError, match="E705"):
            save(tmp_path, 2, keep=1)
    assert ["iteration-000002"] == [path.name for path in list_checkpoints(tmp_path)]
    save(tmp_path, 3, keep=1)
    assert {LATEST, "iteration-000003"} == {entry.name for entry in tmp_path.iterdir()}
