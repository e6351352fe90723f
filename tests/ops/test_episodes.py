"""Episodes as they are declared, and their bodies: what is told, said, masked, and counted.

Tokens of the scripted model: on its first call 40 41 .., on the second 50 51 .., so many as the
sample's number says; token 24 is a space, digits are 3 to 12.
"""

from __future__ import annotations

import pytest
import torch

import rlflow as rf
from rlflow import ops
from rlflow.batch import lengths, make_batch, ragged_rows, strings, text
from rlflow.engines.hf.loading import load_tokenizer
from rlflow.errors import RunError
from rlflow.graph.graph import Graph
from rlflow.graph.rules.check import check_graph
from rlflow.graph.trace import tracing
from rlflow.ops.bodies.loops import episodes, observing
from rlflow.rewards.bounds import Bounds
from rlflow.runtime.execute.stats import join_metrics
from tests.conftest import TINY
from tests.ops.calls import call_of, generated

pytestmark = pytest.mark.torch


class Echo(rf.Environment):
    """Tells the model its number of letters; a response `yes` is right, `bad` breaks it."""

    def begin(self, answer):
        return {"answer": answer}

    def step(self, state, response):
        if response == "bad":
            raise LookupError("no such thing")
        right = response == state["answer"]
        return rf.Step(f" {len(response)}", right, 0.5 + right, state | {"last": response})


class Scripted:
    """A model whose sample s says s + 1 tokens: 10 * (calls + 3), and those after it."""

    def __init__(self, context=64, version=7):
        self.tokenizer = load_tokenizer(str(TINY))
        self.context = context
        self.version = version
        self.asked = []

    def generate(self, prompts, samples, *, n, **options):
        self.asked.append(([row.tolist() for row in prompts.unbind()], samples.tolist(), options))
        first = 10 * (len(self.asked) + 3)
        made = [[first + p for p in range(s + 1)] for s in samples.tolist()]
        said = [[-float(t) for t in row] for row in made]
        return generated(made, said, [True] * len(made))


def lists(field):
    return [row.tolist() for row in field.unbind()]


def said(*responses, answers=None):
    fields = {"response": text(responses), "sample": torch.arange(len(responses)) + 10}
    fields["answer"] = text(answers or ["yes"] * len(responses))
    return make_batch(fields, len(responses))


MADE = (
    "observation",
    "done",
    "finished",
    "reward",
    "turns",
    "env_state",
    "truncated",
)


def observed(inputs, environment=None, **params):
    wanted = (*MADE, "failure") if params.get("on_error") == "end" else MADE
    given = {"environment": environment or Echo(), **params}
    return observing.observe(call_of(inputs=inputs, params=given, wanted=wanted))


def test_an_environment_begins_with_the_row_and_answers():
    made = observed(said("no", "yes"))
    assert [" 2", " 3"] == strings(made.fields["observation"])
    assert [False, True] == made.fields["done"].tolist() == made.fields["finished"].tolist()
    assert [0.5, 1.5] == made.fields["reward"].tolist()
    assert [1, 1] == made.fields["turns"].tolist()
    assert '{"answer": "yes", "last": "no"}' == strings(made.fields["env_state"])[0]
    assert {"stepped": 1.0, "failed": 0.0, "done": 0.5} == join_metrics([made.metrics])


def later(inputs, made, **changed):
    """The batch of a next turn: what was said, upon what an observation has left."""
    fields = {**inputs, **made.fields} | changed
    return make_batch(fields, len(inputs["sample"]))


def test_an_episode_that_is_over_stays_as_it_is():
    inputs = said("no", "yes")
    again = later(inputs, observed(inputs), response=text(["yes", "bad"]))
    made = observed(again)
    assert ["", ""] != strings(made.fields["observation"])
    assert "" == strings(made.fields["observation"])[1]
    assert [2, 1] == made.fields["turns"].tolist()
    assert [2.0, 1.5] == made.fields["reward"].tolist()
    assert [True, True] == made.fields["done"].tolist()
    assert {"stepped": 0.5, "failed": 0.0, "done": 1.0} == join_metrics([made.metrics])


