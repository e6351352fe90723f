"""The loss of a micro-batch is computed on the device of the model's outputs."""

from __future__ import annotations

import pytest
import torch

from rlflow.batch import make_batch, ragged
from rlflow.ops.bodies import update
from rlflow.ops.losses.losses import PolicyLoss
from rlflow.ops.math.aggregate import Totals

pytestmark = pytest.mark.torch


def test_fields_of_the_host_go_where_the_outputs_are(monkeypatch):
    """`meta` stands for an accelerator: what stays on the host could not meet its tensors."""
    seen = {}

    def objective(spec, outputs, batch, totals):
        seen.update({**outputs, **batch})
        return outputs["log_probs"].sum(), {}

    monkeypatch.setattr(update.pkgutil, "resolve_name", lambda name: objective)
    sizes = torch.tensor([2, 3])
    rows = make_batch(
        {
            "response_tokens": ragged(torch.zeros(5, dtype=torch.int64), sizes),
            "response_mask": ragged(torch.ones(5, dtype=torch.bool), sizes),
            "advantages": torch.ones(2),
        },
        2,
    )
    loss = update.loss_function(PolicyLoss("ppo_clip"), Totals(tokens=5.0, rows=2.0))
    loss({"log_probs": torch.zeros(5, device="meta")}, rows)
    assert {"log_probs", "response_mask", "advantages"} == set(seen)
    assert {"meta"} == {value.device.type for value in seen.values()}
