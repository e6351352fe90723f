"""Loops as they are declared, and their bodies: what counts, what is kept, what is said."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import rlflow as rf
from rlflow import ops
from rlflow.batch import make_batch, strings, text
from rlflow.errors import RunError
from rlflow.graph.graph import Graph
from rlflow.graph.rules.check import check_graph
from rlflow.graph.trace import tracing
from rlflow.ops.bodies.loops import loops
from rlflow.runtime.execute.stats import join_metrics
from tests.ops.calls import call_of

pytestmark = pytest.mark.torch


def exact(response: str, answer: str) -> float:
    return float(response == answer)


@rf.op(per="row")
def grown(count: rf.Row[float]) -> rf.Row[float]:
    return count + 1


@rf.op(per="row")
def counted(count: rf.Row[float]) -> rf.Row[int]:
    return count.long()


@rf.op(per="row")
def begun(row_id: rf.Row[int]) -> rf.Row[float]:
    return 0.0 * row_id


@rf.op(per="row")
def enough(count: rf.Row[float]) -> rf.Row[bool]:
    return count > 2


def traced(declare):
    """The graph that a function declares, and what is wrong with it: (code, what, got) each."""
    with tracing() as trace:
        declare()
    graph = Graph(
        name="made", nodes=tuple(trace.nodes.values()), models=tuple(trace.models.values())
    )
    return graph, [(f.code, f.what, f.got) for f in trace.findings or check_graph(graph)]


def gathering(inner=None, policy="error", **options):
    """A pipeline that learns from the groups that a loop gathers."""

    def declare():
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))

        def attempt():
            prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
            samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
            reward = ops.reward(exact, samples, on_error=policy)
            if inner is not None:
                inner(actor, samples, reward)
            return samples, reward, ops.informative(samples, reward)

        chosen = {"until": "informative", "groups": 4, "at_most": 3} | options
        batch = ops.repeat(attempt, **chosen)
        ops.update(actor, batch, ops.advantage("grpo", batch), loss=rf.PolicyLoss())

    return declare


def stepping(body=None, **options):
    """A pipeline with a loop that counts up a number of every row until it is enough."""

    def declare():
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        first = begun(prompts).rename(count="begun")

        def step(state):
            after = grown(state).rename(count="grown")
            return after, enough(after)

        chosen = {"until": "enough", "at_most": 3} | options
        ops.metrics(ops.repeat(body or step, first, **chosen).only("count"))

    return declare


def refused(declare):
    """What is wrong with a pipeline, one finding."""
    (found,) = traced(declare)[1]
    return found


# --- declaring ------------------------------------------------------------------------------


def test_a_loop_offers_all_fields_of_a_trip_and_its_rows_are_its_own():
    graph, found = traced(gathering(name="enough"))
    end, gate = graph.node("enough"), graph.node("enough.gate")
    fields = {"informative", "reward", "response_tokens", "answer", "group", "version"}
    assert [] == found
    assert fields <= {made.name for made in end.op.outputs}
    assert end.rows_of == "enough" == graph.node("advantage").rows_of
    assert gate.rows_of == "actor.rollout" == graph.node("informative").rows_of
    inside = [node.name for node in graph.nodes if node.loop == "enough"]
    assert ["prompts", "actor.rollout", "reward", "informative", "enough.gate"] == inside
    assert (4.0, "informative") == (gate.param("goal"), gate.param("when"))
    assert (4, 3, 1.5) == (end.param("batch"), end.param("at_most"), end.param("expected"))
    assert (2, 4, 1.0) == tuple(end.param(k) for k in ("n", "max_new_tokens", "temperature"))
    assert end.ends_loop
    assert end.trip is None is end.loop


def test_a_loop_with_a_state_keeps_its_rows():
    graph, found = traced(stepping(expected=2))
    end = graph.node("repeat")
    assert [] == found
    assert "prompts" == end.rows_of
    assert (("begun", "begun", "grown", "grown"),) == end.param("carried")
    assert ["count", "enough"] == [made.name for made in end.op.outputs]
    assert 1.0 == graph.node("repeat.gate").param("goal")
    assert {"batch", "n", "exhausted", "surplus"}.isdisjoint(dict(end.params))
    assert 2 == end.param("expected")


def test_options_are_in_the_graph_only_where_they_differ_from_the_default():
    end = traced(gathering(surplus="keep", exhausted="fill", expected=2.5))[0].node("repeat")
    assert ("keep", "fill", 2.5) == tuple(
        end.param(k) for k in ("surplus", "exhausted", "expected")
    )
    assert "surplus" not in dict(traced(gathering())[0].node("repeat").params)
    assert 1.0 == traced(gathering(at_most=1))[0].node("repeat").param("expected")


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"at_most": 0, "expected": None}, "at_most=0"),
        ({"groups": 0}, "groups=0"),
        ({"expected": 3.5}, "expected=3.5"),
        ({"expected": 0.5}, "expected=0.5"),
        ({"groups": None}, "groups=None and 0 handles of state"),
        ({"exhausted": "eror"}, "exhausted='eror'"),
        ({"surplus": "kept"}, "surplus='kept'"),
        ({"groups": 13}, "groups=13"),
    ],
)
def test_options_of_a_loop_that_gathers_are_checked(options, got):
    assert ("E118", f"a loop 'repeat' with {got}") == refused(gathering(**options))[:2]


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"surplus": "keep"}, "surplus='keep' and a state"),
        ({"exhausted": "fill"}, "exhausted='fill' and a state"),
        ({"at_most": -1}, "at_most=-1"),
    ],
)
def test_options_of_a_loop_with_a_state_are_checked(options, got):
    assert ("E118", f"a loop 'repeat' with {got}") == refused(stepping(**options))[:2]


def test_more_groups_than_all_trips_draw_are_refused_and_as_many_are_not():
    _, _, got = refused(gathering(groups=13, name="enough"))
    assert "3 trips of 4 prompts: at most 12 groups" == got
    assert [] == traced(gathering(groups=12))[1]


def test_groups_and_a_state_are_refused_together():
    codes = [found[:2] for found in traced(stepping(groups=3))[1]]
    assert ("E118", "a loop 'repeat' with groups=3 and 1 handles of state") == codes[0]


@pytest.mark.parametrize(
    ("until", "code", "what"),
    [
        ("ended", "E124", "loop 'repeat' ends by 'ended', which its body does not return"),
        ("reward", "E104", "node 'repeat.gate' cannot read 'reward' of 'reward'"),
        (
            "response_mask",
            "E104",
            "node 'repeat.gate' cannot read 'response_mask' of 'actor.rollout'",
        ),
    ],
)
def test_a_loop_ends_by_a_bool_of_every_row_that_its_body_returns(until, code, what):
    assert (code, what) == refused(gathering(until=until))[:2]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("renamed", [False, True])
def test_log_probs_of_another_temperature_are_found_behind_a_loop(temperature, renamed):
    """Both are of the loop's end, which has the temperature of the rollout in it."""

    def declare():
        actor = rf.Model("actor", "models/tiny", optimizer=rf.AdamW(lr=1e-3))
        ref = rf.Model("ref", "models/tiny")

        def attempt():
            prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
            samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4, temperature=0.7)
            reward = ops.reward(exact, samples)
            scored = ops.log_probs(ref, samples, temperature=temperature)
            scored = scored.rename(kept="ref_log_probs") if renamed else scored
            return samples, reward, scored, ops.informative(samples, reward)

        batch = ops.repeat(attempt, until="informative", groups=4, at_most=2)
        batch = batch.rename(ref_log_probs="kept") if renamed else batch
        loss = rf.PolicyLoss(kl_coef=0.1)
        ops.update(actor, batch, ops.advantage("grpo", batch), loss=loss)

    found = traced(declare)[1]

    what = "'actor.update' compares log-probs of different temperatures"
    got = "ref_log_probs of ref.log_probs at temperature 1, its own at 0.7"
    assert found == ([("E244", what, got)] if temperature == 1.0 else [])