def test_one_that_was_cut_off_is_over_and_not_finished():
    inputs = said("no", "no")
    cut = torch.tensor([True, False])
    again = later(inputs, observed(inputs), truncated=cut, done=cut)
    made = observed(again)
    assert [True, False] == made.fields["done"].tolist()
    assert [False, False] == made.fields["finished"].tolist()
    assert [True, False] == made.fields["truncated"].tolist()


def test_an_environment_that_fails_stops_the_run_and_names_the_episode():
    with pytest.raises(RunError) as raised:
        observed(said("no", "bad"))
    (finding,) = raised.value.findings
    assert "E621" == finding.code
    assert "Echo failed in turn 1 of episode 11 of iteration 0" in finding.what
    assert "LookupError: no such thing" in finding.what
    assert "response: 'bad'" in finding.got


def test_an_episode_whose_environment_fails_may_end():
    inputs = said("no", "bad")
    made = observed(inputs, on_error="end")
    assert ["", "raised: LookupError: no such thing"] == strings(made.fields["failure"])
    assert [False, True] == made.fields["done"].tolist()
    assert [False, False] == made.fields["finished"].tolist()
    assert [0.5, 0.0] == made.fields["reward"].tolist()
    assert {"stepped": 1.0, "failed": 0.5, "done": 0.5} == join_metrics([made.metrics])
    again = observed(later(inputs, made, response=text(["bad", "yes"])), on_error="end")
    assert [0.5, 0.0] == again.fields["reward"].tolist()
    assert [2, 1] == again.fields["turns"].tolist()
    assert all(strings(again.fields["failure"]))


@pytest.mark.slow
def test_a_step_that_never_returns_ends_its_episode():
    class Stuck(Echo):
        def step(self, state, response):
            while response == "stuck":
                pass
            return super().step(state, response)

    bounds = Bounds(concurrency=2, timeout=2.0)
    made = observed(said("stuck", "yes"), Stuck(), on_error="end", bounds=bounds)
    assert ["timeout: no answer within 2 s", ""] == strings(made.fields["failure"])
    with pytest.raises(RunError, match=r"turn 1 of episode 10.* no answer within 2 s"):
        observed(said("stuck"), Stuck(), bounds=bounds)


def test_no_rows_are_no_steps():
    made = observed(
        make_batch({"response": text([]), "sample": torch.arange(0), "answer": text([])}, 0)
    )
    assert 0 == len(made.fields["done"]) == made.rows


WHOLE = (
    "response_tokens",
    "response_mask",
    "rollout_log_probs",
    "version",
    "response",
    "done",
    "truncated",
)


def under_way(done, observation, sizes=None):
    """Episodes after their first response, of row r the tokens 3 .. and the version 6."""
    rows = len(done)
    sizes = sizes or [2] * rows
    begun = [list(range(3, 3 + size)) for size in sizes]
    fields = {
        "prompt_tokens": ragged_rows([[30] * (1 + r) for r in range(rows)], torch.int64),
        "response_tokens": ragged_rows(begun, torch.int64),
        "response_mask": ragged_rows([[True] * size for size in sizes], torch.bool),
        "rollout_log_probs": ragged_rows([[-1.0] * size for size in sizes], torch.float32),
        "version": ragged_rows([[6] * size for size in sizes], torch.int64),
        "response": text(["01"] * rows),
        "observation": text(observation),
        "done": torch.tensor(done),
        "truncated": torch.zeros(rows, dtype=torch.bool),
        "sample": torch.arange(rows),
    }
    return make_batch(fields, rows)


def acted(inputs, model=None, **params):
    given = {"max_new_tokens": 4, "max_tokens": 32, "temperature": 0.5} | params
    call = call_of(inputs=inputs, params=given, wanted=WHOLE, model=model or Scripted())
    return episodes.act(call)


