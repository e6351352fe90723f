"""A run that trains adapters: what it saves, what is exported."""

from __future__ import annotations

import pytest

from tests.conftest import TINY
from tests.runtime.whole_checkpoints import load_checkpoint
from tests.runtime.whole_runs import ADAPTED

pytestmark = pytest.mark.torch


def test_an_export_is_a_plain_model_with_the_adapters_in_it(rlflow, train, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    run = train(ADAPTED, "together")
    assert 0 == rlflow("export", run, "-o", tmp_path / "model").code

    start, found = (
        dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
        for path in (TINY, tmp_path / "model")
    )
    saved = load_checkpoint(run / "checkpoints").components["actor"]
    assert all(name.endswith(("lora_A", "lora_B")) for name in saved)
    assert start.keys() == found.keys()
    for name, before in start.items():
        layer = name.removesuffix(".weight")
        expected = before.detach()
        if f"{layer}.lora_A" in saved:
            expected = expected + 4 * saved[f"{layer}.lora_B"] @ saved[f"{layer}.lora_A"]
        assert torch.allclose(expected, found[name], atol=1e-6), name
    changed = [name for name in start if not torch.equal(start[name], found[name])]
    assert {"q_proj", "down_proj"} == {name.split(".")[-2] for name in changed}