def test_a_name_that_is_nearly_right_is_suggested():
    with tracing() as trace:
        gathering(until="informativ")()
    assert "informative" in trace.findings[0].near
    assert "finished" in trace.findings[0].expected


def evaluated(actor, samples, reward):
    ops.evaluate(actor, rf.data.arithmetic(), exact, every=2, max_new_tokens=4)


def updated(actor, samples, reward):
    ops.update(actor, samples, ops.advantage("grpo", samples, reward), loss=rf.PolicyLoss())


@pytest.mark.parametrize(
    ("inner", "name"),
    [
        (updated, "actor.update"),
        (evaluated, "eval"),
        (lambda actor, samples, reward: ops.metrics(reward), "metrics"),
    ],
    ids=["update", "evaluate", "metrics"],
)
def test_what_has_an_effect_is_not_repeated(inner, name):
    said = ("E125", f"loop 'repeat' cannot repeat {name!r}", "it has an effect beyond its rows")
    assert said == refused(gathering(inner))


def nest(at_most=2, groups=2, **options):
    """A loop that draws, in a loop that draws until more groups count."""

    def inner():
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        reward = ops.reward(lambda answer: float(len(answer)), prompts, name="reward")
        both = prompts.rename(group="row_id")
        return both, reward, ops.informative(reward, both.only("group"))

    def outer():
        few = ops.repeat(inner, until="informative", groups=2, at_most=2, name="inner", **options)
        again = ops.informative(few.only("reward", "group"), name="again")
        kept = [o.name for o in few.offers if o.name != "informative"]
        return few.only(*kept), again

    def declare():
        said = {"until": "informative", "groups": groups, "at_most": at_most, "name": "outer"}
        ops.metrics(ops.repeat(outer, **said).only("reward"))

    return declare


