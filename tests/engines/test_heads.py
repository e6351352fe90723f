"""Value heads: read as transformers does, in every form that the field keeps, or refused."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rlflow.batch import lengths
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine
from rlflow.engines.hf.writing import save_model
from rlflow.errors import UsageError
from rlflow.ops.bodies.steps.batchwise import scored
from tests.engines import reward_models as made
from tests.engines import sharded_heads as heads
from tests.engines.examples import rows

pytestmark = pytest.mark.torch


def load(path, **more):
    return load_model(str(path), dtype=torch.float32, device="cpu", head="value", **more)


def scores(model, batch):
    longer = scored(batch)
    engine = TrainEngine(model, None, micro_tokens=None)
    values = engine.forward(longer, outputs=("values",), temperature=1.0)["values"]
    return values[lengths(longer["response_tokens"]).cumsum(0) - 1]


def close(expected, found):
    assert expected.std() > 0.01
    assert torch.allclose(expected, found, atol=1e-5, rtol=1e-4), (expected, found)


@pytest.mark.rows(4)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("kind", ["score", "tokens"])
def test_classifiers_score_as_in_transformers_and_go_back(tmp_path, family, kind):
    plain = made.classifier(tmp_path / "rm", family, kind)
    batch = rows()

    model = load(tmp_path / "rm", fresh_head=False)
    save_model(model, str(tmp_path / "again"))
    maker = getattr(transformers, f"AutoModelFor{made.KIND[kind]}")
    again, report = maker.from_pretrained(tmp_path / "again", output_loading_info=True)

    last = (0,) if kind == "score" else (0, -1)
    expected = made.expected_scores(lambda t: plain(t).logits[(*last, 0)], batch)
    close(expected, scores(model, batch))
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.config.num_labels == 1
    mine, theirs = plain.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    assert [] == [name for name, value in mine.items() if not torch.equal(value, theirs[name])]


@pytest.mark.rows(4)
@pytest.mark.parametrize("name", ["v_head.summary", "v_head", "value_head", "rm_head", "judge.out"])
@pytest.mark.parametrize("bias", [True, False])
def test_heads_of_other_names_are_read_and_written_back(tmp_path, name, bias):
    tensors = made.linear(name, bias)
    plain = made.with_head(tmp_path, "qwen2", tensors)
    batch = rows()

    model = load(tmp_path, fresh_head=False)
    save_model(model, str(tmp_path / "again"))

    def score(tokens):
        hidden = plain.model(input_ids=tokens).last_hidden_state[0, -1]
        return hidden @ tensors[f"{name}.weight"][0] + (tensors[f"{name}.bias"][0] if bias else 0)

    close(made.expected_scores(score, batch), scores(model, batch))
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(tensor, written[key]) for key, tensor in tensors.items())
    causal = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(plain(torch.tensor([[3, 5]])).logits, causal(torch.tensor([[3, 5]])).logits)


def test_two_layers_as_in_qwen_math_rm(tmp_path):
    plain = made.with_head(tmp_path, "qwen2", made.MATH_RM, "Qwen2ForRewardModel")
    batch = rows()

    model = load(tmp_path, fresh_head=False)
    save_model(model, str(tmp_path / "again"))

    close(made.expected_scores(made.math_rm_score(plain), batch), scores(model, batch))
    assert torch.equal(scores(model, batch), scores(load(tmp_path / "again"), batch))
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert ["Qwen2ForRewardModel"] == config["architectures"]


ARMO = {
    **made.linear("regression_layer", bias=False, out=19),
    **made.linear("gating.layers.0", out=8),
    "reward_transform_matrix": torch.eye(19),
}


@pytest.mark.parametrize(
    ("tensors", "architecture", "message"),
    [
        ({}, None, "E524.*holds no head"),
        (ARMO, "LlamaForRewardModelWithGating", "E525(.|\n)*gating.layers.0.weight"),
        (made.MATH_RM, "Qwen2ForSomethingElse", r"E525(.|\n)*score.0.weight \[32, 32\]"),
        (made.linear("score", out=5), None, "E525.*gives 5 numbers"),
        ({**made.linear("score.0"), **made.linear("score.2", out=2, into=1)}, None, "E525.*2 num"),
        (made.linear("score", into=8), None, r"E525(.|\n)*score.weight \[1, 8\]"),
        ({**made.linear("a"), **made.linear("b")}, None, "E525(.|\n)*a.weight"),
        ({**made.linear("score"), "mean": torch.ones(1)}, None, "E525(.|\n)*mean"),
    ],
    ids=["none", "armo", "unknown-mlp", "labels", "process", "width", "two", "normalised"],
)
def test_what_cannot_be_scored_is_refused(tmp_path, tensors, architecture, message):
    made.with_head(tmp_path, "llama", tensors, architecture)

    with pytest.raises(UsageError, match=message):
        load(tmp_path, fresh_head=False)


def test_a_fresh_head_is_written_as_transformers_keeps_one_with_a_bias(model_dir, tmp_path):
    model, batch = load(model_dir("llama")), rows()
    assert 0 == scores(model, batch).abs().max()
    with torch.no_grad():
        for parameter in model.module.value_head.parameters():
            parameter.normal_()

    save_model(model, str(tmp_path))
    tokens = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path)

    expected = made.expected_scores(lambda t: tokens(t).logits[0, -1, 0], batch)
    close(expected, scores(model, batch))
    assert torch.equal(scores(model, batch), scores(load(tmp_path, fresh_head=False), batch))


def test_random_weights_that_nothing_trains_have_a_random_head(model_dir):
    first, again = (load(model_dir("llama"), init="random", fresh_head=False) for _ in range(2))
    close(scores(first, rows()), scores(again, rows()))
    assert 0 == scores(load(model_dir("llama"), init="random"), rows()).abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 2)], ids=["fsdp2", "tp2"])
def test_shards_score_as_the_whole(shape, world, tmp_path):
    made.classifier(tmp_path / "rm", "llama")
    made.with_head(tmp_path / "math", "qwen2", made.MATH_RM, "Qwen2ForRewardModel")
    for name in ("rm", "math"):
        assert all(world(2).run(heads.scores_are_equal, str(tmp_path / name), shape, "weights"))
    assert all(world(2).run(heads.scores_are_equal, str(tmp_path / "rm"), shape, "random"))
    made.with_head(tmp_path / "none", "llama", {})
    assert all(world(2).run(heads.refused, str(tmp_path / "none"), shape))
