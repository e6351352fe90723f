"""Kills of chance: any process of a run, at any moment, again and again until the run is over.

A run is started, one of its processes is killed, what follows is looked at, and the run goes on
where it is, until it has come to its end; then it has the bits of a run that nobody disturbed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.scene import PIPELINE, SLOWER, Scene
from tests.conftest import Result
from tests.runtime.whole_runs import state

ITERATIONS = 8
# Seconds for an error after a kill, and for a run to its end.
TOLD, WHOLE = 90.0, 240.0


def tokens(run: Path) -> frozenset[str]:
    """What was sampled, whichever start of the run it was: a line an iteration."""
    return frozenset((run.parent / f"{run.name}.seen").read_text().splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A kind of run: its file, the words of its command, and who of it is killed, by name.

    `bits` are what all runs have in common; another engine process rounds otherwise, so that
    of one with an engine they are its greedy tokens. `settings` have a word of the run's path.
    """

    file: Path = PIPELINE
    words: tuple[Any, ...]
    victims: tuple[str, ...]
    bits: Callable[[Path], Any] = state
    settings: tuple[str, ...] = ()


# The commands of processes, as the kernel tells them; the driver is known by its number.
NAMES = {
    "rank or host worker": r"ray::Rank",
    "raylet": r"/raylet/raylet ",
    "GCS": r"/gcs/gcs_server ",
    "reaper": r"/reaper\.py ",
    "reward": r"rlflow\.rewards\.child",
    "engine": r"serve_sglang\.py|sglang::",
}
SETUPS = {
    "local": Setup(
        words=("--placement", "one", "--devices", "cpu:1", "--set", "timeout=30"),
        victims=("driver", "reward"),
    ),
    "ray": Setup(
        words=(
            *("--placement", "fsdp", "--devices", "cpu:2", "--backend", "ray"),
            *("--deadline", 60 * SLOWER, "--set", "timeout=30"),
        ),
        victims=("driver", *("rank or host worker",) * 2, "raylet", "GCS", "reaper", "reward"),
    ),
    "engine": Setup(
        file=Path(__file__).parents[1] / "runtime" / "fault_pipeline.py",
        words=("--placement", "split"),
        victims=("driver", "engine", "engine"),
        bits=tokens,
        settings=("seen={}.seen",),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What became of one kill: whether what has to follow did, within how many seconds."""

    setup: str
    victim: str
    after: float
    code: int
    seconds: float
    said: str


class Campaign:
    """Kills in runs of one setup, each run from its start until it has come to its end."""

    def __init__(self, scene: Scene, name: str, only: tuple[str, ...] = ()) -> None:
        self.scene, self.name, self.setup = scene, name, SETUPS[name]
        self.victims = victims(name, only)
        self.runs = 0
        began = time.monotonic()
        self.whole = self._undisturbed()
        self.took = time.monotonic() - began

    def _undisturbed(self) -> Any:
        self._anew("whole")
        result = self.scene.ended(self._start(), WHOLE)
        assert 0 == result.code, result.err
        self._nothing_left()
        whole = self.setup.bits(self.scene.run_dir)
        self._anew()
        return whole

    def _anew(self, name: str = "") -> None:
        self.runs += 1
        self.scene.run_dir = self.scene.folder / (name or f"run-{self.runs}")

    def _start(self) -> subprocess.Popen[str]:
        directory = self.scene.run_dir
        begun = (directory / "run.json").exists()
        where = ("--resume" if begun else "--run-dir", directory)
        fixed = ("--threads", 1, "--iterations", ITERATIONS, "--save-every", 1, "-q")
        said = [("--set", each.format(directory)) for each in self.setup.settings]
        words = (*self.setup.words, *fixed, *where, *(word for pair in said for word in pair))
        return self.scene.rlflow("run", self.setup.file, *words)

    def kills(self, count: int) -> Iterator[Kill]:
        """So many kills, each with what became of it; a run without one is none of them."""
        done = 0
        while done < count:
            kill = self._kill()
            if kill is not None:
                done += 1
                yield kill
        while not self._over(self.scene.ended(self._start(), WHOLE)):
            pass

    def _kill(self) -> Kill | None:
        """Start or continue, kill whom chance says; None where nobody was there to be killed."""
        chance = self.scene.chance
        victim, moment = chance.choice(self.victims), chance.uniform(0.2, 1.0) * self.took
        started, began = self._start(), time.monotonic()
        try:
            started.wait(moment)
        except subprocess.TimeoutExpired:
            killed = self._strike(victim, started)
        else:
            killed = False
        struck = time.monotonic()
        lives = victim in {"reaper", "reward", "engine"}
        result = self.scene.ended(started, WHOLE if lives or not killed else TOLD)
        seconds = time.monotonic() - struck
        self._nothing_left()
        if victim == "driver" and result.code == 0:
            killed = False  # it had come to its end, and nobody had asked for its code yet
        if killed:
            expected(victim, result)
        elif result.code:
            raise AssertionError(f"nobody was killed: {result.err[-3000:]}")
        if result.code == 0:
            self._over(result)
        if not killed:
            # Beside less other work a run is over sooner: the next one is struck while it lasts.
            self.took = (self.took + struck - began) / 2
            return None
        code = next(iter(re.findall(r"error\[(E\d+)\]", result.err)), "")
        return Kill(
            setup=self.name,
            victim=victim,
            after=struck - began,
            code=result.code,
            seconds=seconds,
            said=code,
        )

    def _strike(self, victim: str, started: subprocess.Popen[str]) -> bool:
        """Kill one process, at once or a moment after the first is there; whether one was."""
        found = self._found(victim, started)
        while not found and started.poll() is None:
            time.sleep(self.scene.chance.uniform(0.1, 0.5))
            found = self._found(victim, started)
        if not found or started.poll() is not None:
            return False
        try:
            os.kill(self.scene.chance.choice(sorted(found)), signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def _found(self, victim: str, started: subprocess.Popen[str]) -> list[int]:
        """The processes of the run that are such victims."""
        if victim == "driver":
            return [started.pid]
        commands = self.scene.processes().items()
        return [pid for pid, command in commands if re.search(NAMES[victim], command)]

    def _nothing_left(self) -> None:
        left = self.scene.left()
        assert [] == left, left

    def _over(self, result: Result) -> bool:
        """Look at a run that has come to its end: its bits; another begins after it."""
        assert 0 == result.code, result.err[-3000:]
        assert self.whole == self.setup.bits(self.scene.run_dir), (
            "the bits are not those of a whole run"
        )
        self._anew()
        return True


def victims(name: str, only: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Who is killed in a setup, some as often as others together; of `only` where there are any."""
    return tuple(each for each in SETUPS[name].victims if not only or each in only)


def expected(victim: str, result: Result) -> None:
    """What has to follow a kill: the driver's death, one typed error, or nothing at all.

    A run that was about to end may end well, and a call that is lost between two is made again.
    """
    said = (victim, result.code, result.err[-3000:])
    if victim == "driver":
        assert -signal.SIGKILL == result.code, said
        return
    if result.code == 0:
        return
    assert victim != "reaper", said
    assert (1, 1) == (result.code, result.err.count("error[")), said
    assert "error[E900]" not in result.err, said
