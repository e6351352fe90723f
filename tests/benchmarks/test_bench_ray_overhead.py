from __future__ import annotations

import itertools

import pytest
import ray_overhead as bench
from ray_overhead import Chain, Round, apart_row, between
from segments import NAMES, Moments, Watch, medians

from rlflow.cli.commands import Target, compile_target
from rlflow.runtime.execute.executor import Completion, Executor


def moments(action: str, iteration: int, heard: float) -> Moments:
    return Moments(action, iteration, 0.0, 1.0, 3.0, 6.0, 10.0, heard)


def test_the_segments_of_an_action_make_up_its_time():
    found = moments("link_0", 0, 15.0).segments()

    assert (1.0, 2.0, 3.0, 4.0, 5.0) == tuple(found[name] for name in NAMES)


def test_segments_are_medians_over_instances():
    found = medians([moments("a", 0, 11.0), moments("a", 1, 13.0), moments("a", 2, 90.0)])

    assert 3.0 == found["executor"]


def test_an_action_lasts_from_the_end_of_the_link_before_it():
    noted = [
        moments("start", 0, 1.0),
        moments("link_0", 0, 3.0),
        moments("link_1", 0, 6.0),
        moments("start", 1, 10.0),
        moments("link_0", 1, 15.0),
        moments("link_1", 1, 22.0),
    ]

    assert (3.0, 7.0) == between(noted)


def test_the_ratio_of_a_chain_is_the_median_of_its_rounds():
    rounds = [Round(actions=(a,), calls=(1.0,)) for a in (1.2, 9.0, 1.4)]
    chain = Chain(name="1 device", rounds=tuple(rounds), segments=dict.fromkeys(NAMES, 0.001))

    assert 1.4 == chain.ratio
    assert ("1.40", "1.20..9.00", "<= 1.5", "yes") == chain.row()[3:]
    assert len(bench.HEADER) == len(chain.row())
    assert len(bench.SEGMENTS) == len(chain.segment_row())


def test_naps_that_follow_each_other_do_not_pass():
    assert ("1.02", "yes") == (apart_row([1.02, 1.01, 1.9])[3], apart_row([1.02, 1.01, 1.9])[5])
    assert "NO" == apart_row([2.0])[5]
    assert len(bench.APART) == len(apart_row([1.0]))


class AtOnce:
    """A backend whose actions are done when they are submitted."""

    def submit(self, action, iteration, done):
        done(Completion(action=action.id, iteration=iteration, start=1.0, end=2.0))

    def close(self, *, wait=True):
        self.closed = True


def plan_of(pipeline: str, placement: str):
    target = Target(
        pipeline=f"{bench.PIPELINE}:{pipeline}", placement=placement, threads=1, backend="ray"
    )
    return compile_target(target).compiled.plan


def test_a_watch_notes_every_action_instance_and_passes_it_on():
    plan = plan_of("chain", "one")
    backend = AtOnce()
    watch = Watch(backend)

    Executor(plan, watch, watch, start=0, end=3, barrier=1).run()
    watch.close()

    assert len(plan.actions) * 3 == len(watch.moments)
    assert {(1.0, 2.0)} == {(noted.start, noted.end) for noted in watch.moments}
    assert all(noted.submitted <= noted.done <= noted.heard for noted in watch.moments)
    assert backend.closed


@pytest.mark.parametrize("placement", ["one", "two"])
def test_the_links_of_a_chain_follow_each_other_on_their_pool(placement):
    plan = plan_of("chain", placement)
    links = [action for action in plan.actions if action.id.startswith("link")]

    assert 10 == len(links)
    assert {plan.pools["all"]} == {action.devices for action in links}
    for before, after in itertools.pairwise(links):
        assert before.id in {dep.action for dep in after.after}


def test_the_naps_are_on_pools_of_their_own_and_wait_for_nobody():
    plan = plan_of("naps", "apart")

    assert {(0,), (1,)} == {action.devices for action in plan.actions}
    names = {action.id for action in plan.actions}
    for action in plan.actions:
        assert not {d.action for d in action.after if d.distance == 0} & names