def test_a_loop_may_be_in_a_loop():
    graph, found = traced(nest())
    assert [] == found
    loops_of = {node.name: node.loop for node in graph.nodes}
    assert ("inner", "inner", "outer") == tuple(
        loops_of[n] for n in ("reward", "inner.gate", "inner")
    )
    assert ("outer", "outer", None) == tuple(loops_of[n] for n in ("again", "outer.gate", "outer"))
    assert "inner" == graph.node("again").rows_of


def test_a_loop_in_a_loop_keeps_no_surplus():
    why = 'a loop with surplus="keep": its rows would be of the next trip'
    assert ("E125", "loop 'outer' cannot repeat 'inner'", why) == refused(nest(surplus="keep"))


def test_trips_of_a_loop_in_a_loop_are_of_the_groups_of_that():
    got = "2 trips of 2 groups: at most 4 groups"
    assert ("E118", "a loop 'outer' with groups=5", got) == refused(nest(groups=5))


@pytest.mark.parametrize("made", [None, [], 3.0])
def test_a_body_returns_handles(made):
    found = traced(gathering_of(lambda: made))[1]
    what = "the body of loop 'repeat' returned something that is not a handle"
    assert ("E126", what, f"{type(made).__name__}: {made!r}") == found[0]


def gathering_of(body):
    return lambda: ops.repeat(body, until="informative", groups=2, at_most=2)


def test_a_body_returns_what_it_has_made():
    def declare():
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        first = begun(prompts).rename(count="begun")

        def step(state):
            after = grown(state).rename(count="grown")
            return after, enough(after), prompts.only("answer")

        ops.metrics(ops.repeat(step, first, until="enough", at_most=3).only("count"))

    what = "the body of loop 'repeat' returns what was made before it"
    assert ("E126", what, "answer of prompts") == refused(declare)


