"""What functions print: whole lines with their action, in the run's log and not in the results."""

# ruff: noqa: T201  what is printed is the subject

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlflow.rewards.bounds import Bounds
from rlflow.rewards.judging import judge
from rlflow.runtime.record.printed import Printed, PrintedLog, printed_by, printing, replay_lines


def kept(act):
    lines = []
    with printing(lines.append):
        act()
    return lines


def test_lines_are_of_the_action_that_prints_them():
    def act():
        print("before")
        with printed_by("iteration 3 reward"):
            print("a", 1)
            print("b", end="")
            print("c\nd")
        print("after", end="")

    assert [
        ("", "before"),
        ("iteration 3 reward", "a 1"),
        ("iteration 3 reward", "bc"),
        ("iteration 3 reward", "d"),
        ("", "after"),
    ] == kept(act)


def test_threads_do_not_mix_lines_and_know_the_only_action():
    meet = threading.Barrier(2)

    def prints(mark):
        sys.stdout.write(mark)
        meet.wait()
        sys.stdout.write(f"{mark}\n")

    def act():
        with printed_by("r"):
            threads = [threading.Thread(target=prints, args=(mark,)) for mark in "xy"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    assert [("r", "xx"), ("r", "yy")] == sorted(kept(act))


def test_threads_of_asyncio_keep_their_action_beside_another():
    async def both():
        async def one(mark):
            with printed_by(mark):
                await asyncio.to_thread(print, mark)

        await asyncio.gather(one("a"), one("b"))

    assert [("a", "a"), ("b", "b")] == sorted(kept(lambda: asyncio.run(both())))


def test_native_output_is_standard_error(capfd):
    assert [] == kept(lambda: os.write(1, b"native\n"))
    os.write(1, b"result\n")
    out, err = capfd.readouterr()
    assert ("result\n", "native\n") == (out, err)


def test_standard_output_is_back_after_an_error():
    before = sys.stdout
    with pytest.raises(ZeroDivisionError), printing(lambda line: None):
        1 / 0  # noqa: B018
    assert sys.stdout is before


def test_what_another_process_printed_is_kept():
    assert [("r", "x")] == kept(lambda: replay_lines([("r", "x")]))
    replay_lines([("r", "nobody listens")])


def shouts(x: int) -> float:
    print("got", x)
    thread = threading.Thread(target=print, args=("thread", x))
    thread.start()
    thread.join()
    return float(x)


@pytest.mark.slow
def test_what_a_reward_in_a_process_of_its_own_prints():
    def act():
        with printed_by("r"):
            assert [4.0] == judge(shouts, [{"x": 4}], bounds=Bounds(timeout=20)).values

    assert [("r", "got 4"), ("r", "thread 4")] == kept(act)


def test_the_log_is_made_with_the_first_line_and_told_once(tmp_path):
    told = []
    log = PrintedLog(tmp_path / "printed.txt", told.append)
    assert [] == list(tmp_path.iterdir())
    stream = Printed(log.keep)
    with printed_by("iteration 0 reward"):
        print("a\nb", file=stream)
    assert ["iteration 0 reward: a", "iteration 0 reward: b"] == (
        (tmp_path / "printed.txt").read_text().splitlines()
    )
    assert 1 == len(told)


def test_a_disk_that_takes_no_line_is_no_error_of_the_function_that_prints(tmp_path):
    told = []
    log = PrintedLog(tmp_path / "gone" / "printed.txt", told.append)
    for _ in range(3):
        log.keep(("reward", "a line"))
    assert 2 == len(told)
    assert "what functions print is not kept any more: " in told[1]


PIPELINE = """
import rlflow as rf
from rlflow import ops

print("loading")

def shouts(response: str, answer: str) -> float:
    print("scored", answer)
    return float(len(response))

@rf.op(per="row")
def noted(reward: rf.Row[float]) -> rf.Row[float]:
    print("noted", len(reward))
    return reward

@rf.pipeline()
def loud(cfg: rf.Config):
    print("tracing")
    actor = rf.Model("actor", {model!r}, optimizer=rf.AdamW(lr=1e-4))
    samples = ops.rollout(actor, ops.prompts(rf.data.arithmetic(), batch=2), n=2, max_new_tokens=2)
    reward = ops.reward(shouts, samples)
    ops.metrics(noted(reward))
    adv = ops.advantage("grpo", samples, reward)
    ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("local", marks=pytest.mark.slow),
        pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow, pytest.mark.extra]),
    ],
)
def test_a_run_prints_its_result_alone(tmp_path, backend):
    model = Path(__file__).resolve().parents[2] / "pipelines/assets/arith-tiny"
    (tmp_path / "loud.py").write_text(PIPELINE.format(model=str(model)))
    command = [
        sys.executable,
        "-m",
        "rlflow.cli.main",
        "run",
        "loud.py",
        "--json",
        "--iterations",
        "1",
    ]
    command += ["--run-dir", "out", "--backend", backend]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    assert 1 == json.loads(done.stdout)["iterations"]
    assert "loading\ntracing\n" in done.stderr
    lines = (tmp_path / "out/logs/printed.txt").read_text().splitlines()
    assert 4 == sum(line.startswith("iteration 0 reward: scored ") for line in lines)
    assert "iteration 0 noted: noted 4" in lines