def test_what_is_told_and_said_joins_the_response():
    model = Scripted()
    made = acted(under_way([False, True, False], [" 1", " 9", "2"]), model)
    (asked, samples, options), *more = model.asked
    assert [] == more
    assert [[30, 3, 4, 24, 4], [30, 30, 30, 3, 4, 5]] == asked
    assert [0, 2] == samples
    assert (4, 0.5) == (options["max_new_tokens"], options["temperature"])
    fields = made.fields
    assert [[3, 4, 24, 4, 40], [3, 4], [3, 4, 5, 40, 41, 42]] == lists(fields["response_tokens"])
    yes, no = True, False
    masks = [[yes, yes, no, no, yes], [yes, yes], [yes, yes, no, yes, yes, yes]]
    assert masks == lists(fields["response_mask"])
    log_probs = [[-1, -1, 0, 0, -40], [-1, -1], [-1, -1, 0, -40, -41, -42]]
    assert log_probs == lists(fields["rollout_log_probs"])
    assert [[6, 6, 6, 6, 7], [6, 6], [6, 6, 6, 7, 7, 7]] == lists(fields["version"])
    assert ["p", "01", "pqr"] == strings(fields["response"])
    assert [False, True, False] == fields["done"].tolist()
    expected = {"length": 2.0, "told": 1.5, "acting": 2 / 3, "no_room": 0.0}
    assert pytest.approx(expected) == join_metrics([made.metrics])


@pytest.mark.parametrize(
    ("limits", "context", "fits"),
    [
        ({"max_tokens": 8}, 64, [True, False]),
        ({"max_tokens": 7}, 64, [False, False]),
        ({"max_tokens": 9}, 64, [True, True]),
        ({"max_tokens": 9}, 11, [True, True]),
        ({"max_tokens": 9}, 10, [True, False]),
        ({"max_tokens": 9}, 8, [False, False]),
        ({"max_tokens": 9}, None, [True, True]),
    ],
)
def test_an_episode_without_room_for_a_turn_is_cut_off(limits, context, fits):
    """Row 0 has 1 + 2 tokens and is told 2, row 1 has 2 + 3 and is told 2; a turn takes 4."""
    model = Scripted(context)
    inputs = under_way([False, False], [" 1", " 2"], [2, 3])
    made = acted(inputs, model, **limits)
    assert [not fit for fit in fits] == made.fields["truncated"].tolist()
    assert [not fit for fit in fits] == made.fields["done"].tolist()
    grew = lengths(made.fields["response_tokens"]) > lengths(inputs["response_tokens"])
    assert fits == grew.tolist()
    assert [s for s, fit in enumerate(fits) if fit] == model.asked[0][1]


TEMPLATE = (
    "{% for m in messages %}<pad>{{ m.role[0] }}{{ m.content }}<eos> {% endfor %}"
    "{% if add_generation_prompt %}<pad>a{% endif %}"
)


def test_a_chat_goes_on_where_the_response_ended():
    """`<eos> ` closes a message, `<pad>t` opens one of a tool, `<pad>a` the next response."""
    inputs = under_way([False, False, True], ["7", "7", "7"], [2, 2, 2])
    ended = ragged_rows([[3, 1], [3, 4], [3, 1]], torch.int64)
    inputs = make_batch({**inputs, "response_tokens": ended}, 3)
    made = acted(inputs, chat=rf.Chat(template=TEMPLATE), role="tool")
    between = [24, 0, 44, 10, 1, 24, 0, 25]
    first, second, third = lists(made.fields["response_tokens"])
    assert [3, 1, *between, 40] == first
    assert [3, 4, 1, *between, 40, 41] == second
    assert [3, 1] == third
    assert [True] * 2 + [False] * 9 + [True] * 2 == lists(made.fields["response_mask"])[1]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages[0].content }}", "without '<eos>'"),
        ("{{ messages | length }}{{ messages[1].content }}<eos>", "does not go on from"),
        ("{{ raise_exception('no tools here') }}", "no tools here"),
    ],
)
def test_a_template_without_a_place_for_an_answer_is_refused(template, why):
    with pytest.raises(RunError) as raised:
        acted(under_way([False], ["7"]), chat=rf.Chat(template=template), role="tool")
    (finding,) = raised.value.findings
    assert "E623" == finding.code
    assert why in finding.got


