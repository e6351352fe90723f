"""The body that counts an evaluation: rows in any order, prompts of which all or none are right."""

from __future__ import annotations

import pytest
import torch

from rlflow.batch import make_batch, text
from rlflow.errors import RunError
from rlflow.ops.bodies.metrics import pass_rates
from rlflow.ops.evaluating.passing import ANSWERS, PassRule, whole_response
from tests.ops.calls import call_of

pytestmark = pytest.mark.torch


def counted(reward, group, responses, rule="reward>=1", answer=whole_response, ks=(1, 2)):
    fields = {
        "reward": torch.tensor(reward),
        "group": torch.tensor(group),
        "response": text(list(responses)),
    }
    params = {"ks": ks, "rule": PassRule.parse(rule), "answer": answer}
    return pass_rates(call_of(make_batch(fields, len(reward)), params)).metrics


def test_samples_of_a_prompt_are_counted_together_wherever_they_stand():
    #        prompt 7: 1 of 2 right      prompt 4: both
    found = counted([1.0, 2.0, 0.0, 1.0], [7, 4, 7, 4], "abcb")
    assert (2.0, 2.0, 1.0) == (found["prompts"], found["samples"], found["mean"])
    assert (0.75, 1.0) == (found["pass@1"], found["pass@2"])
    assert (0.75, 0.75) == (found["maj@1"], found["maj@2"])
    assert (0.5, 1.0) == (found["pass@1/low"], found["pass@1/high"])
    same = counted([1.0, 0.0, 1.0, 2.0], [0, 0, 1, 1], "acbb")
    assert {k: v for k, v in same.items() if "/" not in k} == {
        k: v for k, v in found.items() if "/" not in k
    }


def test_the_rule_says_which_are_right_and_answers_which_are_alike():
    reward, group = [0.5, 0.5, 0.25], [0, 0, 0]
    assert 0.0 == counted(reward, group, "abc")["pass@2"]
    assert 1.0 == counted(reward, group, "abc", "reward>=0.5")["pass@2"]
    assert counted(reward, group, "abc", "reward>0.25")["pass@1"] == pytest.approx(2 / 3)
    responses = ["it is 4", "so 4.", "5"]
    alike = counted(reward, group, responses, "reward>=0.5", ANSWERS["number"], ks=(3,))
    assert 1.0 == alike["maj@3"]
    apart = counted(reward, group, responses, "reward>=0.5", ks=(3,))
    assert apart["maj@3"] == pytest.approx(2 / 3)


def test_a_function_that_reads_no_text_is_named_with_the_response():
    def broken(response: str) -> str:
        return response[5]

    def number(response: str) -> int:
        return 4

    for function, says in ((broken, "IndexError"), (number, "it returned int")):
        with pytest.raises(RunError, match=f"(?s)E363.*{function.__name__}.*{says}.*'ab'"):
            counted([1.0], [0], ["ab"], answer=function, ks=(1,))
