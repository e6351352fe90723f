"""Pass rates: what is declared, what is measured, and which prompts follow."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from pydantic import ValidationError

import rlflow as rf
from rlflow import ops
from rlflow.batch import make_batch, strings, text
from rlflow.errors import DataError, RunError
from rlflow.graph.graph import Graph
from rlflow.graph.rules.check import check_graph
from rlflow.graph.trace import tracing
from rlflow.ops.bodies.loops import curriculum
from rlflow.ops.bodies.missing_reward import of_valid_rows
from tests.ops.calls import call_of

pytestmark = pytest.mark.torch

PASSES = rf.PassRates("passes", by="level")
LEVELS = {str(n): rf.data.arithmetic(digits=n, test_size=20) for n in (1, 2)}


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def mixed():
    return rf.data.mix(LEVELS, column="level")


def found_in(*tracked, data=None, drawn=PASSES, others=False):
    """The findings of a pipeline that draws by pass rates, tracked so often; a model learns."""
    with tracing() as trace:
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(data or mixed(), batch=4, weights=drawn)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
        reward = ops.reward(exact, samples)
        rows = (samples, reward)
        if others:
            plain = ops.prompts(mixed(), batch=4, name="plain")
            sampled = ops.rollout(actor, plain, n=2, max_new_tokens=4, name="sampled")
            rows = (sampled, ops.reward(exact, sampled, name="judged"))
        for passes in tracked:
            ops.track(passes, *rows)
        ops.update(actor, samples, ops.advantage("grpo", samples, reward), loss=rf.PolicyLoss())
    graph = Graph(
        name="made", nodes=tuple(trace.nodes.values()), models=tuple(trace.models.values())
    )
    return trace.findings or check_graph(graph)


# --- declaring ------------------------------------------------------------------------------


def test_one_op_draws_and_one_tracks():
    assert [] == found_in(PASSES)


def test_rows_without_a_column_can_be_buckets_of_their_own():
    by_row = rf.PassRates("passes")
    assert [] == found_in(by_row, drawn=by_row, data=rf.data.arithmetic(digits=2))


def test_a_column_that_the_data_lacks_is_named_with_the_nearest():
    wrong = rf.PassRates("passes", by="levl")
    finding = found_in(drawn=wrong)[0]
    assert ("E644", ("level",), 'by="level"') == (finding.code, tuple(finding.near), finding.fix)
    assert "'levl'" in finding.what
    assert "prompt, answer, level, row_id" in finding.got


@pytest.mark.parametrize(
    ("tracked", "what"),
    [
        ((), "1 op drawing prompts by 'passes', and 0 tracking it"),
        ((PASSES, PASSES), "1 op drawing prompts by 'passes', and 2 tracking it"),
        (
            (rf.PassRates("passes", by="level", floor=0.5),),
            "'prompts' and 'passes' have different options of 'passes'",
        ),
        (
            (PASSES, rf.PassRates("other", by="level")),
            "0 ops drawing prompts by 'other', and 1 tracking it",
        ),
    ],
)
def test_pass_rates_are_drawn_by_once_and_tracked_once(tracked, what):
    finding = found_in(*tracked)[0]
    assert ("E645", what) == (finding.code, finding.what)
    assert finding.where is not None


def test_samples_of_other_prompts_are_not_tracked():
    (finding,) = found_in(PASSES, others=True)
    assert "E645" == finding.code
    assert "'passes' tracks other rows than those that 'prompts' draws" == finding.what


@pytest.mark.parametrize(
    "options",
    [
        {"floor": 1.5},
        {"decay": -0.1},
        {"prior": float("nan")},
        {"prior_samples": 0},
        {"weight": "entropy"},
        {"threshold": float("inf")},
        {"levels": 3},
    ],
)
def test_options_that_cannot_be_right_are_refused(options):
    with pytest.raises(ValidationError):
        rf.PassRates("passes", **options)


# --- what is measured -----------------------------------------------------------------------


def tracked(state, rows, iteration=0, spec=PASSES, staleness=0):
    """Track rewards `[(level, reward), ...]`; returns the numbers that are logged."""
    levels, rewards = [level for level, _ in rows], [reward for _, reward in rows]
    inputs = make_batch({"level": text(levels), "reward": torch.tensor(rewards)}, len(rows))
    call = call_of(inputs=inputs, params={"weights": spec}, iteration=iteration)
    made = curriculum.track(replace(call, state=state, staleness=staleness))
    return {name: stat.value for name, stat in made.metrics.items()}


def rates(state, version, spec=PASSES, names=("1", "2")):
    return [curriculum.pass_rate(spec, state, version, name) for name in names]


def test_pass_rates_are_those_computed_by_hand():
    """decay 0.9, prior 1/2 of one sample.

    iteration 0: level 1 passes 3 of 4      seen 4              passed 3
    iteration 1: level 2 passes 0 of 1;     level 1 stays
    iteration 2: level 1 passes 1 of 2      seen 0.9 4 + 2      passed 0.9 3 + 1
    """
    state = {}
    batches = [[("1", float(n != 1)) for n in range(4)], [("2", 0.0)], [("1", 0.0), ("1", 1.0)]]
    logged = [tracked(state, rows, n, staleness=3) for n, rows in enumerate(batches)]
    assert {"passed": 0.75, "passed/1": 0.75} == logged[0]
    assert {"passed": 0.5, "passed/1": 0.5} == logged[2]
    assert [0.5, 0.5] == rates(state, 0)
    assert [3.5 / 5, 0.5] == rates(state, 1)
    assert [3.5 / 5, 0.5 / 2] == rates(state, 2)
    assert pytest.approx([4.2 / 6.6, 0.5 / 2]) == rates(state, 3)


def test_without_decay_samples_count_alike_and_with_all_of_it_only_the_last_batch():
    for decay, expected in ((1.0, 3.5 / 7), (0.0, 1.5 / 3)):
        spec, state = rf.PassRates("passes", by="level", decay=decay), {}
        tracked(state, [("1", 1.0), ("1", 1.0), ("1", 0.0), ("1", 0.0)], 0, spec)
        tracked(state, [("1", 1.0), ("1", 0.0)], 1, spec)
        assert [expected] == rates(state, 2, spec, ("1",))


def test_a_threshold_says_who_passes():
    spec, state = rf.PassRates("passes", by="level", threshold=2.0, prior_samples=2), {}
    logged = tracked(state, [("1", 2.0), ("1", 5.0), ("1", 1.9), ("2", -3.0)], 0, spec)
    assert {"passed": 0.5, "passed/1": 2 / 3, "passed/2": 0.0} == pytest.approx(logged)
    assert [3 / 5, 1 / 3] == rates(state, 1, spec)


@pytest.mark.parametrize("reward", [1.5, -0.25])
def test_a_reward_that_is_no_part_of_a_pass_is_an_error(reward):
    with pytest.raises(RunError) as caught:
        tracked({}, [("1", 0.0), ("2", reward)])
    finding = caught.value.findings[0]
    assert ("E647", "row 1 of 2") == (finding.code, finding.got)
    assert 'rf.PassRates("passes", threshold=1.0)' == finding.fix


def test_samples_that_are_not_valid_are_left_out():
    inputs = make_batch(
        {
            "level": text(["1", "1", "2"]),
            "reward": torch.tensor([1.0, 9.0, 0.0]),
            "valid": torch.tensor([True, False, True]),
        },
        3,
    )
    state = {}
    params = {"weights": PASSES, "body": "rlflow.ops.bodies.loops.curriculum:track"}
    of_valid_rows(replace(call_of(inputs=inputs, params=params), state=state))
    assert [1.5 / 2, 0.5 / 2] == rates(state, 1)


def test_a_batch_without_samples_leaves_pass_rates_as_they_are():
    state = {}
    tracked(state, [("1", 1.0)])
    assert {} == tracked(state, [], 1)
    assert rates(state, 1) == rates(state, 2)


@given(staleness=st.integers(0, 3), trips=st.integers(1, 3))
def test_versions_stay_as_long_as_they_may_be_read_and_no_longer(staleness, trips):
    """Iteration i of the prompts reads version i - k while iteration i is tracked, not later."""
    state, known = {}, {0: [0.5]}
    for iteration in range(8):
        for trip in range(trips):
            rows = [("1", float((iteration + trip) % 2))]
            tracked(state, rows, iteration, staleness=staleness)
        known[iteration + 1] = rates(state, iteration + 1, names=("1",))
        for late in (iteration, iteration + 1):
            wanted = max(late - staleness, 0)
            assert wanted == curriculum.version_read(state, late - staleness)
            assert known[wanted] == rates(state, wanted, names=("1",))
    versions = {key.split("/")[1] for key in state if "/" in key}
    assert {str(v) for v in range(max(8 - staleness - 1, 1), 9)} == versions
    trips_counted = state[f"seen/{8}/1"]
    assert pytest.approx(sum(0.9**n for n in range(8 * trips))) == trips_counted


def test_a_run_that_goes_on_with_more_staleness_reads_the_oldest_version_there_is():
    state = {}
    for iteration in range(4):
        tracked(state, [("1", 1.0)], iteration)
    assert 3 == curriculum.version_read(state, 4 - 3)


# --- what is drawn --------------------------------------------------------------------------


def drawn(state, iteration=0, spec=PASSES, size=8, data=None, draw=None, staleness=0):
    """The rows of an iteration: levels, row ids, and the numbers that are logged."""
    params = {"weights": spec, "data": data or mixed(), "batch": size}
    fields = [rf.graph.fields.row(name, "text") for name in ("prompt", "level", "row_id")]
    call = call_of(params=params, wanted=("level", "row_id"), outputs=fields, iteration=iteration)
    made = curriculum.prompts_by_pass_rate(
        replace(call, state=state, draw=draw, staleness=staleness)
    )
    assert made.rows == size
    return strings(made.fields["level"]), made.fields["row_id"].tolist(), made.metrics


def test_weights_are_those_computed_by_hand():
    """Learnability of 3/4 is 3/16, of 1/4 as well, of 1/2 is 1/4, of 0 and 1 it is 0."""
    assert [0.1875, 0.1875, 0.25, 0, 0] == [
        curriculum.worth(PASSES, rate) for rate in (0.75, 0.25, 0.5, 0, 1)
    ]
    hard = rf.PassRates("passes", weight="difficulty")
    assert [0.25, 1, 0] == [curriculum.worth(hard, rate) for rate in (0.75, 0, 1)]


def test_levels_come_by_their_share():
    """Level 1 passes 7 of 8: rate 7.5 / 9, weight 5/36. Level 2: 0.5, weight 1/4 = 9/36."""
    state = {}
    tracked(state, [("1", float(n > 0)) for n in range(8)])
    levels, ids, metrics = drawn(state, 1, rf.PassRates("passes", by="level", floor=0.0), 14)
    assert (5, 9) == (levels.count("1"), levels.count("2"))
    assert pytest.approx(5 / 14) == metrics["share/1"]
    assert (7.5 / 9, 0.5) == (metrics["rate/1"], metrics["rate/2"])
    assert all((row_id < 80) is (level == "1") for level, row_id in zip(levels, ids, strict=True))
    assert {"drawn/1": 5.0, "drawn/2": 9.0}.items() <= state.items()


def test_stale_prompts_read_the_pass_rates_of_their_version():
    state = {}
    tracked(state, [("1", 1.0)] * 8, 0, staleness=1)
    assert 0.5 == drawn(state, 1, staleness=1)[2]["rate/1"]
    assert 8.5 / 9 == drawn(state, 2, staleness=1)[2]["rate/1"]


def test_trips_of_an_iteration_draw_on():
    state = {}
    first, second = drawn(state, 2, draw=6), drawn(state, 2, draw=7)
    assert not set(first[1]) & set(second[1])
    assert first[2] == second[2]
    assert len({tuple(drawn({}, 2, draw=draw)[0]) for draw in range(6, 12)}) > 3


def test_each_row_comes_once_before_any_comes_again():
    rows = [{"prompt": str(n), "level": "ab"[n % 2]} for n in range(12)]
    source = rf.data.generator(rows.__getitem__, size=12, columns=("prompt", "level"))
    state, seen = {}, []
    for iteration in range(9):
        seen += drawn(state, iteration, size=4, data=source)[1]
    for level in (0, 1):
        ids = [row_id for row_id in seen if row_id % 2 == level]
        for start in range(0, len(ids) - 5, 6):
            assert 6 == len(set(ids[start : start + 6]))


def test_many_buckets_are_summed_up_in_the_log_and_too_many_refused(monkeypatch):
    spec = rf.PassRates("passes")
    source = rf.data.mix({"all": LEVELS["1"]}, column="level")
    metrics = drawn({}, 0, spec, data=source)[2]
    assert {"rate/min", "rate/max", "share/min", "share/max"} == set(metrics)
    monkeypatch.setattr(curriculum, "MOST_BUCKETS", 79)
    with pytest.raises(DataError) as caught:
        drawn({}, 0, spec, data=source)
    assert "E648" == caught.value.findings[0].code


def test_by_row_the_state_counts_rows():
    spec, state = rf.PassRates("passes"), {}
    inputs = make_batch({"row_id": torch.tensor([3, 3, 7]), "reward": torch.ones(3)}, 3)
    call = call_of(inputs=inputs, params={"weights": spec})
    curriculum.track(replace(call, state=state))
    assert [2.5 / 3, 1.5 / 2, 0.5] == rates(state, 1, spec, ("3", "7", "8"))
