"""Steps of an environment: what may follow a response, and tools that a response calls."""

from __future__ import annotations

import pickle
import threading

import pytest

import rlflow as rf
from rlflow.envs.base import checked_step, state_text
from rlflow.envs.playing import Turn, play_turns
from rlflow.errors import UsageError
from rlflow.rewards.bounds import PLAIN, Bounds
from rlflow.rewards.judging import Failure

TOGETHER = 4


class Counting(rf.Environment):
    """Ends after so many turns; says how often it was asked."""

    def __init__(self, turns=3):
        self.turns = turns

    def begin(self, answer):
        return {"answer": answer, "seen": 0}

    def step(self, state, response):
        seen = state["seen"] + 1
        state["seen"] = seen
        done = response == state["answer"] or seen == self.turns
        return rf.Step(f"{seen}", done, float(response == state["answer"]), state)


class Meeting(rf.Environment):
    """A step is over when so many are under way together."""

    def __init__(self):
        self.barrier = threading.Barrier(TOGETHER)

    def step(self, state, response):
        return rf.Step(str(self.barrier.wait(10) >= 0), True)


class Late(rf.Environment):
    """Counts how many steps are under way while it waits for others to come."""

    def __init__(self):
        self.under_way = self.most = 0

    async def step(self, state, response):
        import asyncio

        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(20):
            await asyncio.sleep(0)
        self.under_way -= 1
        return rf.Step(response, True)


class Stuck(rf.Environment):
    """Never returns from `stuck`, raises upon `bad`, and forgets to say how it went upon `odd`."""

    def step(self, state, response):
        if response == "stuck":
            threading.Event().wait()
        if response == "bad":
            raise LookupError("no such thing")
        return "odd" if response == "odd" else rf.Step("fine", False)


def taken(environment, turns, bounds=PLAIN):
    return play_turns(environment, turns, bounds=bounds, failed=lambda place, failure: None)


def fresh(*responses, **fields):
    return [Turn(response=response, fields=fields) for response in responses]


def test_a_step_knows_nothing_but_its_state():
    environment = Counting()
    assert ("answer",) == environment.fields()
    first, right = taken(environment, fresh("a", "b", answer="b"))
    assert rf.Step("1", False, 0.0, {"answer": "b", "seen": 1}) == first
    assert rf.Step("1", True, 1.0, {"answer": "b", "seen": 1}) == right
    state = {"answer": "b", "seen": 2}
    (again,) = taken(environment, [Turn(response="a", state=state)])
    assert (True, {"answer": "b", "seen": 3}) == (again.done, again.state)
    assert {"answer": "b", "seen": 2} == state


def test_a_state_that_is_not_told_stays():
    (step,) = taken(Stuck(), [Turn(response="fine", state={"a": 1})])
    assert {"a": 1} == step.state


def test_plain_steps_run_at_the_same_time():
    steps = taken(Meeting(), fresh(*"abcdefgh"), Bounds(concurrency=TOGETHER))
    assert ["True"] * 8 == [step.observation for step in steps]


@pytest.mark.parametrize("most", [1, 3, 16])
def test_async_steps_run_at_the_same_time_and_no_more_than_said(most):
    environment = Late()
    steps = taken(environment, fresh(*"abcdef"), Bounds(concurrency=most))
    assert list("abcdef") == [step.observation for step in steps]
    assert min(most, 6) == environment.most


@pytest.mark.slow
def test_what_fails_is_told_apart_and_a_step_that_never_ends_is_killed():
    bounds = Bounds(concurrency=2, timeout=2.0)
    steps = taken(Stuck(), fresh("fine", "stuck", "bad", "odd"), bounds)
    assert "fine" == steps[0].observation
    failures = [step for step in steps if isinstance(step, Failure)]
    assert ["timeout", "raised", "not a number"] == [failure.cause for failure in failures]
    assert "no answer within 2 s" == failures[0].problem
    assert "LookupError: no such thing" == failures[1].problem
    assert "returned 'odd', not an rf.Step" == failures[2].problem


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (rf.Step(3, True), "observation is 3, not text"),
        (rf.Step("", 1), "done is 1, not a bool"),
        (rf.Step("", True, float("nan")), "reward is nan, not a finite number"),
        (rf.Step("", True, 1e39), "reward is 1e+39, not a finite number"),
        (rf.Step("", True, 0.0, {"a": {1}}), "state is not JSON"),
        (rf.Step("", True, 0.0, [1]), r"state is \[1\], not a dict"),
    ],
)
def test_what_cannot_follow_is_refused(wrong, why):
    with pytest.raises(ValueError, match=why.replace("+", r"\+")):
        checked_step(wrong if wrong.state is not None else rf.Step(*_parts(wrong), {}))


