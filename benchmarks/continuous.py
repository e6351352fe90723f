"""What rollouts that never drain gain on two pools of one core, and what was predicted of it.

Each side trains the same pipeline, whose responses have drawn lengths with a long tail. Seconds are
the processor's: each action is counted by the thread that does it, while no other runs in its
process, and the executor plays the plan again with those on a virtual clock. So two cores of their
own are told from a machine that is shared, and two processes from two threads of one. Seconds of
the clock on the wall stand beside them, of a run on Ray, where each pool is a process. Sides take
turns.

The prediction knows no rollout that went on: steps and passes of the engine are timed with some
numbers of rows, before and after the side in its process, an update, and what a rollout does beside
its engine, are as long as on the drained side, and an iteration is played with the distribution of
lengths, as plans do.

python benchmarks/continuous.py --turns 2 --placements split continuous2 continuous4
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import (
    CACHE,
    RESULTS,
    machine,
    markdown_report,
    markdown_table,
    read_jsonl,
    rlflow,
    run,
    say,
    text_table,
    write_results,
)
from prediction import model_directory
from virtual_clock import (
    PIPELINE,
    WARMUP,
    WIDTHS,
    apart,
    mean_seconds,
    planned,
    played,
    replayed,
    side,
)

DRAINED = "split"
SIDES = (DRAINED, "stale", "continuous2", "continuous4", "continuous8")
ROWS = (8, 16, 32, 64)
SEEN = (32, 256)
STEPS, TRIES = 48, 5
PROMPT = 6
TARGET = 1.5
CLOSE = 0.10
NEVER = 10**9
HEADER = (
    "placement",
    "tokens/s",
    "over drained",
    "predicted",
    "off by",
    "each turn",
    "wall, Ray",
)


def engine_seconds() -> dict[str, Any]:
    """Processor seconds of a decoding step by tokens seen and rows, and of what comes beside.

    Rows that come and go differ in what they have seen: a quarter of them has seen two and a half
    times the mean, the others half of it. Rows that all begin together have seen as much as each
    other: `drained`. `reading` is of a token, `pass` of a call that reads four short rows, and
    `leaving` of a row that ends while others go on.
    """
    import torch

    from rlflow.batch import ragged_rows
    from rlflow.contract.values import InFlight, Reach, SampleKey, Sampling
    from rlflow.engines.hf.loading import load_model
    from rlflow.engines.hf.rollout import TorchRollout

    torch.set_num_threads(1)
    path = model_directory(WIDTHS, "2x128-long")
    model = load_model(str(path), dtype=torch.float32, device="cpu", init="random")
    engine, key = TorchRollout(model), SampleKey(seed=0, iteration=0, stream="timed")

    def median_of(call: Callable[[], Any]) -> float:
        call()
        found = []
        for _ in range(TRIES):
            begun = time.thread_time()
            call()
            found.append(time.thread_time() - begun)
        return statistics.median(found)

    def timed(sizes: Sequence[int], left: Sequence[int]) -> float:
        rows, most = len(sizes), max(left)
        whole = torch.arange(rows)
        flight = InFlight(
            seen=ragged_rows([[5] * size for size in sizes], torch.int64),
            made=torch.tensor([1 + most - each for each in left]),
            draws=torch.zeros_like(whole),
            ids=whole,
            groups=whole,
            begun=frozenset(range(rows)),
            at_once=rows,
            met=lambda _, ended: len(ended) >= rows,
        )
        sampling = Sampling(max_new_tokens=1 + most)
        return median_of(lambda: engine.advance(flight, sampling, key))

    def timed_mixed(rows: int, size: int, new: int) -> float:
        return timed(mixed(rows, size), [new] * rows)

    def timed_drained(rows: int, size: int, new: int) -> float:
        prompts = ragged_rows([[5] * size] * rows, torch.int64)
        asked = prompts, Sampling(max_new_tokens=new), key, torch.arange(rows), Reach()
        return median_of(lambda: engine.generate(*asked))

    def by_step(timed: Callable[[int, int, int], float]) -> dict[int, dict[int, float]]:
        return {
            size + STEPS // 2: {
                rows: (timed(rows, size, STEPS + 1) - timed(rows, size, 1)) / STEPS for rows in ROWS
            }
            for size in SEEN
        }

    steps, drained = by_step(timed_mixed), by_step(timed_drained)
    reading = (timed([128] * 32, [1] * 32) - timed([8] * 32, [1] * 32)) / (32 * 120)
    rows, size = max(ROWS), 32
    together = timed([size] * rows, [1] * rows)
    going = sum(step_seconds(steps, rows - n, size + n) for n in range(1, rows))
    leaving = timed([size] * rows, range(rows, 0, -1)) - together - going
    found = {"steps": steps, "drained": drained, "leaving": max(leaving, 0.0) / rows}
    return found | {"reading": reading, "pass": timed([6] * 4, [1] * 4)}


def mixed(rows: int, size: int) -> list[int]:
    """What rows have seen that come and go, the oldest first; `size` in the mean."""
    old = rows // 4
    return [size * 5 // 2] * old + [size // 2] * (rows - old)


def averaged(before: Any, after: Any) -> Any:
    """The means of what was timed twice."""
    if isinstance(before, dict):
        return {name: averaged(before[name], after[name]) for name in before}
    return (before + after) / 2


def on_a_line(timed: Mapping[Any, float], at: float) -> float:
    """A value between those that were timed, or on the line of the first or last two."""
    known = sorted((int(place), value) for place, value in timed.items())
    for (low, first), (high, last) in itertools.pairwise(known):
        if at <= high or high == known[-1][0]:
            return first + (last - first) * (at - low) / (high - low)
    raise AssertionError("nothing was timed")


def step_seconds(steps: Mapping[Any, Mapping[Any, float]], rows: float, seen: float) -> float:
    """Seconds of a step of so many rows, of each of which so many columns are read."""
    return on_a_line({size: on_a_line(timed, rows) for size, timed in steps.items()}, seen)


def predicted(placement: str, engine: Mapping[str, Any], drained: Mapping[str, Any]) -> float:
    """Tokens a second of a side on the virtual clock: of what its iterations are expected to take.

    Of a rollout by the engine's steps and passes, and beside them as on the drained side, as of
    other actions.
    """
    from rlflow.graph.roles import Recalling
    from rlflow.scheduler.costs.lengths import as_seen, stages
    from rlflow.scheduler.costs.rows.steady import Undrained, drawn_iterations

    sys.path.insert(0, str(PIPELINE.parent))
    import tails

    plan, cfg = planned(placement), tails.Config()
    lengths = as_seen(tails.LONGEST, [tails.length_of((n + 0.5) / 2048) for n in range(2048)])
    groups, n = cfg.prompts_per_iteration, cfg.group_size
    lasting = plan.graph.node("actor.rollout").role(Recalling)
    steps, reading = engine["steps"], engine["reading"]
    seconds = mean_seconds(drained)
    beside = seconds["actor.rollout"] - statistics.fmean(drained["inside"][WARMUP:])
    beside += groups * n * engine["leaving"]
    rollouts = []
    if lasting is None:
        found = stages(lengths, groups * n, 1)
        alone = engine["drained"]
        decoding = sum(
            s.tokens * s.goes_on * step_seconds(alone, s.live, PROMPT + s.age) for s in found
        )
        rollouts.append(beside + decoding + engine["pass"] + reading * groups * PROMPT)
    else:
        for each in drawn_iterations(Undrained(lengths, groups, n, groups * n, lasting.keep)):
            decoding = sum(
                s.tokens * step_seconds(steps, -(-s.live // 8) * 8, PROMPT + width)
                for s, width in zip(each.stages, each.widths, strict=True)
            )
            tokens = groups * PROMPT + each.rows * (each.age + PROMPT)
            begins = engine["pass"] * (each.passes + 1) + reading * tokens
            rollouts.append(beside + decoding + begins)

    def taken(action: Any, iteration: int) -> float:
        if action.id == "actor.rollout":
            return rollouts[iteration % len(rollouts)]
        return seconds.get(action.id, 0.0)

    count = WARMUP + 8 * len(rollouts) + 8
    ends = played(plan, taken, count)
    return groups * n * lengths.mean * (count - 1 - WARMUP) / (ends[-1] - ends[WARMUP])


def rate(ends: Sequence[float], tokens: Sequence[float]) -> float:
    """Tokens a second from the first iterations on to the last."""
    return sum(tokens[WARMUP:]) / (ends[-1] - ends[WARMUP - 1])


def on_ray(placement: str, iterations: int) -> dict[str, list[float]]:
    """Train with a process for each pool: when updates end on the wall, and tokens of each."""
    folder = CACHE / "runs" / f"continuous-ray-{placement}"
    shutil.rmtree(folder, ignore_errors=True)
    path = model_directory(WIDTHS, "2x128-long")
    command = [rlflow(), "run", PIPELINE, "--placement", placement, "--backend", "ray"]
    command += ["--devices", "cpu:2", "--threads", "1", "--set", f"model={path}", "-q"]
    command += ["--iterations", str(iterations), "--save-every", str(NEVER), "--run-dir", folder]
    run(command, CACHE / "logs" / f"continuous-ray-{placement}.log")
    spans = read_jsonl(folder / "spans" / "main.jsonl")
    ends = [span["end"] for span in spans if span.get("action") == "actor.update"]
    numbers = [line["metrics"] for line in read_jsonl(folder / "metrics.jsonl")]
    assert all(each["actor.rollout/finished"] == 1 for each in numbers)
    shutil.rmtree(folder)
    return {"ends": sorted(ends), "length": [each["actor.rollout/length"] for each in numbers]}


def report(turns: Sequence[Mapping[str, Any]], facts: dict[str, Any], folder: Path) -> None:
    """Print the table and write it."""
    rows, found = [], {}
    for name in turns[0]:
        every = [turn[name] for turn in turns]
        own = statistics.median(each["own"] for each in every)
        gains = [turn[name]["own"] / turn[DRAINED]["own"] for turn in turns]
        promised = statistics.median(
            each["predicted"] / turn[DRAINED]["predicted"]
            for each, turn in zip(every, turns, strict=True)
        )
        off = statistics.median(each["own"] / each["predicted"] - 1 for each in every)
        wall = statistics.median(turn[name]["ray"] / turn[DRAINED]["ray"] for turn in turns)
        gain = statistics.median(gains)
        found[name] = {"gain": gain, "promised": promised, "off": off, "ray": wall}
        rows.append(
            (
                name,
                f"{own:.0f}",
                f"{gain:.2f}",
                f"{promised:.2f}",
                f"{100 * off:+.1f} %",
                " ".join(f"{each:.2f}" for each in gains),
                f"{wall:.2f}",
            )
        )
    print(text_table(HEADER, rows))
    target = found.get("continuous2", {})
    said = ""
    if target:
        met = target["gain"] >= TARGET
        near = abs(target["off"]) <= CLOSE
        said = f"at staleness 2 {target['gain']:.2f}x over the drained rollout (target {TARGET}x: "
        said += f"{'met' if met else 'NOT met'}), {100 * target['off']:+.1f} % off the prediction "
        said += f"(target 10 %: {'met' if near else 'NOT met'}); {target['ray']:.2f}x on the wall"
        print(said)
    page = markdown_report(
        "Rollouts that never drain", facts, [markdown_table(HEADER, rows), said], NOTES
    )
    document = {"machine": facts, "found": found, "turns": list(turns)}
    write_results(folder, "continuous", document, page)


NOTES = (
    "Throughput is of tokens that updates learned from, after the first iterations. `over drained` "
    "and `predicted` are ratios to the row of `split`, whose rollouts and updates take turns.",
    "`off by` is how many more tokens a second there were than predicted for that placement.",
    "Seconds are the processor's, played by the executor on a virtual clock of two cores. `wall` "
    "is the ratio as the clock on the wall had it, on a machine with the load that is said, on "
    "Ray, with a process for each pool.",
)


def main() -> None:
    """Measure the sides in turns, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--placements", nargs="*", default=list(SIDES))
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.side:
        before = engine_seconds()
        found = side(given.side, given.iterations)
        found |= {"own": replayed(given.side, found), "engine": averaged(before, engine_seconds())}
        given.out.write_text(json.dumps(found), encoding="utf-8")
        return
    facts = machine()
    turns = []
    for number in range(given.turns):
        turn: dict[str, Any] = {}
        first: Mapping[str, Any] = {}
        for name in given.placements:
            say(f"{name}: {number + 1} of {given.turns}")
            words = ["--side", name, "--iterations", str(given.iterations)]
            found = apart(__file__, words, f"continuous-{name}-{number}")
            first = first or found
            tokens = [64 * length for length in found["length"]]
            beside = on_ray(name, given.iterations)
            turn[name] = {
                "own": rate(found["own"], tokens),
                "ray": rate(beside["ends"], [64 * each for each in beside["length"]]),
                "predicted": predicted(name, found["engine"], first),
                "lag": max(found["lag"]),
            }
        turns.append(turn)
    facts["load at the end"] = machine()["load"]
    report(turns, facts, given.results)


if __name__ == "__main__":
    main()
