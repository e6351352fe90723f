"""Models that take pictures, on text alone: packed rows and tokens are the model's own."""

from __future__ import annotations

import pytest
import torch
import transformers

from rlflow.engines.hf.checking import plain_outputs
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from tests.architectures.tiny import tiny_config
from tests.engines.examples import engine, one_step, rows
from tests.engines.test_latent import generated

pytestmark = pytest.mark.torch


@pytest.mark.rows(1)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "mistral3", "internvl"])
def test_text_alone_trains_the_language_model(family, tmp_path):
    """Loading compares packed rows with the model's own; a step leaves the part that sees."""
    torch.manual_seed(0)
    config = tiny_config(family)
    plain = transformers.AutoModelForImageTextToText.from_config(config)
    plain.save_pretrained(tmp_path)
    made = engine(str(tmp_path), 40, torch.float32, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in made.model.module.named_parameters()}
    one_step(made, rows())

    changed = {n for n, p in made.model.module.named_parameters() if not torch.equal(p, before[n])}
    assert any("language_model" in name for name in changed)
    assert not any("vision" in name or "visual" in name for name in changed)


@pytest.mark.slow
def test_greedy_tokens_are_the_models_own(tmp_path):
    torch.manual_seed(0)
    plain = transformers.AutoModelForImageTextToText.from_config(tiny_config("qwen2_5_vl")).eval()
    plain.save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype=torch.float32, device="cpu")
    prompt, row = [3, 1, 4, 1, 5], [3, 1, 4, 1, 5]
    for _ in range(9):
        logits = plain(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1]
        row = [*row, int(logits.argmax())]

    assert [row[len(prompt) :]] == generated(TorchRollout(model), prompts=[prompt])
    assert plain_outputs(plain, model.config, "lm").shape[1] == 64
