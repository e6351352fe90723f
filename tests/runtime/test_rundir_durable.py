"""The failpoints themselves, and how errors of the disk are said."""

from __future__ import annotations

import errno
import os
import time

import pytest

from rlflow.errors import CheckpointError, UsageError
from rlflow.runtime.record import durable

durable.register_faults("test:here", "test:there")


@pytest.fixture
def arm(monkeypatch):
    def armed(text: str) -> None:
        monkeypatch.setenv(durable.FAULT_VARIABLE, text)
        durable.arm_from_environment()

    yield armed
    monkeypatch.delenv(durable.FAULT_VARIABLE)
    durable.arm_from_environment()


def test_nothing_happens_unarmed():
    durable.fault("test:here")


def test_fault_fires_once_at_its_pass_of_its_point(arm):
    arm("test:here=raise@2")
    durable.fault("test:there")
    durable.fault("test:here")
    with pytest.raises(durable.InjectedFault, match="test:here, pass 2"):
        durable.fault("test:here")
    durable.fault("test:here")


def test_fault_may_sleep_or_fill_the_disk(arm):
    arm("test:here=sleep:0.05")
    started = time.monotonic()
    durable.fault("test:here")
    assert 0.05 <= time.monotonic() - started
    arm("test:here=enospc")
    with pytest.raises(OSError, match="No space") as caught:
        durable.fault("test:here")
    assert errno.ENOSPC == caught.value.errno


@pytest.mark.parametrize("text", ["", "x", "x=", "x=explode", "x=sleep", "x=raise@0", "x=raise@a"])
def test_malformed_fault_is_refused(arm, text, monkeypatch):
    with pytest.raises(UsageError, match="E740"):
        arm(text)
    monkeypatch.setenv(durable.FAULT_VARIABLE, "test:here=raise")


def test_mistyped_point_is_refused(arm):
    arm("test:hear=raise")
    with pytest.raises(UsageError, match=r"E741(.|\n)*did you mean 'test:here'"):
        durable.check_armed()


def test_unregistered_point_is_a_bug(arm):
    arm("test:here=raise")
    with pytest.raises(AssertionError, match="not registered"):
        durable.fault("test:unknown")


def test_a_point_belongs_to_one_module():
    with pytest.raises(AssertionError, match="two modules"):
        durable.register_faults("test:here")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "E701"), (errno.EDQUOT, "E701"), (errno.EFBIG, "E702"),
        (errno.EACCES, "E703"), (errno.EPERM, "E703"), (errno.EROFS, "E704"),
        (errno.EIO, "E705"), (errno.EEXIST, "E706"),
    ],
)  # fmt: skip
def test_errors_of_the_disk_say_what_was_being_done(tmp_path, number, code):
    with (
        pytest.raises(CheckpointError, match=rf"error\[{code}\]: cannot save x: ") as caught,
        durable.disk_errors(CheckpointError, "save x", tmp_path),
    ):
        raise OSError(number, os.strerror(number), "file")
    assert os.strerror(number) in str(caught.value)
    assert "fix" in str(caught.value)


def test_a_replaced_file_is_whole_and_failure_leaves_the_old(tmp_path, arm):
    durable.register_atomic_faults("test:file")
    path = tmp_path / "f"
    durable.write_atomic(path, b"one", "test:file")
    durable.write_atomic(path, b"two", "test:file")
    assert b"two" == path.read_bytes()
    arm("test:file:fsync=enospc")
    with pytest.raises(OSError, match="No space"):
        durable.write_atomic(path, b"three", "test:file")
    assert b"two" == path.read_bytes()
    assert [path] == list(tmp_path.iterdir())
