"""What drafted tokens change of a rollout's seconds: by hand, by acceptance, and in plans."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import rlflow as rf
from rlflow.cli.commands import with_shapes
from rlflow.cli.main import cli
from rlflow.graph.graph import Graph
from rlflow.graph.roles import Drafted
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.lengths import Load, ResponseLengths, stages
from rlflow.scheduler.costs.ranks.draft_turns import BY_MODEL, BY_NGRAMS, DraftTurn, drafting_shape
from rlflow.scheduler.costs.roofline import Roofline, Step
from rlflow.scheduler.costs.rows.assumptions import seconds_rest_on
from rlflow.scheduler.costs.serving import Serving
from rlflow.scheduler.devices.cluster import Cluster
from rlflow.scheduler.devices.collectives import group_of
from rlflow.scheduler.devices.efficiency import CACHE_READ, DRAWN_BYTES, RAMP
from rlflow.scheduler.devices.hardware import KINDS
from rlflow.scheduler.models.shapes import known_shape
from rlflow.scheduler.passes.drafted import rows_that_gain
from rlflow.scheduler.plan.plan import Plan
from tests.budget import examples
from tests.scheduler.examples import compiled_with
from tests.scheduler.strategies import cluster
from tests.scheduler.test_engine_drafters import drafted, placed, sampling

MEMORY = 10**12
ARITHMETIC = str(Path(__file__).parents[2] / "pipelines/grpo_arithmetic.py")
SEVEN_B = Roofline(
    kind=KINDS["h100"], shape=known_shape("qwen2.5-7b"), size=2, serving=Serving(captured=512)
)
HALF_B = replace(SEVEN_B, shape=known_shape("qwen2.5-0.5b"))
LOAD = Load(rows=64, prompts=8, prompt=256, lengths=ResponseLengths(2048, 1024.0, 0.6))


def drafts(roof: Roofline, drafted: int, acceptance: float, by: Roofline | None) -> Roofline:
    return replace(roof, turn=DraftTurn(drafted=drafted, acceptance=acceptance), proposer=by)


def test_a_turn_brings_the_tokens_of_a_geometric_series() -> None:
    """(1 - a^(k + 1)) / (1 - a): 1 + 0.5 + 0.25 + 0.125 of three that are accepted by halves."""
    assert 1.875 == DraftTurn(drafted=3, acceptance=0.5).tokens
    assert 4 == DraftTurn(drafted=3, acceptance=1.0).tokens
    assert 1 == DraftTurn(drafted=3, acceptance=0.0).tokens
    assert DraftTurn(drafted=5, acceptance=0.8).tokens == pytest.approx((1 - 0.8**6) / 0.2)
    assert 1 + 3 * 2 == DraftTurn(drafted=3, acceptance=0.5, beams=2).read


def test_a_token_of_a_row_that_drafts_by_hand() -> None:
    """Of 4 rows with 700 tokens, 3 drafted: 16 tokens read weights and cache once, by 1.875."""
    roof = drafts(SEVEN_B, 3, 0.5, HALF_B)
    weights, cache = 7_615_616_512 * 2, 4 * 700 * 2 * 28 * 4 * 128 * 2
    logits = 16 * 152_064 * DRAWN_BYTES
    launches = SEVEN_B.kind.launch + 360 * (SEVEN_B.kind.replayed + RAMP)
    policy = (weights + logits) / (0.8 * 3.35e12) + cache / (CACHE_READ * 3.35e12) + launches
    host = SEVEN_B.serving.scheduled(4)
    turn = policy + host + 3 * HALF_B.passing()(4, 700)
    assert roof.stepping()(4, 700) == pytest.approx(turn / 1.875)
    assert HALF_B.passing()(4, 700) == pytest.approx(HALF_B.decoding()(4, 700) - host)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 8),
    st.integers(1, 2000),
    st.booleans(),
    st.booleans(),
)
def test_seconds_fall_with_acceptance_and_none_accepted_is_never_faster(
    one: float, other: float, count: int, rows: int, by_model: bool, embedded: bool
) -> None:
    """Also beside the embedded engine, whose plain rollouts are replayed from graphs."""
    plain = replace(SEVEN_B, serving=None, paged=True) if embedded else SEVEN_B
    own = replace(plain, paged=False)
    by = replace(HALF_B, serving=own.serving) if by_model else None
    low, high = sorted((one, other))
    slow, fast = (drafts(own, count, chance, by).stepping()(rows, 900) for chance in (low, high))
    assert fast <= slow
    assert drafts(own, count, 0.0, by).stepping()(rows, 900) >= plain.decoding()(rows, 900)
    assert drafts(own, 0, high, by).stepping()(rows, 900) >= plain.decoding()(rows, 900)


def test_the_gain_falls_where_many_rows_compute_for_long() -> None:
    found = drafts(SEVEN_B, 3, 0.7, HALF_B)
    gains = [
        SEVEN_B.stepping()(rows, 900) / found.stepping()(rows, 900) for rows in (64, 128, 256, 4096)
    ]
    assert sorted(gains, reverse=True) == gains
    assert gains[0] > 1.4
    assert gains[-1] < 1


def test_drafts_of_few_rows_alone_are_the_shortest_where_many_compute_for_long() -> None:
    """A stage costs what it does with or without drafts, and the drafter reads the rows once."""
    long = ResponseLengths(8192, 1024.0, 0.9)
    many = replace(LOAD, rows=2048, prompts=256, lengths=long)
    always, stages_of = drafts(SEVEN_B, 3, 0.7, HALF_B), stages(many.lengths, many.rows, 1)
    seconds = {math.inf: always.rollout(many)}
    for most in (0, 1, 64, 128, 256, 4096):
        late = replace(always, turn=replace(always.turn, rows=most))
        seconds[most] = late.rollout(many)
        legs = sum(late.rollout(many, leg, 3) for leg in range(3))
        assert legs == pytest.approx(seconds[most], rel=1e-9)
        plain, drafted = SEVEN_B.stepping(), always.stepping()
        expected, begins = SEVEN_B.prefill(many), late.turn.begins(stages_of)
        for number, stage in enumerate(stages_of):
            by = plain if number < begins else drafted
            expected += stage.tokens * stage.goes_on * by(stage.live, 256 + stage.age)
        if begins < len(stages_of):
            stage = stages_of[begins]
            left = replace(many, rows=stage.live, prompts=stage.live, prompt=256 + int(stage.age))
            expected += stage.goes_on * HALF_B.prefill(left if begins else many)
        assert seconds[most] == pytest.approx(expected, rel=1e-9)
    assert seconds[4096] == seconds[math.inf]
    assert seconds[0] == SEVEN_B.rollout(many)
    assert seconds[256] < min(seconds[0], seconds[64], seconds[math.inf])


def test_the_drafter_reads_the_prompts_too() -> None:
    by = drafts(SEVEN_B, 3, 0.7, HALF_B).rollout(LOAD)
    none = drafts(SEVEN_B, 3, 0.7, None)
    decoded = by - none.rollout(LOAD) - HALF_B.prefill(LOAD)
    assert decoded > 0
    assert SEVEN_B.rollout(LOAD) / by > 1.3


def test_three_tokens_of_heads_gain_more_than_was_published_of_a_model_of_that_size() -> None:
    """SkyRL with MTP: 310.1 s to 152.4 s, 2.03, of a 9B over 4 ranks, 77.3 % of 3 accepted.

    Neither its lengths nor its shape are said: a dense 8B and half of the limit stand for them, and
    gain 2.65, a factor of 1.3 more. That share of three tokens is an acceptance of 0.877: of
    a, a^2 and a^3 0.773 is the mean.
    """
    chance = 0.877
    assert (chance + chance**2 + chance**3) / 3 == pytest.approx(0.773, abs=1e-3)
    policy = known_shape("qwen3-8b")
    group = group_of(Cluster(kind=KINDS["h100"], count=8), range(4))
    roof = Roofline(
        kind=KINDS["h100"], shape=policy, size=2, tp=group, serving=Serving(captured=512)
    )
    by = replace(roof, shape=heads_of("NEXTN"))
    load = Load(rows=128, prompts=16, prompt=256, lengths=ResponseLengths(8192, 4096.0, 0.6))
    gain = roof.rollout(load) / drafts(roof, 3, chance, by).rollout(load)
    assert 1 < gain / (310.1 / 152.4) < 1.35


def engine_of(algorithm: str) -> rf.SGLang:
    path = "/models/none" if algorithm == "STANDALONE" else None
    return rf.SGLang(speculative=rf.Speculative(algorithm=algorithm, draft_model=path))


def heads_of(algorithm: str) -> Any:
    plan = planned(sampling(1.0), placed(engine=engine_of(algorithm)))
    return drafting_shape(plan.instance("actor@gen/sglang"), known_shape("qwen3-8b"), 2)


def test_what_options_draft_with_is_cut_from_the_policy() -> None:
    """A layer of 193 million parameters and a head; a tenth of the layers; and no model at all."""
    policy = known_shape("qwen3-8b")
    heads, smaller = heads_of("NEXTN"), heads_of("STANDALONE")
    assert (1, policy.layer + policy.vocab * policy.hidden) == (heads.layers, heads.parameters)
    assert 4 == smaller.layers
    assert smaller.parameters == pytest.approx(policy.parameters / 10, rel=0.1)
    assert heads_of("NGRAM") is None


def planned(graph: Graph, placement: rf.Placement, kind: str = "h100", **more: Any) -> Plan:
    names = {model.name for model in graph.models}
    shapes = ",".join(f"{name}=qwen2.5-{size}" for name, size in SIZES.items() if name in names)
    graph = replace(with_shapes(graph, shapes), **more)
    return compiled_with(graph, placement, kind=kind, memory=MEMORY).plan


SIZES = {"actor": "7b", "drafter": "7b"}


def seconds_of(plan: Plan) -> float:
    return plan.action("actor.rollout").cost.seconds or 0.0


@pytest.mark.parametrize(
    ("graph", "engine", "chance"),
    [
        (drafted(temperature=1.0), rf.SGLang(), BY_MODEL),
        (drafted(temperature=1.0), "torch", BY_MODEL),
        (sampling(1.0), engine_of("NGRAM"), BY_NGRAMS),
        (sampling(1.0), engine_of("NEXTN"), BY_MODEL),
    ],
    ids=["engine", "embedded", "ngram", "nextn"],
)
def test_plans_for_accelerators_count_an_acceptance_and_say_which(
    graph: Graph, engine: object, chance: float
) -> None:
    place = placed(engine=engine)
    assumed = planned(graph, place)
    assert f"acceptance {chance:g}, " in words(assumed)
    assert "that verifies 3 (assumed)" in words(assumed)
    said = [planned(graph, place, acceptance=chance) for chance in (0.0, 0.9)]
    assert "acceptance 0.9, 3.44 tokens a pass that verifies 3 (given)" in words(said[1])
    assert seconds_of(said[1]) < seconds_of(assumed) < seconds_of(said[0])


def test_a_plan_counts_drafts_of_few_rows_and_says_so() -> None:
    """16 rows of 8 prompts; keys and values of the drafter are those of the rows it drafts for."""
    place = placed(engine="torch")
    always, late, all_rows = (
        planned(drafted(temperature=1.0, rows=rows), place) for rows in (None, 4, 16)
    )
    assert "verifies 3, of 4 rows at most (assumed)" in words(late)
    assert seconds_of(always) == seconds_of(all_rows) != seconds_of(late)
    held = [
        dict(plan.action("actor.rollout").cost.holds)["drafts"] for plan in (always, late, all_rows)
    ]
    assert held[0] == held[2] > held[1]


@pytest.mark.parametrize(
    ("small", "acceptance", "rows", "said"),
    [
        ("32b", 0.9, 0, "never drafts: "),
        ("0.5b", 0.5, 15, "drafts where at most 15 rows go on in a process: "),
        ("0.5b", 0.9, None, "drafts however many rows go on: "),
    ],
)
def test_a_plan_chooses_up_to_how_many_rows_a_drafted_token_takes_less(
    small: str, acceptance: float, rows: int | None, said: str, monkeypatch: Any
) -> None:
    """Passes of a drafter as large as the policy take what they save."""
    monkeypatch.setitem(SIZES, "actor", "32b")
    monkeypatch.setitem(SIZES, "drafter", small)
    plan = planned(
        drafted(temperature=1.0, rows="auto"), placed(engine="torch"), acceptance=acceptance
    )
    assert rows == plan.graph.node("actor.rollout").as_a(Drafted).rows
    (note,) = (note.text for note in plan.notes if note.rule == "draft rows")
    assert note.startswith(f"actor.rollout {said}a token takes ")
    assert note.endswith(f"(acceptance {acceptance:.2f}, given)")
    for other in (None, 4):
        fixed = drafted(temperature=1.0, rows=other)
        assert seconds_of(plan) <= 1.01 * seconds_of(
            planned(fixed, placed(engine="torch"), acceptance=acceptance)
        )


def test_rows_that_gain_are_those_below_the_crossing() -> None:
    def step(base: float, each: float) -> Step:
        return lambda rows, context: base + each * rows

    assert 7 == rows_that_gain(step(1.0, 0.4), step(4.0, 0.0), 10.0, 100)
    assert [0, 5] == [rows_that_gain(step(b, 0.0), step(2.0, 0.0), 10.0, 5) for b in (3.0, 1.0)]


def words(plan: Plan) -> str:
    shapes = {model.name: known_shape(model.path.partition(":")[2]) for model in plan.graph.models}
    count = len(plan.budgets)
    kind = cluster("h100", count, MEMORY)
    costs = Costs(graph=plan.graph, cluster=kind, shapes=shapes, backend=plan.backend)
    return ", ".join(seconds_rest_on(plan, costs))


def test_on_cpu_devices_drafts_count_only_where_an_acceptance_is_said() -> None:
    graph, place = drafted(), placed(engine="torch")
    plain = planned(graph, place, "cpu")
    assert "drafted tokens: none counts (assumed)" in plain.inputs
    said = planned(graph, place, "cpu", acceptance=0.9)
    assert "acceptance 0.9, 3.44 tokens a pass that verifies 3 (given)" in said.inputs
    assert seconds_of(said) != seconds_of(plain)


@pytest.mark.parametrize(("said", "fix"), [("70", "0.7"), ("-0.1", "0.7"), ("nan", "0.7")])
def test_what_is_no_probability_is_refused(said: str, fix: str) -> None:
    told = CliRunner().invoke(cli, ["plan", ARITHMETIC, "--acceptance", said])
    assert told.exit_code
    assert "E371" in str(told.exception) + told.output
    assert f"--acceptance {fix}" in str(told.exception) + told.output


def test_a_plan_in_which_nothing_drafts_says_so_and_is_as_long() -> None:
    words = ["plan", ARITHMETIC, "--json"]
    plain, said = (
        json.loads(CliRunner().invoke(cli, [*words, *more]).output)
        for more in ([], ["--acceptance", "0.7"])
    )
    assert "acceptance 0.7: nothing drafts (given)" in said["inputs"]
    del plain["inputs"], said["inputs"]
    assert plain == said
