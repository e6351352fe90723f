"""Ctrl-C of `rlflow launch --ssh`, once and twice, on one host: this machine, by its own sshd."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import PIPELINES, ROOT, TINY, ended, process

SSHD = "/usr/sbin/sshd"
ASKS_NOBODY = (
    *("BatchMode=yes", "StrictHostKeyChecking=no"),
    *("UserKnownHostsFile=/dev/null", "LogLevel=ERROR"),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.skipif(
        not Path(SSHD).exists() or not shutil.which("ssh"), reason="no sshd, or ssh"
    ),
]


@pytest.fixture
def enter(tmp_path):
    """The command of ssh that enters this machine; skips where it does not."""
    home = tmp_path / "ssh"
    home.mkdir(mode=0o700)
    for name in ("key", "host"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", home / name]
        subprocess.run(words, check=True, timeout=60)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = (
        *(f"HostKey {home / 'host'}", f"AuthorizedKeysFile {home / 'key.pub'}"),
        *("StrictModes no", "UsePAM no", "PidFile none", f"ListenAddress 127.0.0.1:{port}"),
    )
    (home / "config").write_text("\n".join(settings) + "\n")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    with (home / "log").open("w") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", home / "config"], stderr=log)
    options = [word for each in ASKS_NOBODY for word in ("-o", each)]
    command = ["ssh", "-i", str(home / "key"), "-p", str(port), *options]
    try:
        for _ in range(50):
            tried = subprocess.run([*command, "127.0.0.1", "true"], check=False, timeout=60)
            if not tried.returncode:
                break
            time.sleep(0.1)
        else:
            pytest.skip(f"sshd lets nobody in: {(home / 'log').read_text()[-300:]}")
        yield " ".join(command)
    finally:
        server.terminate()
        server.wait(30)


def launched(tmp_path, enter, prompts):
    """A launch on this machine whose run has done an iteration, of so many prompts."""
    shutil.copytree(TINY, tmp_path / "pipelines" / "assets" / TINY.name)
    shutil.copy(PIPELINES / "grpo_arithmetic.py", tmp_path / "pipelines")
    started = process(
        *("launch", "pipelines/grpo_arithmetic.py", "--ssh", "127.0.0.1", "--ssh-command", enter),
        *("--devices", "cpu:1", "--threads", 1, "--set", f"prompts_per_iteration={prompts}"),
        *("--set", "eval_every=100000", "--iterations", 100000, "--save-every", 100000),
        *("--run-dir", "run", "--env", f"PYTHONPATH={ROOT}", "--env", "HF_HUB_OFFLINE=1"),
        cwd=tmp_path,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size) and started.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.1)
    return started


def left(tmp_path):
    """The processes of the run that are still there, but for the launch itself."""
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    return [line for line in found.stdout.splitlines() if f"{tmp_path}/run" in line]


def test_ctrl_c_lets_the_run_end_its_iteration_and_save(tmp_path, enter):
    started = launched(tmp_path, enter, 4)
    started.send_signal(signal.SIGINT)
    done = ended(started)

    assert 130 == done.code, done.err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])["iteration"]
    checkpoint = (tmp_path / "run" / "checkpoints" / "LATEST").read_text()
    assert f"iteration-{last + 1:06d}" == checkpoint.strip()
    assert "rlflow launch pipelines/grpo_arithmetic.py" in done.err
    assert "--resume" in done.err
    assert [] == left(tmp_path)


def test_a_second_ctrl_c_stops_at_once(tmp_path, enter):
    """Actions take seconds, so that the run ends before it has saved what the first one asks."""
    started = launched(tmp_path, enter, 1024)
    started.send_signal(signal.SIGINT)
    time.sleep(0.5)
    started.send_signal(signal.SIGINT)
    done = ended(started)

    assert 130 == done.code, done.err
    assert not (tmp_path / "run" / "checkpoints" / "LATEST").exists()
    assert [] == left(tmp_path)
