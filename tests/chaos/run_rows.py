"""Rows of runs in processes of their own: killed, stopped, interrupted, with full disks."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rlflow.runtime.record.checkpoint import list_checkpoints
from tests.chaos.faulted import ACT, ALONE
from tests.chaos.matrix import Row
from tests.chaos.scene import SLOWER, Scene, leftovers, listening
from tests.conftest import Result
from tests.runtime.whole_runs import state

# Points that this pipeline does not pass: who has them is a row of another suite.
ELSEWHERE = ("rank:", "trackers:file:", "export:", "ckpt:delete:", "ckpt:aside", "ckpt:sweep")
KILLED = -signal.SIGKILL


def points() -> tuple[str, ...]:
    """Every failpoint of a run in one process."""
    import rlflow.runtime.record.edges.writing
    import rlflow.runtime.record.trackers.observer
    import rlflow.runtime.run
    import rlflow.runtime.worker.saving  # noqa: F401
    from rlflow.runtime.record.durable import fault_points

    return tuple(point for point in fault_points() if not point.startswith(ELSEWHERE))


def killed_at(point: str, scene: Scene) -> None:
    """Kill at the second pass of a point, or at the first where there is no second; go on."""
    resume = point.startswith("metrics:truncate")  # it is passed where a run goes on
    for at in (1,) if resume else (2, 1):
        scene.run_dir = scene.folder / f"run-{at}"
        if resume:
            assert KILLED == scene.run(RLFLOW_FAULT="run:iteration=kill9@4").code
        result = scene.run(RLFLOW_FAULT=f"{point}=kill9@{at}", resume=resume)
        if result.code == KILLED:
            scene.fired += 1
            break
        assert 0 == result.code, result.err
    assert scene.fired, f"{point} is not passed"
    if (scene.run_dir / "run.json").exists():
        scene.continues()
    else:  # it died before there was a run: another may begin there
        again = scene.run()
        assert 0 == again.code, again.err
        assert scene.whole() == state(scene.run_dir)


def killed_at_any_time(scene: Scene) -> None:
    """Three times, each at a moment that chance says; whatever is left goes on."""
    took = scene.seconds()
    for _ in range(3):
        going_on = (scene.run_dir / "run.json").exists()
        started = scene.command(resume=going_on)
        try:
            started.wait(scene.chance.uniform(0.2, took))
        except Exception:
            started.kill()
            scene.fired += 1
        scene.ended(started, 30)
    if not scene.fired:
        scene.fired += 1  # all three had ended before: the run is whole, which is looked at below
    if (scene.run_dir / "run.json").exists():
        scene.continues()
    else:
        assert 0 == scene.run().code
        assert scene.whole() == state(scene.run_dir)


def killed_twice(first: str, second: str, scene: Scene) -> None:
    """Killed, and again while it goes on."""
    assert KILLED == scene.run(RLFLOW_FAULT=first).code
    assert KILLED == scene.run(RLFLOW_FAULT=second, resume=True).code
    scene.fired += 2
    scene.continues()


PREEMPTED = 75


def preempted(scene: Scene) -> None:
    """SIGTERM with a grace, twice as schedulers do: what has begun is saved, 75, the same bits."""
    started = scene.command("--grace", 60)
    reach("update", scene, started)
    started.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    if started.poll() is None:
        started.send_signal(signal.SIGTERM)
    scene.fired += 1
    result = scene.ended(started, 60)
    assert PREEMPTED == result.code, (result.code, result.err)
    assert "continue with: rlflow run" in result.err, result.err
    scene.continues()


def out_of_time(warning: signal.Signals | None, scene: Scene) -> None:
    """SIGTERM with a grace that a hung reward outlasts: over before it ends, with what is saved.

    A `warning` may come before, by which the run would end had it not hung.
    """
    started = scene.command("--grace", 10, **{ACT: "sleeps@40"})
    scene.wait_for(lambda: (scene.folder / "fired").exists(), started)
    scene.acted()
    if warning is not None:
        started.send_signal(warning)
        time.sleep(1.0)
    began = time.monotonic()
    started.send_signal(signal.SIGTERM)
    result = scene.ended(started, 30)
    assert time.monotonic() - began < 10
    assert PREEMPTED == result.code, (result.code, result.err)
    assert "stopped at once; continue with: rlflow run" in result.err, result.err
    scene.continues()


PHASES = ("imports", "torch", "rollout", "save", "update")


def signalled(name: str, times: int, phase: str, scene: Scene) -> None:
    """Signals in a phase of a run: 130, a line that continues, and the same bits from there."""
    number = signal.Signals[name]
    fault = {"save": "ckpt:component:write=sleep:4@1"}.get(phase)
    started = scene.command(**({"RLFLOW_FAULT": fault} if fault else {}))
    reach(phase, scene, started)
    for _ in range(times):
        if started.poll() is None:
            started.send_signal(number)
            scene.fired += 1
        time.sleep(scene.chance.choice([0.0, 0.02, 0.2]))
    result = scene.ended(started, 30)
    assert 130 == result.code, (result.code, result.err)
    assert "Traceback" not in result.err, result.err
    if (scene.run_dir / "run.json").exists():
        assert "continue with: rlflow run" in result.err, result.err
        scene.continues()
    else:
        assert "stopped at once" in result.err, result.err


def program_interrupted(how: str, scene: Scene) -> None:
    """Ctrl-C of a user's own program, twice, whose run hangs: over at once, with no SIGABRT."""
    words = [sys.executable, Path(__file__).with_name("program.py"), how, scene.run_dir]
    started = scene.started(words, **{ACT: "sleeps@40"})
    scene.wait_for(lambda: (scene.folder / "fired").exists(), started)
    scene.acted()
    for _ in range(2):
        assert started.poll() is None, started.communicate()
        started.send_signal(signal.SIGINT)
        time.sleep(1.0)
    result = scene.ended(started, 30)
    assert 130 == result.code, (result.code, result.err)
    scene.continues()


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler of a signal."""
    said = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in said.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def reach(phase: str, scene: Scene, started: subprocess.Popen[str]) -> None:
    """Wait until a run is in a phase."""
    run = scene.run_dir
    wait = partial(scene.wait_for, started=started)
    match phase:
        case "imports":  # whoever has not come so far is of the kernel alone
            wait(lambda: handles(started.pid, signal.SIGTERM))
            time.sleep(scene.chance.uniform(0.0, 0.25))
        case "torch":
            wait(lambda: (run / "lock").exists())
        case "save":
            wait(lambda: leftovers(run / "checkpoints"))
        case "rollout":
            wait(lambda: (run / "spans" / "main.jsonl").exists())
        case "update":
            wait(lambda: "actor.update" in spans(run))


def spans(run: Path) -> str:
    """What a run has written of its actions."""
    file = run / "spans" / "main.jsonl"
    return file.read_text() if file.exists() else ""


def parent_dies(scene: Scene) -> None:
    """The shell of a run is killed, and with it the end of its output: the run goes on."""
    words = f"{sys.executable} -m rlflow.cli.main run {Path(__file__).with_name('faulted.py')}"
    line = f"{words} --placement one --threads 1 --save-every 2 --devices cpu:1 -q"
    shell = scene.started(["sh", "-c", f"{line} --run-dir {scene.run_dir} & wait"])
    scene.wait_for(lambda: "actor.update" in spans(scene.run_dir), shell)
    shell.kill()
    scene.fired += 1
    shell.communicate()
    until = time.monotonic() + 60 * SLOWER
    while not list_checkpoints(scene.run_dir / "checkpoints")[-1:] or (
        "iteration-000005" != list_checkpoints(scene.run_dir / "checkpoints")[-1].name
    ):
        assert time.monotonic() < until, "the run has not gone on"
        time.sleep(0.1)
    assert scene.whole() == state(scene.run_dir)


def disk_full(point: str, scene: Scene) -> None:
    """No space at a point: E701 and the line that continues, once."""
    result = scene.run(RLFLOW_FAULT=f"{point}=enospc@2")
    assert (1, 1) == (result.code, result.err.count("error[")), result.err
    assert "error[E701]" in result.err
    scene.fired += 1
    assert "continue with: rlflow run" in result.err, result.err
    scene.continues()


def damaged(how: str, name: str, scene: Scene) -> None:
    """A file of the newest checkpoint is damaged after the run: the one before is used, loudly."""
    assert 0 == scene.run("--iterations", 4).code
    newest = list_checkpoints(scene.run_dir / "checkpoints")[-1]
    file = next(iter(sorted(newest.glob(name))))
    damage(how, file, scene)
    scene.fired += 1
    result = scene.continues()
    assert newest.name in result.err, result.err
    assert "resuming after iteration 2" in " ".join(result.err.split()), result.err


def damage(how: str, file: Path, scene: Scene) -> None:
    """Cut a file, flip a bit of it, or delete it."""
    content = bytearray(file.read_bytes())
    match how:
        case "cut":
            file.write_bytes(content[: scene.chance.randrange(len(content))])
        case "flip":
            bit = scene.chance.randrange(8 * len(content))
            content[bit // 8] ^= 1 << bit % 8
            file.write_bytes(content)
        case "delete":
            file.unlink()


def latest(content: bytes, scene: Scene) -> None:
    """LATEST says something else: the newest checkpoint that is whole is used all the same."""
    assert 0 == scene.run("--iterations", 4).code
    (scene.run_dir / "checkpoints" / "LATEST").write_bytes(content)
    scene.fired += 1
    scene.continues()


def all_damaged(scene: Scene) -> None:
    """No checkpoint is whole: an error, never a run from the start over what was logged."""
    assert 0 == scene.run().code
    metrics = (scene.run_dir / "metrics.jsonl").read_bytes()
    for path in list_checkpoints(scene.run_dir / "checkpoints"):
        (path / "manifest.json").write_bytes(b"{}")
    scene.fired += 1
    result = scene.run("--iterations", 6, resume=True)
    assert 1 == result.code, result.err
    assert {"error[E720]"} == set(re.findall(r"error\[E\d+\]", result.err)), result.err
    assert metrics == (scene.run_dir / "metrics.jsonl").read_bytes()


def two_at_once(scene: Scene) -> None:
    """A second run of the same directory is refused while the first goes on, unharmed."""
    first = scene.command()
    scene.wait_for(lambda: (scene.run_dir / "run.json").exists(), first)
    second = scene.run(resume=True)
    scene.fired += 1
    assert "error[E710]" in second.err, second.err
    assert 0 == scene.ended(first, 60).code
    assert scene.whole() == state(scene.run_dir)


def other_values(words: tuple[str, ...], name: str, scene: Scene) -> None:
    """Going on with other values is refused with a diff, and allowed by name."""
    assert 0 == scene.run("--iterations", 4).code
    refused = scene.run(*words, resume=True)
    assert (1, True) == (refused.code, "error[E721]" in refused.err), refused.err
    scene.fired += 1
    allowed = scene.run(*words, "--allow-changes", name, resume=True)
    assert 0 == allowed.code, allowed.err


def finished(scene: Scene) -> None:
    """Resuming what is done changes nothing, also the second time."""
    assert 0 == scene.run().code
    for _ in range(2):
        result = scene.run(resume=True)
        assert "E7" in result.err or result.code == 0, result.err
    scene.fired += 1
    assert scene.whole() == state(scene.run_dir)


def hidden(scene: Scene) -> None:
    """A key of the environment and of the settings is in no file of the run and in no message."""
    canary = "canary-7f3a9b"
    result = scene.run(MY_API_KEY=canary, HF_TOKEN=canary)
    assert 0 == result.code, result.err
    scene.fired += 1
    files = [path for path in scene.run_dir.rglob("*") if path.is_file()]
    assert not [str(path) for path in files if canary.encode() in path.read_bytes()]
    assert canary not in result.out + result.err


def silent_on_the_network(scene: Scene) -> None:
    """A run in one process listens nowhere."""
    started = scene.command()
    scene.wait_for(lambda: "actor.update" in spans(scene.run_dir), started)
    found = listening(scene.mark)
    scene.fired += 1
    assert 0 == scene.ended(started, 60).code
    assert [] == found


def diverged(scene: Scene) -> None:
    """A rate that breaks the weights: a numerics error, and the healthy checkpoint goes on."""
    assert 0 == scene.run("--iterations", 2).code
    broken = scene.run("--set", "lr=1e25", "--allow-changes", "lr", resume=True)
    assert 1 == broken.code, broken.err
    assert "error[E65" in broken.err, broken.err
    scene.fired += 1
    scene.continues()


def acted(name: str, code: str, words: tuple[object, ...], scene: Scene) -> None:
    """A reward misbehaves once: one error with its sample, and the run goes on from there."""
    result: Result = scene.run(*words, **{ACT: f"{name}@20"})
    scene.acted()
    assert (1, 1) == (result.code, result.err.count("error[")), result.err
    assert f"error[{code}]" in result.err, result.err
    assert "continue with: rlflow run" in result.err, result.err
    scene.continues(*words, like=words)


def asks_alone(scene: Scene) -> None:
    """One of two ranks calls a collective that the other does not: told long before a deadline."""
    words = ("--placement", "fsdp", "--devices", "cpu:2", "--set", "own_loss=true")
    result = scene.run(*words, "--deadline", 40, within=150, **{ALONE: 5})
    scene.acted()
    assert (1, 1) == (result.code, result.err.count("error[")), result.err
    assert "error[E781]: actor.update in iteration" in result.err, result.err
    for said in ("rank of device 1 at collective", "of group actor@cpus", "of group default_pg"):
        assert said in result.err, result.err
    scene.continues(*words, like=words)


def ends_the_process(name: str, number: int, scene: Scene) -> None:
    """What no process survives: the run is as if it had been killed."""
    result = scene.run(**{ACT: f"{name}@40"})
    scene.acted()
    assert -number == result.code, result.err
    scene.continues()


def changes_nothing(name: str, scene: Scene) -> None:
    """A reward with a right value and bad manners: no bit of the run is another."""
    result = scene.run(**{ACT: f"{name}@20"})
    scene.acted()
    assert 0 == result.code, result.err
    assert scene.whole() == state(scene.run_dir)
    assert "\x1b[2J" not in result.err
    assert not [line for line in result.err.splitlines() if line.startswith("error[E999]")]


def counted(name: str, scene: Scene) -> None:
    """A call that fails where groups are dropped: it is counted, and the run goes on."""
    words = ("--set", "timeout=4", "--set", "on_error=drop_group")
    result = scene.run(*words, **{ACT: f"{name}@5"})
    scene.acted()
    assert 0 == result.code, result.err
    assert '"reward_failures/failed": 1.0' in (scene.run_dir / "metrics.jsonl").read_text()


HANG = ("--deadline", 4)
LIMIT = ("--set", "timeout=3")


def run_rows() -> Iterator[Row]:
    """All rows of this file."""
    for point in points():
        what = f"SIGKILL of the driver at {point}, then resume"
        yield Row(
            id=f"K1 {point}", fault=what, expect="continues", inject=partial(killed_at, point)
        )
    for number in range(8):
        yield Row(
            id=f"K2 {number}",
            fault="SIGKILL of the driver at three moments of chance",
            expect="continues",
            inject=killed_at_any_time,
        )
    for first, second in (
        ("run:iteration=kill9@4", "run:iteration=kill9@1"),
        ("ckpt:component:write=kill9@1", "ckpt:reported=kill9@1"),
        ("run:saved=kill9@1", "save:snapshot=kill9@1"),
    ):
        yield Row(
            id=f"K3 {first.partition('=')[0]}",
            fault=f"{first}, then {second} while it goes on",
            expect="continues",
            inject=partial(killed_twice, first, second),
        )
    for name in ("SIGINT", "SIGTERM"):
        for phase in PHASES:
            for times in (1, 2, 3):
                yield Row(
                    id=f"K6 {name} {times} {phase}",
                    fault=f"{name}, {times} times, in {phase}",
                    expect="continues",
                    inject=partial(signalled, name, times, phase),
                )
    for name, times in (("SIGHUP", 1), ("SIGHUP", 2), ("SIGUSR1", 2), ("SIGXCPU", 2)):
        yield Row(
            id=f"K6 {name} {times} rollout",
            fault=f"{name}, {times} times, in rollout",
            expect="continues",
            inject=partial(signalled, name, times, "rollout"),
        )
    for how in ("loop", "with"):
        yield Row(
            id=f"K6 program {how}",
            fault=f"Ctrl-C, twice, of a user's program that waits for a hung run: {how}",
            expect="continues",
            inject=partial(program_interrupted, how),
        )
    yield Row(id="K15 in time", fault="SIGTERM with --grace", expect="continues", inject=preempted)
    for way, warning in (("", None), (", warned", signal.SIGUSR1)):
        yield Row(
            id=f"K15 out of time{way}",
            fault=f"SIGTERM with --grace, and a reward that hangs{way}",
            expect="continues",
            inject=partial(out_of_time, warning),
        )
    yield Row(id="K10", fault="the shell dies", expect="goes on", inject=parent_dies)
    yield from disk_rows()
    yield from reward_rows()


def disk_rows() -> Iterator[Row]:
    """Disks, checkpoints, identities, and what a run leaves to be read."""
    for point in ("ckpt:component:write", "ckpt:manifest:write", "metrics:write", "spans:write"):
        yield Row(
            id=f"D6 {point}",
            fault=f"no space at {point}",
            expect="error",
            inject=partial(disk_full, point),
        )
    for how, kind in (("cut", "D2"), ("flip", "D3"), ("delete", "D4")):
        for name in ("actor.[0-9s]*", "actor.optimizer*", "manifest.json"):
            yield Row(
                id=f"{kind} {name}",
                fault=f"{how} {name} of the newest checkpoint",
                expect="continues",
                inject=partial(damaged, how, name),
            )
    for content in (b"", b"\xff\xfe", b"iteration-999999\n", b"../../etc\n"):
        yield Row(
            id=f"D5 {content!r}",
            fault=f"LATEST is {content!r}",
            expect="continues",
            inject=partial(latest, content),
        )
    made: tuple[tuple[str, str, str, Callable[[Scene], None]], ...] = (
        ("D8", "two runs of one directory", "refused", two_at_once),
        ("D12", "resume of what is done, twice", "continues", finished),
        ("D14", "only damaged checkpoints", "error", all_damaged),
        ("N3", "weights that are not finite", "error", diverged),
        ("X3", "sockets that listen", "goes on", silent_on_the_network),
        ("X4", "a key in the environment", "goes on", hidden),
    )
    for name, fault, expect, inject in made:
        yield Row(id=name, fault=fault, expect=expect, inject=inject)  # type: ignore[arg-type]
    yield Row(
        id="N7",
        fault="a loss calls a collective on one of two ranks alone",
        expect="error",
        inject=asks_alone,
        needs="ray",
    )
    for words, name in ((("--set", "lr=0.5"), "lr"), (("--set", "seed=7"), "seed")):
        yield Row(
            id=f"D11 {name}",
            fault=f"resume with another {name}",
            expect="refused",
            inject=partial(other_values, words, name),
        )


RAISES = ("ValueError_", "MemoryError_", "SystemExit_", "KeyboardInterrupt_", "GeneratorExit_")
ODD = ("beside_Exception", "without_words")
VALUES = ("not_a_number", "infinite", "too_large", "beyond_float32", "nothing", "text")
HANGS = ("sleeps", "spins", "reads_input", "waits_for_itself")
# What only a process of its own bounds.
BOUNDED = ("sleeps", "spins", "holds_the_interpreter", "waits_for_itself", "freezes")


def reward_rows() -> Iterator[Row]:
    """Rewards that misbehave, in the run's process and in processes of their own."""

    def row(kind: str, name: str, expect: str, inject: Callable[[Scene], None], way: str) -> Row:
        said = name.rstrip("_").replace("_", " ")
        fault = f"a reward: {said}{way}"
        return Row(id=f"{kind} {said}{way}", fault=fault, expect=expect, inject=inject)  # type: ignore[arg-type]

    for name in (*RAISES, *ODD, "recurses", "exits_0", "exits_3"):
        yield row("R1", name, "error", partial(acted, name, "E640", ()), "")
    for name in (*VALUES, "complex_number", "several"):
        yield row("R3", name, "error", partial(acted, name, "E640", ()), "")
    # Whoever reads input finds its end at once, and what waits for nothing is no hang.
    for name in ("sleeps", "spins", "waits_for_itself"):
        yield row("R2", name, "error", partial(acted, name, "E763", HANG), ", --deadline")
    for name in BOUNDED:
        yield row("R2", name, "error", partial(acted, name, "E640", LIMIT), ", timeout=")
        yield row("R10", name, "goes on", partial(counted, name), ", groups dropped")
    for name in ("crashes", "is_killed", "exits_3", "leaves_a_child", "fills_the_disk"):
        yield row("R6", name, "error", partial(acted, name, "E640", LIMIT), ", timeout=")
    for name, number in (("crashes", signal.SIGSEGV), ("is_killed", signal.SIGKILL)):
        yield row("K7", name, "continues", partial(ends_the_process, name, number), "")
    for name in ("prints_much", "disturbs", "forges_lines", "forks"):
        yield row("R5", name, "goes on", partial(changes_nothing, name), "")
