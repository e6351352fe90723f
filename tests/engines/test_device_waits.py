"""Nothing in a micro-batch waits for the device: its tensors have no values to ask for.

On the meta device whoever reads a number, or cuts by one, fails. So what runs there queues its
work on an accelerator from the first layer to the last gradient.
"""

from __future__ import annotations

import pytest
import torch

import rlflow as rf
from rlflow.batch import flat, make_batch, ragged_like
from rlflow.engines.hf.forward.fused import replace_forwards, restore_forwards
from rlflow.engines.hf.forward.head import take_head_apart
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.microbatches import add_metrics, numbers_of
from rlflow.engines.hf.train import TrainEngine
from rlflow.ops.bodies.update import loss_function
from rlflow.ops.math.aggregate import Totals
from tests.engines.examples import rows

pytestmark = pytest.mark.torch

LOSSES = {
    "grpo": rf.PolicyLoss("ppo_clip", kl="k3", kl_coef=0.1, entropy_coef=0.01),
    "corrected": rf.PolicyLoss("ppo_clip", correction=rf.ImportanceSampling()),
    "sft": rf.SFTLoss(),
}


def on_meta(path, kernel, monkeypatch):
    """An engine as on an accelerator, in chunks and without masks."""
    model = load_model(path, dtype=torch.float32, device="cpu")
    restore_forwards(model.module)
    model.module.to("meta")
    replace_forwards(model.module)
    by = "varlen" if kernel else "blocks"
    monkeypatch.setattr("rlflow.engines.hf.forward.spans.attends_by", lambda *_: by)
    model.predictor = take_head_apart(model.module, model.config)
    return TrainEngine(model, None, micro_tokens=None)


def given():
    """Rows with what the losses read."""
    batch = rows(n=4)
    tokens = batch["response_tokens"]
    values = torch.linspace(-2, -1, len(flat(tokens)))
    fields = {name: batch[name] for name in batch.keys()}  # noqa: SIM118  a TensorDict
    fields["response_mask"] = ragged_like(torch.ones(len(values), dtype=torch.bool), tokens)
    fields["advantages"] = torch.linspace(-1, 1, len(batch))
    for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs"):
        fields[name] = ragged_like(values, tokens)
    return make_batch(fields, len(batch))


@pytest.mark.rows(4)
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_a_micro_batch_asks_for_no_number(kind, family, kernel, model_dir, monkeypatch):
    trained = on_meta(model_dir(family), kernel, monkeypatch)
    loss_fn = loss_function(LOSSES[kind], Totals(tokens=50.0, rows=12.0))
    total = {}
    for _ in range(2):
        outputs = trained.compute(given(), LOSSES[kind].outputs(), 0.7)
        loss, metrics = loss_fn(outputs, given())
        loss.backward()
        add_metrics(total, {"loss": loss, **metrics})

    assert {value.device.type for value in total.values()} == {"meta"}
    assert all(p.grad is not None for p in trained.model.module.parameters())
    with pytest.raises(RuntimeError, match="meta"):
        numbers_of(total)


def test_a_forward_asks_for_no_number(model_dir, monkeypatch):
    trained = on_meta(model_dir("qwen2"), True, monkeypatch)
    names = ("log_probs", "entropy", "sum_pi_squared", "top_log_probs", "top_ids", "top_rest")
    with torch.no_grad():
        found = trained.compute(given(), names, 0.7, 3)
    assert {value.device.type for value in found.values()} == {"meta"}


def test_metrics_are_read_as_they_are():
    metrics = {"a": torch.tensor(0.1), "b": torch.tensor(3), "c": torch.tensor(0.1).double() / 3}

    assert {name: float(value) for name, value in metrics.items()} == numbers_of(metrics)
    assert numbers_of({}) == {}
