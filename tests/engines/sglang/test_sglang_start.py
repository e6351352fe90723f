"""Engines that do not start, and why."""

from __future__ import annotations

import socket
import sys
import threading
from dataclasses import replace
from importlib.metadata import distributions

import pytest
import torch

from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.process.client import load
from rlflow.errors import RunError, UsageError
from rlflow.graph.user.engines import SGLang
from tests.engines.sglang.conftest import TINY, needs_sglang, options, start

pytestmark = pytest.mark.torch


def threads():
    return {thread.name for thread in threading.enumerate() if "rlflow-sglang" in thread.name}


def test_an_interpreter_that_is_not_there():
    before = threads()
    with pytest.raises(UsageError, match=r"E582.*cannot be run\n.*/nowhere/python: No such file"):
        start(options=SGLang(python="/nowhere/python"))
    assert before == threads()


@pytest.mark.slow
def test_an_interpreter_without_sglang():
    if any("sglang" == found.name for found in distributions()):
        pytest.skip("SGLang is installed here")
    before = threads()
    with pytest.raises(UsageError, match=r"E582.*lacks a package\n.*No module named 'sglang'"):
        start(options=SGLang(python=sys.executable))
    assert before == threads()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"args": {"no_such_option": 1}}, "no_such_option"),
        ({"attention_backend": "none_such"}, "none_such"),
    ],
)
@pytest.mark.slow
@pytest.mark.sglang
def test_an_option_that_sglang_refuses(pair, wrong, said):
    with pytest.raises(RunError, match=r"E580") as caught:
        start(options=options(**wrong))
    assert said in caught.value.findings[0].got
    assert 20 >= len(caught.value.findings[0].got.splitlines())


@pytest.mark.slow
@pytest.mark.sglang
def test_a_start_that_takes_too_long(pair):
    with pytest.raises(RunError, match=r"E581.*within 0.5 seconds"):
        start(options=options(start_seconds=0.5))


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.extra
def test_a_start_whose_port_was_taken_meanwhile_is_made_anew(monkeypatch):
    needs_sglang()
    with socket.create_server(("", 0)) as other:
        ports = [other.getsockname()[1], load.free_port(load.LOOPBACK)]
        fresh = replace(load.KIND, fresh=lambda: {"nccl_port": ports.pop(0)})
        monkeypatch.setattr(load, "KIND", fresh)
        model, _ = start()
        try:
            assert {} == model.check()
            assert (1.0, 1.0) == (model.measured()["starts"], model.measured()["ports_taken"])
        finally:
            model.close()


@pytest.mark.slow
@pytest.mark.sglang
def test_random_weights_are_those_of_the_seed(pair):
    from rlflow.batch import flat, ragged_rows

    model, rollout = start(init="random", seed=5)
    plain = TorchRollout(load_model(TINY, dtype=torch.float32, device="cpu", init="random", seed=5))
    assert {} == model.check()
    prompts = ragged_rows([[3, 4, 5], [6, 7]], torch.int64)
    asked = (Sampling(max_new_tokens=9, temperature=0.0), SampleKey(seed=0, iteration=0, stream=""))
    made, wanted = (e.generate(prompts, *asked, torch.arange(2)) for e in (rollout, plain))
    assert flat(wanted.response_tokens).tolist() == flat(made.response_tokens).tolist()
    model.close()