def test_what_a_body_does_not_make_anew_stays_as_it_was():
    def same(state):
        after = grown(state).rename(count="grown")
        return state.only("row_id"), after, enough(after)

    def declare():
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        first = begun(prompts).rename(count="begun")
        state = replace(first, offers=(*first.offers, *prompts.only("row_id").offers))
        ended = ops.repeat(same, state, until="enough", at_most=3)
        ops.metrics(ended.only("count", "row_id"))

    graph, found = traced(declare)
    assert [] == found
    read = {bound.name: bound.source for bound in graph.node("metrics").inputs}
    assert {"count": "repeat", "row_id": "prompts"} == read
    assert (("begun", "begun", "grown", "grown"),) == graph.node("repeat").param("carried")


def test_rows_that_may_lack_a_reward_are_gathered_with_what_says_so():
    graph, found = traced(gathering(policy="drop_sample"))
    assert [] == found
    read = {bound.name: bound.source for bound in graph.node("informative").inputs}
    assert {"reward": "reward", "group": "actor.rollout", "valid": "reward"} == read
    assert "valid" in {bound.name for bound in graph.node("repeat").inputs}


def test_a_state_comes_back_or_every_trip_would_be_the_first():
    def lost(state):
        return enough(grown(state).rename(count="grown"))

    what = "a loop 'repeat' whose trips all do the same"
    assert ("E118", what, "its body returns enough") == traced(stepping(lost))[1][0]


def test_a_state_comes_back_as_what_it_was():
    def retyped(state):
        return counted(state).rename(count="counted"), enough(state)

    what = "loop 'repeat' cannot go on with 'count' of 'counted'"
    assert ("E104", what, "count:int64[row]") == traced(stepping(retyped))[1][0]


def test_the_rows_of_a_state_stay():
    def others(state):
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        after = begun(prompts, name="others").rename(count="begun")
        return after, enough(after)

    what = "the body of loop 'repeat' returns rows other than those of its state"
    assert ("E126", what) == traced(stepping(others))[1][0][:2]


# --- bodies ---------------------------------------------------------------------------------


def informative(reward, group, **fields):
    given = {"reward": torch.tensor(reward), "group": torch.tensor(group)}
    given |= {name: torch.tensor(value) for name, value in fields.items()}
    made = loops.informative(call_of(inputs=make_batch(given, len(reward))))
    return made.fields["informative"].tolist(), join_metrics([made.metrics])["share"]


def test_groups_whose_rewards_differ_are_informative_wherever_their_rows_lie():
    """Group 7 has 1 and 0, group 3 has 1 twice, group 5 one row, group 9 has -1 and -1.5."""
    flags, share = informative(
        [1.0, 1.0, 0.5, 0.0, -1.0, 1.0, -1.5], [7, 3, 5, 7, 9, 3, 9]
    )  # fmt: skip
    assert [True, False, False, True, True, False, True] == flags
    assert 0.5 == share


def test_the_smallest_difference_counts_and_signs_of_zero_do_not():
    one = float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
    assert [True, True, False, False] == informative([1.0, one, 0.0, -0.0], [1, 1, 2, 2])[0]


def test_rows_without_a_reward_are_neither_equal_nor_different():
    """Of group 1 two rewards are left that are equal, of group 2 two that differ, of 3 none."""
    nan = float("nan")
    reward = [1.0, nan, 1.0, 0.0, nan, 2.0, nan, nan]
    valid = [True, False, True, True, False, True, False, False]
    flags, share = informative(reward, [1, 1, 1, 2, 2, 2, 3, 3], valid=valid)
    assert [False] * 3 + [True] * 3 + [False] * 2 == flags
    assert pytest.approx(1 / 3) == share


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=20))
def test_informative_is_largest_over_smallest_of_each_group(rows):
    groups, rewards = [group for group, _ in rows], [float(reward) for _, reward in rows]
    of = {g: {r for h, r in zip(groups, rewards, strict=True) if h == g} for g in groups}
    assert [len(of[g]) > 1 for g in groups] == informative(rewards, groups)[0]


