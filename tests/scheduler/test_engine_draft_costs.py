"""What drafts in an engine cost: in its pool, in what it computes in, on its host, and in keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rlflow as rf
from rlflow.modelfiles.host_memory import LOADING_PIECE
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.costs.serving import pool_key
from rlflow.scheduler.devices.hardware import KINDS
from rlflow.scheduler.devices.measured import NOTHING, Sample
from rlflow.scheduler.engines.engines import asleep_key, start_key
from rlflow.scheduler.engines.moving import PAGES
from rlflow.scheduler.models.shapes import model_shape
from rlflow.scheduler.observed import key_of
from rlflow.scheduler.plan.plan import HOST, Plan
from rlflow.scheduler.plan.text import plan_text
from rlflow.scheduler.search.bounds import Figures
from rlflow.scheduler.search.known_costs import KnownCosts
from rlflow.scheduler.search.layouts import Layout
from rlflow.scheduler.search.space import Choice, placed_uses
from rlflow.scheduler.verify.verify import STAGES, verify
from tests.scheduler.examples import compiled_with
from tests.scheduler.strategies import PLENTY, cluster
from tests.scheduler.test_engine_drafters import (
    DRAFTER,
    ENGINE,
    MID,
    TINY,
    TOKENS,
    drafted,
    placed,
    sampling,
    together,
)
from tests.scheduler.test_engine_memory import planned, tight


def costs_on(plan: Plan, kind: str = "h100") -> Costs:
    """The costs that a plan is made by, on devices with plenty of memory."""
    shapes = {model.name: model_shape(model) for model in plan.graph.models}
    devices = cluster(kind, len(plan.budgets), PLENTY)
    return Costs(graph=plan.graph, cluster=devices, shapes=shapes, backend=plan.backend)


def pool_of(plan: Plan) -> int:
    part = plan.part(f"{ENGINE}/pool")
    return dict(part.holds)["keys and values"]


def test_tokens_of_a_measured_pool_are_of_policy_and_drafter_on_each_rank() -> None:
    """A token has 2 x 2 x (128 + 32) numbers over two ranks; a run told of 5000 such tokens."""
    graph = drafted(temperature=1.0)
    placement = placed(2, tp=2, engine=rf.SGLang(mem_fraction_static=0.5))
    plan = compiled_with(graph, placement, kind="h100").plan
    costs = costs_on(plan)
    sample = Sample("run", 4, 0.0, 0.0, held=5000.0)
    key = pool_key(costs, plan.instance(ENGINE))
    known = replace(costs.cluster, measured=NOTHING.adding([(key, costs.setting, sample)]))
    again = compile_plan(graph, placement, known).plan
    assert 5000 * 4 * 2 * 2 * (128 + 32) // 2 == pool_of(again)
    norms = 4 * 5 * (256 + 64)  # which every rank holds whole
    assert int(PLENTY / 2) - (MID + TINY + norms) // 2 == pool_of(plan)


@pytest.mark.parametrize(
    "speculative",
    [None, rf.Speculative(algorithm="NGRAM"), rf.Speculative(algorithm="NEXTN")],
    ids=["drafter", "ngram", "nextn"],
)
def test_an_engine_that_drafts_on_an_accelerator_takes_48_rows_at_once_and_is_told_so(
    speculative: rf.Speculative | None,
) -> None:
    """Of 64; one that does not draft takes all, and one on a CPU has as many as others there."""
    graph = sampling(1.0, n=8) if speculative else drafted(temperature=1.0, n=8)
    engine = rf.SGLang(max_total_tokens=TOKENS * 10, speculative=speculative)
    plan = compiled_with(graph, placed(engine=engine), kind="h100").plan
    instance = plan.instance(ENGINE)
    assert 48 == instance.options.max_running_requests
    assert ", 48 of 64 rows of actor.rollout at once" in plan_text(plan)
    serving = costs_on(plan).roofline(instance, model_shape(plan.graph.model("actor"))).serving
    assert (48, 48) == (serving.slots, serving.captured)
    said = engine.model_copy(update={"max_running_requests": 60})
    more = compiled_with(graph, placed(engine=said), kind="h100").plan
    assert 60 == more.instance(ENGINE).options.max_running_requests
    seconds = [p.action("actor.rollout").cost.seconds or 0.0 for p in (more, plan)]
    assert seconds[0] < seconds[1]


def test_engines_that_do_not_draft_or_lie_on_a_cpu_decide_on_their_rows_themselves() -> None:
    greedy = compiled_with(drafted(n=8), placed()).plan
    plain = compiled_with(sampling(1.0, n=8), placed(), kind="h100").plan
    assert {None} == {p.instance(ENGINE).options.max_running_requests for p in (greedy, plain)}
    assert "rows of actor.rollout at once" not in plan_text(greedy) + plan_text(plain)


@pytest.mark.parametrize("engine", ["sglang", "torch"])
def test_keys_tell_drafters_of_other_shapes_apart(engine: str) -> None:
    """Those of the rollout, and of all that is measured of an engine."""
    plan = compiled_with(drafted(), placed(engine=engine)).plan
    costs = costs_on(plan, "cpu")
    larger = replace(costs, shapes={**costs.shapes, "drafter": costs.shapes["actor"]})
    rollout = plan.action("actor.rollout")
    found = [[key_of(plan, each, rollout)] for each in (costs, larger)]
    if engine == "sglang":
        for kept, each in zip(found, (costs, larger), strict=True):
            known = plan.instance(ENGINE)
            kept += [key(each, known) for key in (asleep_key, start_key, pool_key)]
    assert all(one != other for one, other in zip(*found, strict=True))
    update = plan.action("actor.update")
    assert key_of(plan, costs, update) == key_of(plan, larger, update)


def test_keys_tell_drafters_of_other_dtypes_and_frozen_draft_models_apart() -> None:
    found = []
    for dtype in ("float32", "bfloat16"):
        plan = compiled_with(drafted(dtype=dtype), placed(engine="torch")).plan
        found.append(key_of(plan, costs_on(plan, "cpu"), plan.action("actor.rollout")))
    for path in ("/one", "/other"):
        said = rf.Speculative(algorithm="STANDALONE", draft_model=path)
        plan = compiled_with(sampling(0.0), placed(engine=rf.SGLang(speculative=said))).plan
        found.append(asleep_key(costs_on(plan, "cpu"), plan.instance(ENGINE)))
    assert 4 == len(set(found))


LOGITS = 64 * (4 + 8)


@pytest.mark.parametrize("requests", [None, 5])
@pytest.mark.parametrize("kind", ["h100", "cpu"])
def test_logits_of_drafted_tokens_are_counted_wherever_an_engine_is(
    kind: str, requests: int | None
) -> None:
    """Of each row that is computed 3 more of the policy, and one of the drafter."""
    engine = rf.SGLang(max_total_tokens=TOKENS, max_running_requests=requests)
    plan = compiled_with(drafted(probe={}), placed(engine=engine), kind=kind).plan
    rows = requests or 16
    found = [plan.part(f"{ENGINE}/pool")]
    if kind == "cpu":
        # The second rollout has no drafter of its own, and its engine drafts for it too.
        found = [plan.action(name).cost for name in ("actor.rollout", "probe")]
    for holds in (dict(each.holds) for each in found):
        assert (rows * LOGITS, 4 * rows * LOGITS) == (holds["logits"], holds["drafts"])


@pytest.mark.parametrize(
    ("speculative", "times"),
    [
        ({"algorithm": "STANDALONE", "draft_model": "/draft", "draft_tokens": 4}, 4 + 1),
        ({"algorithm": "EAGLE", "draft_model": "/draft", "draft_tokens": 3, "topk": 2}, 6 + 2),
        ({"algorithm": "NGRAM", "draft_tokens": 3}, 3),
    ],
)
@pytest.mark.parametrize("kind", ["h100", "cpu"])
def test_what_drafts_by_options_makes_logits_too(
    kind: str, speculative: dict[str, Any], times: int
) -> None:
    """Of all tokens that are verified, and of those that it is likeliest to draft; n-grams none."""
    engine = rf.SGLang(max_total_tokens=TOKENS, speculative=rf.Speculative(**speculative))
    plan = compiled_with(sampling(0.0), placed(engine=engine), kind=kind).plan
    found = plan.action("actor.rollout").cost if kind == "cpu" else plan.part(f"{ENGINE}/pool")
    assert times * 16 * LOGITS == dict(found.holds)["drafts"]


def test_tune_knows_what_drafts_in_an_engine() -> None:
    """Its figures of an engine are those of the plan: weights, pool and rows at once."""
    graph, engine = drafted(temperature=1.0, n=8), rf.SGLang(max_total_tokens=TOKENS)
    plan = compiled_with(graph, placed(engine=engine), kind="h100").plan
    roles = placed_uses(plan.graph)
    (place,) = (n for n, role in enumerate(roles) if role.rollout)
    role = replace(roles[place], engines=(engine,))
    roles = (*roles[:place], role, *roles[place + 1 :])
    costs = costs_on(plan)
    known = KnownCosts(
        graph=costs.graph, cluster=costs.cluster, shapes=costs.shapes, backend=costs.backend
    )
    choice = Choice(1, 2, Layout(engine=engine.describe()))
    figure = Figures(plan, known, roles).of(place, choice)
    assert (plan.action("actor.rollout").cost.seconds,) == figure.seconds
    assert (
        sum(plan.part(f"{ENGINE}/{name}").size or 0 for name in ("weights", "pool")) == figure.need
    )


@pytest.mark.parametrize(
    ("kind", "saver", "copies"),
    [("h100", None, 1), ("h100", False, 1), ("h100", True, 2), ("cpu", True, 1)],
)
def test_an_engine_that_gives_memory_back_has_a_second_copy_of_its_drafter_on_the_host(
    kind: str, saver: bool | None, copies: int
) -> None:
    """On accelerators; each of two ranks counts half of a copy.

    Saves copy what both train, and loading takes a piece before them.
    """
    engine = rf.SGLang(max_total_tokens=TOKENS, memory_saver=saver)
    plan = compiled_with(drafted(), placed(2, tp=2, engine=engine), kind=kind).plan
    assert bool(saver) is plan.instance(ENGINE).options.memory_saver
    assert copies * TINY // 2 == plan.part(f"{DRAFTER}/weights").on_host
    moving = max(3 * (MID + TINY), LOADING_PIECE) if kind == "h100" else 0
    assert MID + copies * TINY + moving == plan.peaks[HOST]


def test_an_engine_that_sleeps_has_a_second_copy_of_its_drafter_on_the_host() -> None:
    graph = drafted(path="models/wide")
    plan = compiled_with(graph, together(), kind="h100", share=0.93).plan
    assert any(a.kind == "sleep" and a.instance == "actor@all/sglang" for a in plan.actions)
    drafter = plan.part("drafter@all/sglang/actor/weights")
    assert (2 * TINY, 0) == (drafter.on_host, drafter.size)
    assert not verify(plan, STAGES[-1])


@pytest.mark.parametrize("kind", ["h100", "cpu"])
@pytest.mark.parametrize("saver", [True, False])
def test_a_frozen_draft_model_has_a_copy_on_the_host_where_memory_is_given_back(
    tmp_path: Path, kind: str, saver: bool
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(123_456))
    said = rf.Speculative(algorithm="STANDALONE", draft_model=str(tmp_path))
    engine = rf.SGLang(max_total_tokens=TOKENS, memory_saver=saver, speculative=said)
    plan = compiled_with(sampling(0.0), placed(engine=engine), kind=kind).plan
    copied = 123_456 if saver and kind == "h100" else 0
    moving = max(3 * MID, LOADING_PIECE) if kind == "h100" else 0
    assert MID + copied == plan.part(f"{ENGINE}/weights").on_host == plan.peaks[HOST] - moving


def test_a_wake_brings_the_drafter_though_the_policy_comes_by_a_reshard() -> None:
    """Its bytes over the link to the host, beside the call that is assumed."""
    graph = drafted(path="models/wide")
    plan = compiled_with(graph, together(), kind="h100", share=0.93).plan
    wake = plan.action("wake:actor@all/sglang/weights")
    assert ("discard", TINY) == (wake.mode, wake.cost.moved)
    link = KINDS["h100"].host_link * KINDS["h100"].reached
    assert 0.02 + PAGES["wake"] + TINY / link == pytest.approx(wake.cost.seconds)
    told = "the reshard fills it; what drafts in it comes from its host, 509.2 kB"
    assert wake.reason.text.endswith(told)
    assert 0 == plan.action("sleep:actor@all/sglang/weights").cost.moved
    plain = planned(tight()).plan
    alone = plain.action("wake:actor@all/sglang/weights")
    assert ("discard", 0) == (alone.mode, alone.cost.moved)
    assert alone.reason.text.endswith("allocated, the reshard fills it")


HUB = Path("hub", "models--org--eagle", "snapshots", "1")


@pytest.mark.parametrize("hub", [True, False])
@pytest.mark.parametrize("ending", ["safetensors", "bin", ""])
def test_a_frozen_draft_model_that_is_not_here_is_said_to_be_of_unknown_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: bool, ending: str
) -> None:
    """A directory, or a name of the hub; files of either kind count."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    directory = tmp_path / HUB
    if ending:
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        (directory / f"model.{ending}").write_bytes(bytes(123_456))
    model = "org/eagle" if hub else str(directory)
    said = rf.Speculative(algorithm="EAGLE", draft_model=model)
    engine = rf.SGLang(max_total_tokens=TOKENS, speculative=said)
    plan = compiled_with(sampling(0.0), placed(engine=engine)).plan
    known = plan.part(f"{ENGINE}/weights").size
    assert MID + (123_456 if ending else 0) == known
    notes = {note.rule: note.text for note in plan.notes}
    told = f"and {model} (123.5 kB) drafts in it, whose keys and values are not counted"
    assert bool(ending) is (told in notes["engine"])
    assert bool(ending) is ("unknown size" not in notes)
    if not ending:
        assert f"the files of {model}, which drafts in it" in notes["unknown size"]
        assert "nor its keys and values are counted" in notes["unknown size"]


def test_what_drafts_without_files_has_no_unknown_size() -> None:
    for algorithm in ("NGRAM", "NEXTN"):
        engine = rf.SGLang(speculative=rf.Speculative(algorithm=algorithm))
        plan = compiled_with(sampling(0.0), placed(engine=engine)).plan
        assert "unknown size" not in {note.rule for note in plan.notes}
