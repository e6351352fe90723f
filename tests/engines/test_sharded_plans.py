"""How layers are cut: by the model's own plan, by the family's, or not at all."""

from __future__ import annotations

import pytest
import torch

from rlflow.engines.hf import loading
from rlflow.engines.hf.sharded.tensor_parallel import layer_roles
from rlflow.engines.hf.weights.skeletons import skeleton
from rlflow.errors import UsageError
from tests.engines import sharded_states as states
from tests.engines.conftest import make_config

pytestmark = pytest.mark.torch


def roles(config, head="lm"):
    with loading.quiet_transformers():
        module = skeleton("a model", config, head, torch.float32)
    return layer_roles(module, config, "a model")


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_familys_plan_is_the_models_own(family, head, monkeypatch):
    config = make_config(family)
    own = roles(config, head)

    monkeypatch.setattr(type(config), "base_model_tp_plan", None)

    assert own == roles(config, head)
    prefix = "model" if head == "lm" else "body"
    assert own[f"{prefix}.layers.1.self_attn.k_proj"] == "columns"
    assert own[f"{prefix}.layers.0.mlp.down_proj"] == "rows"
    assert own[f"{prefix}.embed_tokens"] == "vocabulary"
    assert ("lm_head" in own) == (head == "lm")
    assert (f"{prefix}.layers.0.self_attn.q_norm" in own) == (family == "qwen3")


def test_a_way_of_cutting_that_is_not_known_is_refused(monkeypatch):
    config = make_config("llama")
    plan = {"layers.*.mlp.gate_proj": "sideways"}
    monkeypatch.setattr(type(config), "base_model_tp_plan", plan)

    with pytest.raises(UsageError, match=r"E521(.|\n)*sideways(.|\n)*colwise"):
        roles(config)


@pytest.mark.rows(1)
@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 1)])
def test_a_faster_forward_that_differs_on_one_rank_is_taken_back_on_all(shape, world, model_dir):
    found = world(2).run(states.wrong_forward_on_the_first_rank, model_dir("qwen3"), shape)

    assert [True, True] == found