def trip(flags, groups, **fields):
    """Rows of a trip, numbered in `place`."""
    given = {"informative": torch.tensor(flags), "group": torch.tensor(groups)}
    given |= fields
    return make_batch(given, len(flags))


def reached(rows, surplus=None):
    call = call_of(inputs=rows, params={"when": "informative", "goal": 3.0})
    return loops.groups_reached(replace(call, surplus=surplus)).metrics


def test_a_trip_reaches_the_groups_of_which_every_row_counts():
    rows = trip([True, False, True, True, True], [4, 2, 9, 2, 4])
    assert {"reached": 2.0} == reached(rows)
    assert {"reached": 0.0} == reached(trip([False, False], [1, 2]))


def test_what_was_left_over_counts_too():
    rows = trip([True, True], [4, 5])
    assert {"reached": 5.0} == reached(rows, trip([True] * 5, [1, 1, 2, 2, 3]))


@pytest.mark.parametrize(("flags", "done"), [([True, True], 1.0), ([True, False], 0.0)])
def test_a_state_is_done_where_all_rows_are(flags, done):
    rows = make_batch({"enough": torch.tensor(flags)}, 2)
    call = call_of(inputs=rows, params={"when": "enough", "goal": 1.0})
    assert {"reached": done} == loops.all_done(call).metrics


def gathered(rows, batch, *, surplus=None, trips=2, wanted=("place", "group"), **params):
    options = {"when": "informative", "batch": batch, "at_most": 2, "exhausted": "error"} | params
    call = call_of(inputs=rows, params=options, wanted=wanted, iteration=6)
    return loops.gather(replace(call, surplus=surplus, trips=trips))


def numbered(flags, groups, first=0):
    place = torch.arange(first, first + len(flags))
    return trip(flags, groups, place=place, reward=place.float() % 3)


MIXED = numbered(
    [True, True, False, True, True, True, True, True],
    [8, 3, 5, 8, 3, 5, 1, 1],
)  # fmt: skip


def test_gathered_are_the_rows_of_the_first_groups_in_the_order_of_trips():
    """Groups 8, 3 and 1 count, in the order of their first rows; group 5 has a false row."""
    made = gathered(MIXED, 2)
    assert [0, 3, 1, 4] == made.fields["place"].tolist()
    assert [8, 8, 3, 3] == made.fields["group"].tolist()
    assert 4 == made.rows
    assert made.surplus is None
    wanted = {"trips": 2.0, "kept": 0.75, "surplus": 1.0, "filled": 0.0}
    assert wanted == made.metrics


def test_just_enough_leaves_nothing_over():
    made = gathered(MIXED, 3)
    assert [0, 3, 1, 4, 6, 7] == made.fields["place"].tolist()
    assert (0.0, None) == (made.metrics["surplus"], made.surplus)


def kept_of(rows, batch, left=None):
    call = call_of(
        inputs=rows,
        params={
            "when": "informative",
            "batch": batch,
            "at_most": 2,
            "exhausted": "error",
            "surplus": "keep",
        },
        wanted=("place",),
    )
    made = loops.gather(replace(call, surplus=left, trips=1))
    return made.fields["place"].tolist(), made.surplus


def test_what_is_left_over_comes_first_in_the_next_iteration():
    first, left = kept_of(MIXED, 2)
    assert [0, 3, 1, 4] == first
    assert [6, 7] == left["place"].tolist()
    assert set(MIXED.keys()) == set(left.keys())
    second, left = kept_of(numbered([True] * 4, [20, 20, 21, 21], first=10), 2, left)
    assert [6, 7, 10, 11] == second
    assert [12, 13] == left["place"].tolist()


def test_no_more_is_kept_than_one_iteration_wants():
    """Of 7 groups 2 are taken and 2 kept; what is kept is all taken before anything newer."""
    rows = numbered([True] * 7, list(range(30, 37)))
    taken, left = kept_of(rows, 2)
    assert ([0, 1], [2, 3]) == (taken, left["place"].tolist())
    taken, left = kept_of(numbered([True] * 3, [50, 51, 52], first=20), 2, left)
    assert ([2, 3], [20, 21]) == (taken, left["place"].tolist())


