"""Curves of a machine: through what was timed, before the table's figures, corrected by spans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlflow.scheduler import observed
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.lengths import Load, full_lengths
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.costs.seen import corrections
from rlflow.scheduler.devices.cluster import Cluster, cpu_cluster, parse_cluster
from rlflow.scheduler.devices.collectives import group_of, to_host_rate
from rlflow.scheduler.devices.curves import Curves, curves_of
from rlflow.scheduler.devices.hardware import KINDS
from rlflow.scheduler.devices.measured import NOTHING, MeasuredCosts
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.plan.plan import Plan
from tests.scheduler.examples import COLOCATE, grpo
from tests.scheduler.test_measured_runs import Seen, costs_of

H100 = KINDS["h100"]
BATCH = Load(rows=8, prompts=8, prompt=512, lengths=full_lengths(1536))


def timing(what: str, size: float, rate: float) -> SimpleNamespace:
    return SimpleNamespace(what=what, size=size, rate=rate)


MEASURED = curves_of(
    [
        timing("product of rows bfloat16 1024", 16, 1e13),
        timing("product of rows bfloat16 1024", 1024, 2e14),
        timing("product of rows bfloat16 16384", 16, 2e13),
        timing("product of rows bfloat16 16384", 8192, 8e14),
        timing("attention bfloat16", 512, 1e14),
        timing("attention bfloat16", 8192, 4e14),
        timing("all_gather", 1024, 1e6),
        timing("all_gather", 1 << 20, 1e10),
        timing("all_gather", 1 << 28, 2e11),
        timing("h2d pinned", 1 << 20, 1e10),
        timing("h2d pinned", 1 << 28, 5e10),
        timing("d2h pinned", 1 << 20, 2e10),
        timing("d2h pinned", 1 << 28, 4e10),
        timing("launch", 1000, 2e5),
    ]
)
OWN = replace(H100, curves=MEASURED)


def test_between_two_sizes_rates_are_a_line_of_logarithms() -> None:
    attention = MEASURED.attended
    assert [1e14, 1e14, 4e14, 4e14] == [attention("bfloat16", n) for n in (1, 512, 8192, 1e6)]
    assert attention("bfloat16", 2048) == pytest.approx(2e14)
    assert attention("float32", 2048) is None


def test_a_product_has_the_curve_of_the_nearest_width_beside_the_best_of_all() -> None:
    wide, narrow = MEASURED.filled("bfloat16", 8192, 20_000), MEASURED.filled("bfloat16", 1024, 900)
    assert (1.0, 0.25) == (wide, narrow)
    assert MEASURED.filled("bfloat16", 8192, 3000) == 0.25
    assert MEASURED.filled("float32", 8192, 3000) is None
    assert "launch" not in dict(MEASURED.found), "one size is no curve"


def test_the_version_is_that_of_all_points() -> None:
    other = curves_of([timing("attention bfloat16", 512, 1e14), timing("attention bfloat16", 8, 1)])
    assert 8 == len(MEASURED.version) == len(other.version)
    assert MEASURED.version != other.version
    assert "" == Curves().version


def test_estimates_read_curves_before_the_table() -> None:
    table = Roofline(kind=H100, shape=known_shape("qwen2.5-7b"), size=2)
    own = replace(table, kind=OWN)
    tokens, pairs = 8 * 2048, 8 * 2048**2 / 2
    assert own.filled(8192) == 1.0 != table.filled(8192)
    assert own.attending_rate(1e15, 2048) == pytest.approx(2e14)
    assert own.computed(tokens, tokens, pairs) != table.computed(tokens, tokens, pairs)
    slow = replace(own, micro_tokens=1024, shape=replace(own.shape, ffn=1024))
    assert slow.filled(1024) == 0.25
    assert own.forward(BATCH) > 0


def test_collectives_and_copies_take_the_rate_of_their_size() -> None:
    cluster = Cluster(kind=OWN, count=16, hosts=2)
    near, far = group_of(cluster, range(4)), group_of(cluster, range(16))
    size = 1 << 20
    latency = near.start + 3 * near.step
    assert near.all_gather(size) - latency == pytest.approx(0.75 * size / 1e10)
    assert near.all_gather(1000) == replace(near, measured=None).all_gather(1000)
    assert far.measured is None, "what was measured is of one host"
    assert [1e10, 4e10] == [to_host_rate(OWN, size) for size in (1 << 20, 1 << 30)]
    assert to_host_rate(H100, 1 << 20) == H100.host_link * H100.reached
    assert 1e10 == to_host_rate(replace(OWN, host_link=1e10), 1 << 30), "shared ways bound it"


def test_a_file_of_doctor_is_read_as_curves(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    points = "".join(
        f'\n[[kinds.mine.measured]]\nwhat = "attention bfloat16"\nsize = {size}\n'
        f"rate = {rate}\nseconds = 1e-3\n"
        for size, rate in ((512, 1e14), (8192, 4e14))
    )
    file.write_text(f'devices = "mine:8"\n[kinds.mine]\nbase = "h100"\n{points}')
    found = parse_cluster(str(file), 8).kind.curves
    assert found.attended("bfloat16", 2048) == pytest.approx(2e14)
    file.write_text('devices = "mine:8"\n[kinds.mine]\nbase = "h100"\n')
    assert Curves() == parse_cluster(str(file), 8).kind.curves


def with_curves() -> Cluster:
    found = cpu_cluster(1, threads=1, memory=4e9)
    rows = [timing(f"product of rows float32 {w}", n, 1e10 * n) for w in (64, 512) for n in (1, 64)]
    return replace(found, kind=replace(found.kind, curves=curves_of(rows)))


def plan_on(cluster: Cluster, **graph: int) -> Plan:
    return compile_plan(grpo(every=0, **graph), COLOCATE, cluster).plan


def slower(times: float, turns: int, cluster: Cluster) -> MeasuredCosts:
    """What is kept of a run in which all that a model does took so many times its estimate."""
    plan, spans, clock = plan_on(cluster), [], 0.0
    for turn in range(turns):
        for action in plan.actions:
            if action.due(turn):
                took = times * (action.cost.seconds or 0.0)
                spans.append(Seen(action.id, turn, clock, clock + took))
                clock += took
    costs = costs_of(plan.graph, plan, cluster)
    return NOTHING.adding(observed.samples(plan, costs, spans, [], begun=0, origin="run"))


@pytest.mark.parametrize(("turns", "low", "high"), [(4, 1.1, 1.5), (101, 3.0, 4.0)])
def test_three_spans_do_not_overturn_a_curve_and_a_hundred_do(
    turns: int, low: float, high: float
) -> None:
    """The first turn warms up: 3 spans of 4, which took four times as long, weigh 3 / 13."""
    cluster = with_curves()
    before = plan_on(cluster).action("actor.update").cost
    known = replace(cluster, measured=slower(4.0, turns, cluster))
    after = plan_on(known).action("actor.update").cost
    assert before.seconds
    assert low < (after.seconds or 0) / before.seconds < high
    version = cluster.kind.curves.version
    assert f"{turns - 1} spans weigh" in after.source
    assert f"beside curves {version}" in after.source
    assert after.source.startswith("measured") is (turns > 11)


def test_spans_correct_other_work_of_their_kind() -> None:
    """An update with other epochs was never run; estimates of updates were 4 times too short."""
    cluster = with_curves()
    known = replace(cluster, measured=slower(4.0, 31, cluster))
    other, plain = (plan_on(c, epochs=3).action("actor.update").cost for c in (known, cluster))
    by = corrections.weight(30)
    assert (other.seconds or 0) / (plain.seconds or 1) == pytest.approx(4.0**by, rel=0.05)
    assert "times " in other.source
    assert "by 30 spans" in other.source


def test_other_curves_know_nothing_of_it_and_a_table_takes_what_was_measured() -> None:
    cluster = with_curves()
    found = slower(4.0, 31, cluster)
    bare = replace(cluster, measured=found, kind=replace(cluster.kind, curves=Curves()))
    assert plan_on(bare).action("actor.update").cost.source.startswith("measured, 1 run")
    again = curves_of([timing("product of rows float32 64", n, 3e10 * n) for n in (1, 64)])
    moved = replace(cluster, measured=found, kind=replace(cluster.kind, curves=again))
    assert "times" not in plan_on(moved, epochs=3).action("actor.update").cost.source