def over(done, cut, **more):
    rows = len(done)
    fields = {
        "done": torch.tensor(done),
        "truncated": torch.tensor(cut),
        "turns": torch.arange(rows) + 1,
        "reward": torch.arange(rows).float(),
        "response_mask": ragged_rows([[True, True, False, True]] * rows, torch.bool),
        "sample": torch.arange(rows) + 20,
        "group": torch.arange(rows) // 2,
        "response": text([f"r{row}" for row in range(rows)]),
    }
    return make_batch(fields | more, rows)


KEEP = {"truncated": "keep", "failed": "keep", "max_truncated": 1.0, "max_failures": 1.0}


def ended(inputs, **params):
    made = (rf.graph.fields.row("valid", "bool"),)
    call = call_of(inputs=inputs, params=KEEP | params, wanted=("truncated", "valid"), outputs=made)
    return episodes.ended(call)


def test_what_is_not_over_after_its_last_turn_was_cut_off():
    made = ended(over([True, False, True, True], [False, False, True, False]))
    assert [False, True, True, False] == made.fields["truncated"].tolist()
    found = join_metrics([made.metrics])
    assert (2.5, 4.0, 1.5) == (found["turns"], found["turns_max"], found["reward"])
    assert (0.5, 0.25, 4.0) == (found["truncated"], found["told"], found["length"])


@pytest.mark.parametrize(
    ("policies", "valid"),
    [
        ({}, [True] * 6),
        ({"truncated": "drop_sample"}, [True, False, True, True, True, True]),
        ({"truncated": "drop_group"}, [False, False, True, True, True, True]),
        ({"failed": "drop_sample"}, [True, True, True, False, True, True]),
        (
            {"truncated": "drop_sample", "failed": "drop_group"},
            [True, False, False, False, True, True],
        ),
    ],
)
def test_episodes_may_be_left_out(policies, valid):
    done = [True, False, True, True, True, True]
    causes = text(["", "", "", "timeout: late", "", ""])
    made = ended(over(done, [False] * 6, failure=causes), **policies)
    assert valid == made.fields["valid"].tolist()
    found = join_metrics([made.metrics])
    assert pytest.approx(1 / 6) == found["failed"]
    assert pytest.approx(1 - sum(valid) / 6) == found["dropped"]


@pytest.mark.parametrize(
    ("option", "code", "rows"),
    [("max_failures", "E624", [1, 3, 4, 5]), ("max_truncated", "E625", [0, 2])],
)
def test_too_many_of_them_stop_the_run_which_says_which(option, code, rows):
    done = [False, True, False, True, True, True]
    causes = text(["", "late", "", "late", "late", "late"])
    inputs = over(done, [False] * 6, failure=causes)
    assert 6 == ended(inputs, **{option: len(rows) / 6}).rows
    with pytest.raises(RunError) as raised:
        ended(inputs, **{option: len(rows) / 6 - 0.01})
    (finding,) = raised.value.findings
    assert code == finding.code
    assert f"{len(rows)} of 6 episodes of iteration 0" in finding.what
    for row in rows:
        assert str(20 + row) in finding.got


# --- declared -------------------------------------------------------------------------------