def test_ragged_fields_go_along():
    rows = trip([True, True, True], [2, 1, 2], answer=text(["a", "", "ccc"]))
    made = gathered(rows, 1, wanted=("answer",))
    assert ["a", "ccc"] == strings(made.fields["answer"])


def test_other_groups_fill_up_where_that_is_declared():
    """Groups 8, 3 and 1 count; 5 is the fourth, and there is no fifth."""
    made = gathered(MIXED, 5, exhausted="fill")
    assert [8, 8, 3, 3, 1, 1, 5, 5] == made.fields["group"].tolist()
    assert (2.0, 0.0, 8) == (made.metrics["filled"], made.metrics["surplus"], made.rows)
    assert made.surplus is None


def exhausted(rows, batch, **params):
    with pytest.raises(RunError) as caught:
        gathered(rows, batch, **params)
    (finding,) = caught.value.findings
    return finding


def test_too_few_groups_are_an_error_that_says_what_was_found():
    """Mean rewards: 0 of group 8, 1 of 3, 2 of 5 and 0.5 of 1."""
    finding = exhausted(MIXED, 4)
    assert "E766" == finding.code
    assert "made: 2 trips did not bring 4 groups in iteration 6" == finding.what
    assert [
        "3 of 4 groups in 2 trips have informative",
        "mean reward 0 to 0.4: 1 group",
        "mean reward 0.4 to 0.8: 1 group",
        "mean reward 0.8 to 1.2: 1 group",
        "mean reward 1.2 to 1.6: 0 groups",
        "mean reward 1.6 to 2: 1 group",
    ] == finding.got.splitlines()
    assert 'exhausted="fill"' in finding.fix


def test_rewards_that_are_all_alike_or_missing_are_said_so():
    nan = float("nan")
    rows = trip([False] * 6, [1, 1, 2, 2, 3, 3])
    rows["reward"] = torch.tensor([1.0, 1.0, 1.0, nan, nan, nan])
    lines = exhausted(rows, 1).got.splitlines()[1:]
    assert ["mean reward 1: 2 groups", "no reward: 1 group"] == lines
    rows["reward"] = torch.full((6,), nan)
    assert ["no reward: 3 groups"] == exhausted(rows, 1).got.splitlines()[1:]


def test_without_a_reward_there_is_no_histogram():
    finding = exhausted(trip([False, True], [1, 1]), 1)
    assert "0 of 1 groups in 2 trips have informative" == finding.got


@given(
    st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=24),
    st.integers(1, 6),
)
def test_groups_are_gathered_whole_and_by_who_was_first(rows, batch):
    groups, flags = [group for group, _ in rows], [flag for _, flag in rows]
    count = {g: all(f for h, f in rows if h == g) for g in groups}
    first = [g for g in dict.fromkeys(groups) if count[g]]
    made = gathered(numbered(flags, groups), batch, exhausted="fill")
    places = made.fields["place"].tolist()
    filled = (first + [g for g in dict.fromkeys(groups) if not count[g]])[:batch]
    assert [p for g in filled for p, h in enumerate(groups) if h == g] == places
    assert max(len(first) - batch, 0) == made.metrics["surplus"]


def test_a_state_ends_as_its_last_trip_has_left_it():
    rows = make_batch({"count": torch.tensor([2.0, 3.0]), "enough": torch.tensor([False, True])}, 2)
    call = call_of(inputs=rows, params={"when": "enough", "at_most": 3}, wanted=("count",))
    made = loops.last(replace(call, trips=3))
    assert [2.0, 3.0] == made.fields["count"].tolist()
    assert {"count"} == made.fields.keys()
    assert {"trips": 3.0, "done": 0.5} == join_metrics([made.metrics])
