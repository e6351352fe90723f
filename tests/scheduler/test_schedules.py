"""`every=` and `when=` of updates and forwards: due when said, versions of those that were due."""

from __future__ import annotations

from itertools import product

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.cli.config import load_pipeline
from rlflow.errors import GraphError, PlanError
from rlflow.graph.schedule import due_text, dues, last_due, written
from rlflow.runtime.fake import random_seconds
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices import cluster
from rlflow.scheduler.plan.plan import Action, Reason
from rlflow.scheduler.verify.verify import verify
from tests.conftest import PIPELINES, TINY
from tests.runtime.test_fake import outcome, run
from tests.scheduler.mutants import with_action
from tests.scheduler.proving import unnoticed

FILE = PIPELINES / "delayed_ppo.py"
LATER = "prompts_per_iteration=16", "eval_every=3", "warm_up=2"


def made(every=1, phase=0, within=(0, None)) -> Action:
    reason = Reason(rule="test", text="a test")
    named = {"id": "a", "kind": "run", "pool": "p", "devices": (0,), "reason": reason}
    return Action(**named, every=every, phase=phase, within=within)


# --- in which iterations --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "phase", "within"),
    [(1, 0, (0, None)), (3, 2, (0, None)), (2, 0, (5, 9)), (4, 3, (3, None))],
)
def test_what_was_written_last_is_what_was_due_last(every, phase, within):
    it = made(every, phase, within)
    start, stop = within
    for iteration in range(30):
        told = [
            i
            for i in range(iteration + 1)
            if i % every == phase and i >= start and (stop is None or i < stop)
        ]
        assert (iteration in told) == it.due(iteration)
        assert last_due(it, iteration) == (told[-1] if told else None)
        assert written([it], iteration + 1) == (told[-1] + 1 if told else 0)
        assert len(told) == len(list(dues([it], 0, iteration + 1)))


def test_the_newest_of_several_updates_counts():
    assert 5 == written([made(4), made(3)], 5)
    assert 4 == written([made(4), made(3)], 4)
    assert 0 == written([made(within=(7, None))], 7)


def test_words():
    assert "" == due_text(1, (0, None))
    assert ", every 2 iterations, from iteration 20 on" == due_text(2, (20, None))
    assert ", in iterations 3 to 6" == due_text(1, (3, 7))


# --- what is declared -----------------------------------------------------------------------


def traced(*, forward=None, update=None):
    @rf.pipeline()
    def late(cfg: rf.Config) -> None:
        actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", str(TINY))
        prompts = ops.prompts(rf.data.arithmetic(), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
        adv = ops.advantage("grpo", samples, ops.reward(lambda response: 1.0, samples))
        ref_lp = ops.log_probs(ref, samples, **(forward or {}))
        loss = rf.PolicyLoss("ppo_clip", kl_coef=0.1)
        ops.update(actor, samples, adv, ref_lp, loss=loss, **(update or {}))

    return late.trace()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"every": 0}, "every=0"),
        ({"when": 20}, "when=20"),
        ({"when": range(3, 9)}, r"when=rf.Iterations\(3, 9\)"),
    ],
)
def test_numbers_that_are_none_are_refused(given, says):
    with pytest.raises(GraphError, match=f"(?s)E163.*{says}"):
        traced(update=given)


@pytest.mark.parametrize("every", [True, 2.0])
def test_what_is_no_whole_number_is_refused(every):
    with pytest.raises(GraphError, match=f"E655.*every={every}"):
        traced(update={"every": every})


@pytest.mark.parametrize("given", [(-1,), (3, 3), (1.5,), (True,), (0, "9")])
def test_a_window_holds_iterations(given):
    with pytest.raises(GraphError, match="E163"):
        rf.Iterations(*given)


def test_a_reader_is_due_where_its_source_is():
    twice = {"every": 2}
    traced(forward=twice, update={"every": 4, "when": rf.Iterations(7)})
    for late in ({}, {"every": 3}):
        with pytest.raises(GraphError, match="E164") as caught:
            traced(forward=twice, update=late)
    assert "ref.log_probs runs every 2 iterations" in str(caught.value)
    window = {"when": rf.Iterations(5)}
    with pytest.raises(GraphError, match="E164"):
        traced(forward=window, update={"when": rf.Iterations(4)})


# --- plans ----------------------------------------------------------------------------------


def compiled(placement: str, *, staleness=0, memory=4e9, backend=None, settings=LATER):
    pipeline = load_pipeline(str(FILE))
    words = dict(setting.split("=") for setting in settings)
    where = pipeline.placements[placement].model_copy(update={"staleness": staleness})
    devices = cluster.cpu_cluster(where.num_devices(), threads=1, memory=memory)
    graph = pipeline.trace(pipeline.config(**words))
    return compile_plan(graph, where, devices, near=PIPELINES, backend=backend)


def tight(placement, **options):
    """A plan with hardly more memory than its largest action takes, where there is one."""
    peaks = compiled(placement, **options).plan.peaks
    for share in (0.85, 0.9, 0.95):
        try:
            most = int(share * max(size for device, size in peaks.items() if device >= 0))
            return compiled(placement, memory=most, **options).plan
        except PlanError:
            continue
    return None


def test_weights_travel_where_there_are_new_ones():
    plan = compiled("split").plan
    (reshard,) = [a for a in plan.actions if a.kind == "reshard"]
    assert (2, 0, (2, None)) == (reshard.every, reshard.phase, reshard.within)
    assert plan.action("actor.update").cost.seconds
    for changed in ({"every": 4}, {"within": (4, None)}, {"within": (2, 9)}, {"phase": 1}):
        wrong = with_action(plan, reshard.id, **changed)
        found = " ".join(map(str, verify(wrong, "timing")))
        assert "finds an old version" in found or "useless" in found


@pytest.mark.parametrize("placement", ["colocate", "split"])
def test_the_verifier_notices_what_is_changed(placement):
    assert [] == unnoticed(compiled(placement).plan)


@pytest.mark.parametrize(("placement", "staleness"), product(["colocate", "split"], [0, 1]))
def test_invariants_hold_in_every_interleaving_and_after_a_resume(placement, staleness):
    plans = [compiled(placement, staleness=staleness).plan, tight(placement, staleness=staleness)]
    for plan in filter(None, plans):
        whole, _ = run(plan, random_seconds(1), end=9, barrier=3)
        for seed in range(2, 8):
            other, _ = run(plan, random_seconds(seed), end=9, barrier=3)
            assert outcome(plan, whole) == outcome(plan, other)
        for start in (3, 6):
            resumed, _ = run(plan, random_seconds(start), start=start, end=9, barrier=3)
            assert outcome(plan, whole, start) == outcome(plan, resumed, start)
