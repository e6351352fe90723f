"""Two hosts of a row: network namespaces of this machine, with a Ray cluster over them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.chaos.scene import PIPELINE, SLOWER, WORDS, Scene, suppressed
from tests.conftest import ROOT

HERE = ROOT / "tests" / "cli" / "launching"
HEAD = "10.77.0.1:6379"
RAY = str(Path(sys.executable).with_name("ray"))
# Bytes of an object store; Ray takes no fewer.
STORE = 80_000_000
# A device on each host: every collective goes over the link.
APART = (*("--placement", "fsdp", "--devices", "cpu:2", "--iterations", 24), *("--save-every", 2))


def no_hosts() -> str:
    """Why there can be no two hosts here; nothing where there can."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"needs two hosts in network namespaces, and there is no {' and no '.join(missing)}"
    words = ["unshare", "--mount", "--net", "ip", "link", "add", "name", "bridge", "type", "bridge"]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    return tried.stderr.strip() and f"no network namespaces: {tried.stderr.strip()}"


class Hosts:
    """node0 and node1, joined by a bridge; a row's processes on them are the row's own.

    Their names, addresses and links are gone with the processes.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.token = secrets.token_hex(16)
        words = ["unshare", "--mount", "--net", HERE / "two_hosts.sh", scene.folder]
        self._space = scene.started([*words, "sh", "-c", "echo made; exec sleep infinity"])
        assert self._space.stdout is not None
        assert self._space.stdout.readline(), self._space.communicate()[1]
        self._enter = ["nsenter", f"--target={self._space.pid}", "--mount", "--net"]
        self._enter += [f"--wd={scene.folder}", "--"]
        self.nodes: dict[int, subprocess.Popen[str]] = {}

    def outside(self, *words: Any) -> str:
        """What a command says that is run where the cables are."""
        done = subprocess.run(
            [*self._enter, *map(str, words)], capture_output=True, text=True, check=False
        )
        assert 0 == done.returncode, (words, done.stderr)
        return done.stdout

    def outside_started(self, *words: Any) -> subprocess.Popen[str]:
        """Start a command there."""
        return self.scene.started([*self._enter, *words])

    def on(self, node: int, *words: Any, **environment: Any) -> subprocess.Popen[str]:
        """Start a program on a host, marked as the row's."""
        keys = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        made = [*self._enter, HERE / "on_node.sh", node, *words]
        return self.scene.started(made, **keys, **environment)

    def ray(self, node: int, *before: str, store: int = STORE, **environment: Any) -> None:
        """Start a node of Ray on a host, the head on the first; `before` stands before it.

        One with variables of its own lives on where a part of it ends, others end whole.
        """
        way = [f"--address={HEAD}"]
        if node == 0:
            way = ["--head", "--port=6379", "--include-dashboard=false"]
            way.append(f"--temp-dir={self.scene.folder / f'r{len(self.nodes)}'}")
        sizes = ["--num-cpus=1", "--num-gpus=0", f"--object-store-memory={store}"]
        own = [f"--node-ip-address=10.77.0.{node + 1}", "--disable-usage-stats"]
        own += [] if environment else ["--block"]
        self.nodes[node] = self.on(node, *before, RAY, "start", *way, *sizes, *own, **environment)

    def cluster(self, *before: str, store: int = STORE) -> None:
        """Start Ray on both; `before` stands before the command of the second."""
        self.ray(0, store=store)
        self.ray(1, *before, store=store)

    def run(self, *words: Any, resume: bool = False, **environment: Any) -> subprocess.Popen[str]:
        """Start the small pipeline on the first host, with a device on each."""
        where = ("--resume" if resume else "--run-dir", self.scene.run_dir)
        joined = (*WORDS, *APART, "--address", HEAD, "--wait", "5m", *where, *words)
        program = [sys.executable, "-m", "rlflow.cli.main", "run", PIPELINE]
        return self.on(0, *program, *joined, **environment)

    def cut(self) -> None:
        """Take the second host's cable out: nobody is told."""
        self.outside("ip", "link", "set", "out1", "nomaster")

    def mend(self) -> None:
        """Put it back."""
        self.outside("ip", "link", "set", "out1", "master", "bridge")

    def running(self, node: int) -> list[int]:
        """The processes of a host."""
        space = self.outside("stat", "-L", "-c", "%i", f"/run/netns/node{node}").strip()
        found = []
        for pid in self.scene.processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/ns/net").stat().st_ino == int(space):
                    found.append(pid)
        return found

    def kill(self, node: int) -> None:
        """End all that a host runs, at once."""
        for _ in range(3):
            for pid in self.running(node):
                with suppressed():
                    os.kill(pid, signal.SIGKILL)

    def only_ray(self, within: float = 20.0) -> list[str]:
        """What runs on the hosts beside the cluster itself, so many seconds after a run."""
        until = time.monotonic() + within * SLOWER
        while (found := self._others()) and time.monotonic() < until:
            time.sleep(0.2)
        return found

    def _others(self) -> list[str]:
        mine = {pid for node in (0, 1) for pid in self.running(node)}
        return [
            command
            for pid, command in self.scene.processes().items()
            if pid in mine and ("ray::Rank" in command or "rlflow" in command)
        ]

    def end(self) -> None:
        """End the cluster, the second host first."""
        for node in (1, 0):
            self.kill(node)
        children = Path(f"/proc/{self._space.pid}/task/{self._space.pid}/children").read_text()
        for pid in (*map(int, children.split()), self._space.pid):
            os.kill(pid, signal.SIGKILL)
