"""What a real engine answers, spoiled on its way: one error, and nothing of it is a row."""

from __future__ import annotations

from array import array

import pytest
import torch

from rlflow.batch import flat, ragged_rows
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.process.client.link import Link
from rlflow.errors import RunError
from tests.engines.faults.conftest import for_each
from tests.engines.sglang.conftest import GREEDY, PROMPTS, same

pytestmark = [pytest.mark.torch, pytest.mark.slow, for_each("sglang", "vllm")]

KEY = SampleKey(seed=1, iteration=0, stream="gen")
SPOILED = {
    "no log-probs": ({"log_probs": b""}, "E592"),
    "text without ids": ({"tokens": b"", "log_probs": b""}, "E592"),
    "an id beyond": ({"tokens": array("q", [10**6] * 12).tobytes()}, "E592"),
    "another row": ({"row": 0}, "E592"),
    "other weights": ({"versions": ["7"]}, "E586"),
}


def spoil(monkeypatch, words):
    """Change what is told of row 1, once; whether it was."""
    pass_on, fired = Link._pass, []

    def passed(link, number, message, *, last):
        if message.get("row") == 1 and not fired:
            fired.append(True)
            message = {**message, **words}
        pass_on(link, number, message, last=last)

    monkeypatch.setattr(Link, "_pass", passed)
    return fired


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_answer_is_one_error_and_the_engine_goes_on(pair, what, monkeypatch):
    words, code = SPOILED[what]
    prompts, ids = ragged_rows(PROMPTS, torch.int64), torch.arange(6)
    with monkeypatch.context() as patch:
        fired = spoil(patch, words)
        with pytest.raises(RunError, match=code) as raised:
            pair.rollout.generate(prompts, GREEDY, KEY, ids)
    assert fired
    assert 1 == len(raised.value.findings)
    same(*pair.generate(PROMPTS, GREEDY))


def test_a_log_prob_that_is_no_number_reaches_whoever_names_its_token(pair, monkeypatch):
    """`ops/test_not_finite.py` has the error that follows, with the row and the token."""
    spoil(monkeypatch, {"log_probs": array("f", [float("nan")] * 12).tobytes()})
    made = pair.rollout.generate(ragged_rows(PROMPTS, torch.int64), GREEDY, KEY, torch.arange(6))
    assert 12 == int(flat(made.log_probs).isnan().sum())


class Told:
    """An answer that has come."""

    def __init__(self, value):
        self.value = value

    def result(self):
        return self.value


def test_weights_of_which_half_arrived_are_found(pair, monkeypatch):
    """Every other tensor is an old one while the engine reads them, and says that it has all."""
    pair.update(4, seed=4)
    old = {name: tensor.clone() for name, tensor in pair.model.staging.tensors.items()}
    ask, torn = Link.ask, list(old)[::2]

    def asked(link, do, fields, *, numbered=False):
        if do != "update":
            return ask(link, do, fields, numbered=numbered)
        staged = pair.model.staging.tensors
        new = {name: staged[name].clone() for name in torn}
        for name in torn:
            staged[name].copy_(old[name])
        told = ask(link, do, fields, numbered=numbered).result()
        for name, tensor in new.items():
            staged[name].copy_(tensor)
        return Told(told)

    with monkeypatch.context() as patch:
        patch.setattr(Link, "ask", asked)
        pair.update(5, seed=5)
    wrong = pair.model.check()
    assert wrong
    assert len(wrong) < len(old)
    pair.update(6, seed=6)
    assert {} == pair.model.check()
    same(*pair.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("version", [4, 2])
def test_a_version_that_jumps_is_that_of_every_row(pair, version):
    """Forwards and back, as after a resume: rows are made with the weights that were sent last."""
    pair.update(3, seed=3)
    pair.update(version, seed=version)
    assert version == pair.model.version
    same(*pair.generate(PROMPTS, Sampling(max_new_tokens=12, temperature=0.0)))
    pair.model.version = version + 1
    with pytest.raises(RunError, match="E587"):
        pair.generate(PROMPTS, GREEDY)
    pair.model.version = version
