from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gauges
import pytest
import vs_verl_dispatch as bench
from common import HERE
from gauges import Turn
from vs_verl_dispatch import BYTES_PER_ROW, Counts, Measured, Report, Way, lines, rows_of


def measured(*turns: tuple[float, float, float], ready: float = 100.0, peak: float = 100.0):
    made = tuple(Turn(seconds=s, cpu=c, submitting=g) for s, c, g in turns)
    return Measured(turns=made, actions=5, ready_mb=ready, peak_mb=peak, column=(0.5, 0.0, 1.0))


def test_a_turn_counts_its_wall_time_and_within_it_the_submitting():
    turn = Turn()

    with turn.running():
        for _ in range(2):
            with turn.submits():
                sum(range(10_000))

    assert 0 < turn.submitting < turn.seconds
    assert 0 < turn.cpu


def test_a_field_of_the_process_status_is_read_in_millions_of_bytes():
    text = "Name:\tpython\nVmHWM:\t  2000 kB\nVmRSS:\t  1000 kB\n"

    assert (1.024, 2.048) == (gauges.status("VmRSS", text), gauges.status("VmHWM", text))
    with pytest.raises(KeyError):
        gauges.status("VmSwap", text)


def test_the_peak_of_memory_can_be_forgotten():
    """In a process of its own: a large one keeps what was freed."""
    folder = str(Path(gauges.__file__).parent)
    code = f"""if True:
        import sys
        sys.path.insert(0, {folder!r})
        import gauges
        held = bytearray(64_000_000)
        held[::4096] = b"x" * len(held[::4096])
        with_it = gauges.peak()
        del held
        gauges.forget_peak()
        print(with_it - gauges.peak())"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(made.stdout) >= 50


def test_a_batch_of_a_size_has_rows_for_both_workers():
    sizes = {size: rows_of(size) for size in (0.001, *bench.BATCHES_MB)}

    assert 2 == sizes[0.001]
    assert all(rows % 2 == 0 for rows in sizes.values())
    for size in bench.BATCHES_MB:
        assert abs(sizes[size] * BYTES_PER_ROW / 1e6 - size) <= BYTES_PER_ROW / 1e6


def test_the_controllers_figures_are_a_third_of_the_chains_and_the_wall_time_is_whole():
    ours = [measured((0.3, 0.03, 0.006))]
    theirs = [measured((0.6, 0.6, 0.6))]

    cpu, submitting, wall = lines("union", ours, theirs)

    assert (0.01, 0.2) == pytest.approx((cpu.ours, cpu.theirs))
    assert (0.002, 0.2) == pytest.approx((submitting.ours, submitting.theirs))
    assert (0.3, 0.6) == pytest.approx((wall.ours, wall.theirs))
    assert [True, True, False] == [line.passed for line in (cpu, submitting, wall)]
    assert ("0.500", "<= 0.25", "NO") == (wall.row()[4], *wall.row()[6:])
    assert len(bench.HEADER) == len(wall.row())


def test_the_ratio_of_a_gauge_is_the_median_of_the_pairs():
    # The second pair ran in a slow hour: both sides took ten times as long.
    ours = [measured((1.0, 1, 1)), measured((10.0, 1, 1)), measured((1.0, 1, 1))]
    theirs = [measured((4.0, 1, 1)), measured((80.0, 1, 1)), measured((5.0, 1, 1))]

    wall = lines("union", ours, theirs)[2]

    assert (0.25, 0.125, 0.2) == wall.ratios
    assert 0.2 == wall.ratio


def test_a_median_turn_is_taken_gauge_by_gauge():
    made = measured((1.0, 0.3, 0.1), (3.0, 0.1, 0.2), (2.0, 0.2, 0.3))

    assert (2.0, 0.2, 0.2) == tuple(made.median(g) for g in ("seconds", "cpu", "submitting"))


def test_sides_that_computed_different_columns_are_refused():
    same = measured((1, 1, 1))
    other = Measured(turns=same.turns, actions=3, ready_mb=1, peak_mb=1, column=(0.5, 0.0, 0.9))

    bench.check_same(same, same)
    with pytest.raises(SystemExit, match="the columns differ"):
        bench.check_same(same, other)


def test_what_a_side_wrote_is_read_back():
    result = {
        "turns": [{"seconds": 1.0, "cpu": 0.5, "submitting": 0.1}],
        "actions": 3,
        "ready_mb": 400.0,
        "peak_mb": 1300.0,
        "mean": 0.5,
        "min": 0.0,
        "max": 1.0,
    }

    made = Measured.read(json.loads(json.dumps(result)))

    assert (1.0, 900.0) == (made.median("seconds"), made.growth)
    assert (0.5, 0.0, 1.0) == made.column


def test_results_are_written_while_memory_is_still_to_be_measured(tmp_path, capsys):
    facts = {
        "date": "d",
        "commit": "c",
        "cpu": "p",
        "flags": [],
        "products": "mkl",
        "cores": 2,
        "memory_gb": 1,
        "python": "3",
    }
    report = Report({**facts, "load": [0.0]}, Counts(pairs=1, warmup=0, turns=1), tmp_path)
    report.ours.append(measured((0.1, 0.01, 0.01)))
    for runs in report.theirs.values():
        runs.append(measured((1.0, 0.3, 0.3)))

    report.write()
    assert "batch MB" not in (tmp_path / "vs_verl_dispatch.md").read_text()
    report.memory.append((4, 108, measured((1, 1, 1), peak=103.0), measured((1, 1, 1), peak=190.0)))
    report.write()

    assert "| 4 | 108 | 3.0 | 90.0 |" in (tmp_path / "vs_verl_dispatch.md").read_text()
    data = json.loads((tmp_path / "vs_verl_dispatch.json").read_text())
    assert len(bench.WAYS) * len(bench.GAUGES) == len(data["figures"])
    assert all(figure["passed"] for figure in data["figures"])


def test_verls_ways_have_names_of_their_own():
    assert "future numpy" == Way(chain="future", serialization="numpy").name
    assert len(bench.WAYS) == len({way.name for way in bench.WAYS})


def test_every_package_of_verls_environment_is_pinned():
    lines = (HERE / "constraints-verl.txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]

    assert all("==" in line for line in pinned)
    assert {"verl==0.9.1", "torch==2.13.0", "ray==2.60.0"} <= set(pinned)


def test_both_sides_have_the_ops_of_the_pipeline():
    from rlflow.cli.commands import Target, compile_target

    target = Target(pipeline=str(HERE / "pipelines" / "dispatch.py"), backend="ray", threads=1)
    plan = compile_target(target).compiled.plan
    from dispatch_side import between, ends

    assert "batch" == ends(plan)[0]
    assert 5 == between(plan)
    fields = next(a.fields for a in plan.actions if a.kind == "transfer")
    assert {"prompt_tokens", "response_tokens", "mask", "log_probs", "values", "rewards"} == set(
        fields
    )