def traced(declare):
    """The graph that a function declares, and what is wrong with it."""
    with tracing() as trace:
        actor = rf.Model("actor", str(TINY), optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
        declare(actor, prompts)
    graph = Graph(
        name="made", nodes=tuple(trace.nodes.values()), models=tuple(trace.models.values())
    )
    found = trace.findings or check_graph(graph)
    return graph, [(f.code, f.what, f.expected) for f in found]


LIMITS = {"n": 2, "max_turns": 3, "max_new_tokens": 4, "max_tokens": 24}


def learned(actor, rows):
    ops.update(actor, rows, ops.advantage("grpo", rows), loss=rf.PolicyLoss())


def whole(environment=None, **options):
    def declare(actor, prompts):
        learned(actor, ops.episodes(actor, environment or Echo(), prompts, **LIMITS | options))

    return traced(declare)


def test_episodes_are_a_loop_of_turns():
    graph, found = whole(temperature=0.7)
    assert [] == found
    assert [
        "prompts",
        "actor.rollout",
        "episodes.observe",
        "episodes.act",
        "episodes.observe.next",
        "episodes.turns.gate",
        "episodes.turns",
        "episodes",
        "advantage",
        "actor.update",
    ] == [node.name for node in graph.nodes]
    update = graph.node("actor.update")
    read = {bound.name: bound.source for bound in update.inputs}
    assert ("episodes.turns", "actor.rollout") == (read["response_mask"], read["prompt_tokens"])
    assert 0.7 == update.param("temperature") == graph.node("episodes.act").param("temperature")
    assert {"actor.rollout", "prompts"} == {node.rows_of for node in graph.nodes}


def test_the_same_is_declared_by_hand():
    def declare(actor, prompts):
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
        start = ops.observe(Echo(), samples)

        def turn(rows):
            return ops.observe(Echo(), ops.act(actor, rows, max_new_tokens=4, max_tokens=24))

        learned(actor, ops.ended(ops.repeat(turn, start, until="done", at_most=2)))

    graph, found = traced(declare)
    assert [] == found
    assert ("actor.act", "observe_2") == tuple(n.name for n in graph.nodes if n.loop)[:2]


def test_one_turn_is_no_loop():
    graph, found = whole(max_turns=1)
    assert [] == found
    assert [] == [node.name for node in graph.nodes if node.ends_loop]


def test_dropped_episodes_are_not_valid():
    graph, found = whole(on_error="drop_group", truncated="drop_sample", timeout=2.0)
    assert [] == found
    assert "valid" in {bound.name for bound in graph.node("actor.update").inputs}
    step = dict(graph.node("episodes.observe.next").params)
    assert ("end", 2.0) == (step["on_error"], step["bounds"].timeout)
    assert ("drop_sample", "drop_group") == tuple(
        graph.node("episodes").param(key) for key in ("truncated", "failed")
    )


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_tokens": 4}, "max_tokens=4 of an episode with turns of 4"),
        ({"expected": 4}, "expected=4"),
        ({"on_error": "drop"}, "on_error='drop'"),
        ({"truncated": "end"}, "truncated='end'"),
        ({"timeout": 0}, "timeout=0"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"retries": -1}, "retries=-1"),
        ({"backoff": 2.0}, "backoff=2.0 with retries=0"),
        ({"max_truncated": 2.0}, "max_truncated=2.0"),
        ({"max_failures": 0.5}, "failed='keep', max_failures=0.5: failures stop the run"),
    ],
)
def test_an_option_out_of_range_is_a_finding(options, what):
    _, found = whole(**options)
    assert ("E622", what) in [(code, said) for code, said, _ in found]


def test_what_is_no_environment_is_a_finding():
    _, found = whole(Echo)
    assert ("E626", "Echo() makes one") in [(code, said[-16:]) for code, said, _ in found]


def test_rows_that_nobody_has_observed_cannot_go_on():
    def declare(actor, prompts):
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
        learned(actor, ops.act(actor, samples, max_new_tokens=4, max_tokens=24))

    _, found = traced(declare)
    missing = [what for code, what, _ in found if code == "E103"]
    assert "node 'actor.act' has no input 'done'" in missing


def test_a_field_that_the_environment_reads_must_be_there():
    class Curious(Echo):
        def begin(self, question):
            return {}

    _, found = whole(Curious())
    assert [("E103", "node 'episodes.observe' has no input 'question'")] == [
        (code, what) for code, what, _ in found
    ]