def _parts(step):
    return step.observation, step.done, step.reward


def test_a_state_keeps_its_letters():
    assert '{"a": "ä"}' == state_text({"a": "ä"})


def add(a: int, b: int) -> int:
    return a + b


def shout(text: str) -> str:
    return text.upper()


async def later(text: str) -> str:
    return f"later {text}"


def said(environment, response, state=None):
    return environment.step(state or {}, response)


def called(name, arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_tools_answer_in_the_order_of_their_calls():
    tools = rf.ToolEnvironment([add, later])
    calls = called("add", '{"a": 2, "b": 3}'), called("later", '{"text": "x"}')
    assert rf.Step("5\nlater x", False) == said(tools, " and ".join(calls))


@pytest.mark.parametrize(
    ("response", "told"),
    [
        (called("sub", "{}"), "error: ValueError: no tool 'sub'"),
        (called("add", '{"a": 1}'), "error: TypeError: add() missing"),
        ("<tool_call>nonsense</tool_call>", "error: JSONDecodeError"),
        ("<tool_call>[1]</tool_call>", "error: ValueError: expected"),
    ],
)
def test_a_call_that_fails_is_told_to_the_model(response, told):
    step = said(rf.ToolEnvironment([add, shout]), response)
    assert not step.done
    assert step.observation.startswith(told)


def test_a_pattern_of_ones_own_and_plain_arguments():
    pattern = r"(?P<name>shout)\((?P<arguments>[^)]*)\)"
    tools = rf.ToolEnvironment([shout], pattern=pattern, answer="[{result}]")
    assert rf.Step("[ABC]", False) == said(tools, "shout(abc)")
    assert "shout" in tools.describe()
    alone = rf.ToolEnvironment([shout], pattern=r"\((?P<arguments>[^)]*)\)")
    assert "ABC" == said(alone, "(abc)").observation


def test_the_last_response_is_scored():
    def exact(response: str, answer: str) -> float:
        return float(response == answer)

    tools = rf.ToolEnvironment([add], reward=exact)
    assert ("answer",) == tools.fields()
    (step,) = taken(tools, fresh("7", answer="7"))
    assert (True, 1.0) == (step.done, step.reward)
    assert 0.0 == said(rf.ToolEnvironment([add]), "7").reward


@pytest.mark.slow
def test_tools_go_to_another_process():
    def twice(number: int) -> int:
        return 2 * number

    tools = pickle.loads(pickle.dumps(rf.ToolEnvironment([twice, add])))
    assert "8" == said(tools, called("twice", '{"number": 4}')).observation
    bounds = Bounds(concurrency=1, timeout=30.0)
    (step,) = taken(rf.ToolEnvironment([twice]), fresh(called("twice", "3")), bounds)
    assert "6" == step.observation


@pytest.mark.parametrize(
    ("tools", "options", "why"),
    [
        ([], {}, "there is none"),
        ([3], {}, "3 is no function"),
        ([add, add], {}, "two are called add"),
        ([add], {"reward": 1}, "the reward 1 is no function"),
        ([add], {"answer": "x"}, "answer='x' has no {result} in it"),
        ([add], {"pattern": "("}, "is no regular expression"),
        ([add], {"pattern": "a"}, "has no group for the call"),
        ([add], {"pattern": "(?P<tool>a)"}, "has a group 'tool'"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(tools, options, why):
    with pytest.raises(UsageError) as raised:
        rf.ToolEnvironment(tools, **options)
    (finding,) = raised.value.findings
    assert "E620" == finding.code
    assert why in finding.what
