"""Versions of tokens: written by a rollout, checked and counted by an update."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import rlflow as rf
from rlflow.batch import flat, lengths, make_batch, ragged_rows, split_rows, text
from rlflow.contract.values import SampleKey
from rlflow.engines.hf.loading import load_tokenizer
from rlflow.errors import RunError
from rlflow.ops.bodies import rollout, update
from rlflow.runtime.execute.stats import join_metrics
from rlflow.runtime.worker.loaded import InUse
from tests.conftest import TINY
from tests.ops.calls import call_of, generated

pytestmark = pytest.mark.torch

SAMPLING = {"n": 2, "max_new_tokens": 8, "temperature": 1.0}


class Speaker:
    """A model of a version that answers row i with i % 3 tokens more than one."""

    context = 64

    def __init__(self, version):
        self.version = version
        self.tokenizer = load_tokenizer(str(TINY))

    def generate(self, prompts, samples, **options):
        rows = [[3] * (1 + i % 3) for i in samples.tolist()]
        return generated(rows, [[-1.0] * len(row) for row in rows], [True] * len(rows))


@pytest.mark.parametrize("version", [0, 7])
def test_every_token_has_the_version_of_the_weights_in_use(version):
    inputs = make_batch({"prompt": text(["1+1=", "2+2="])}, 2)
    wanted = ("version", "response_tokens")
    call = call_of(inputs=inputs, params=SAMPLING, model=Speaker(version), wanted=wanted)
    fields = rollout.rollout(call).fields
    assert torch.int64 == fields["version"].dtype
    rows = [row.tolist() for row in split_rows(fields["version"])]
    assert [[version] * size for size in (1, 2, 3, 1)] == rows


def test_versions_that_nobody_reads_are_not_made():
    inputs = make_batch({"prompt": text(["1+1="])}, 1)
    call = call_of(inputs=inputs, params=SAMPLING, model=Speaker(3), wanted=("sample",))
    assert {"sample"} == rollout.rollout(call).fields.keys()


def test_the_model_in_use_has_the_version_of_its_instance():
    instance = SimpleNamespace(name="actor@gen")
    loaded = SimpleNamespace(version=4, tokenizer=None, model=SimpleNamespace(context=8))
    loaded.instance = instance
    used = InUse(loaded, SampleKey(seed=0, iteration=0, stream=""))
    assert 4 == used.version
    loaded.version = None
    with pytest.raises(AssertionError, match="actor@gen are discarded"):
        _ = used.version


class Stepper:
    learning_rate = 0.5

    def __init__(self):
        self.steps = 0

    def step(self, mini, loss, **options):
        self.steps += 1
        return SimpleNamespace(metrics={}, grad_norm=1.0, applied=True)


def update_call(versions, *, iteration, staleness, masked=()):
    """`masked` are (row, token) that do not count."""
    mask = [[(r, t) not in masked for t in range(len(row))] for r, row in enumerate(versions)]
    fields = {
        "response_tokens": ragged_rows([[3] * len(row) for row in versions], torch.int64),
        "response_mask": ragged_rows(mask, torch.bool),
        "version": ragged_rows(versions, torch.int64),
    }
    params = {"loss": rf.SFTLoss(), "epochs": 1, "mini_batches": 1, "max_grad_norm": 1.0}
    return call_of(
        inputs=make_batch(fields, len(versions)),
        params=params | {"staleness": staleness},
        model=Stepper(),
        iteration=iteration,
    )


def test_an_update_logs_how_old_its_tokens_are():
    """Ages 1 | 2 2 0, over tokens that count: 5/4, and 3/3 without one of 2."""
    call = update_call([[4], [3, 3, 5]], iteration=5, staleness=2)
    made = join_metrics([update.update(call).metrics])
    assert (1.25, 2.0) == (made["staleness/mean"], made["staleness/max"])
    call = update_call([[4], [3, 3, 5]], iteration=5, staleness=2, masked={(1, 0)})
    assert 1.0 == join_metrics([update.update(call).metrics])["staleness/mean"]


def test_without_versions_nothing_is_logged_or_checked():
    call = update_call([[0]], iteration=5, staleness=0)
    fields = {name: call.inputs[name] for name in ("response_tokens", "response_mask")}
    bare = call_of(inputs=make_batch(fields, 1), params=call.params, model=call.model, iteration=5)
    assert {"grad_norm", "skipped", "lr"} == update.update(bare).metrics.keys()


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_sample_older_than_declared_stops_the_run_before_any_step(staleness):
    oldest = 6 - staleness
    update.update(update_call([[6, oldest]], iteration=6, staleness=staleness))
    call = update_call([[6], [6, oldest - 1]], iteration=6, staleness=staleness)
    with pytest.raises(RunError) as caught:
        update.update(call)
    assert 0 == call.model.steps
    message = str(caught.value)
    assert "E764" in message
    assert "made: a sample of iteration 6 is older than declared" in message
    assert f"version {oldest - 1}, {staleness + 1} updates old" in message
    assert f"version {oldest} or newer: staleness={staleness}" in message


def test_a_masked_token_may_be_of_any_age():
    call = update_call([[6, 0]], iteration=6, staleness=1, masked={(0, 1)})
    assert 0.0 == join_metrics([update.update(call).metrics])["staleness/max"]


def test_a_part_without_rows_has_no_age():
    call = update_call([], iteration=6, staleness=1)
    parts = [update.staleness(call, call.inputs), update.staleness(*_some(6))]
    assert {"staleness/mean": 1.0, "staleness/max": 1.0} == join_metrics(parts)
    assert 0 == len(lengths(call.inputs["version"])) == len(flat(call.inputs["version"]))


def _some(iteration):
    call = update_call([[iteration - 1]], iteration=iteration, staleness=1)
    return call, call.inputs
