"""Files of a model with anything in them are read, or refused by name: never an error of ours."""

from __future__ import annotations

import json
import struct

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, example, given, settings

from tests.budget import examples
from tests.conftest import TINY

CONFIG = json.loads((TINY / "config.json").read_text())
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-2, 9), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
MORE = (
    "head_dim",
    "num_experts",
    "num_local_experts",
    "kv_lora_rank",
    "text_config",
    "quantization_config",
)
PIPELINE = """import rlflow as rf
from rlflow import ops


def right(response: str, answer: str) -> float:
    return float(response == answer)


@rf.pipeline()
def fuzzed(cfg: rf.Config):
    actor = rf.Model("actor", {path!r}, optimizer=rf.AdamW(lr=1e-4))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=4)
    reward = ops.reward(right, samples)
    loss = rf.PolicyLoss("ppo_clip")
    ops.update(actor, samples, ops.advantage("grpo", samples, reward), loss=loss)
"""
fuzzed = settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def model(tmp_path):
    """A directory of a model that has a config alone, and a pipeline that trains it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (tmp_path / "fuzzed.py").write_text(PIPELINE.format(path=str(directory)))
    return directory


def said(rlflow, directory, command="plan"):
    """What a command says of the pipeline; never an error of rlflow's own."""
    result = rlflow(command, directory.parent / "fuzzed.py")
    assert "E900" not in result.err, result.err
    assert "E901" not in result.err, result.err
    return result


def test_the_files_as_they_are_are_planned(rlflow, model):
    (model / "config.json").write_text(json.dumps(CONFIG))
    assert said(rlflow, model).code == 0


@fuzzed
@given(name=st.sampled_from([*CONFIG, *MORE]), value=VALUES)
@example(name="model_type", value=[])
def test_any_value_of_a_config(rlflow, model, name, value):
    (model / "config.json").write_text(json.dumps({**CONFIG, name: value}))
    said(rlflow, model)


@fuzzed
@given(st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_a_config(rlflow, model, content):
    (model / "config.json").write_bytes(content)
    assert said(rlflow, model).code != 0


HEADERS = st.binary(max_size=40) | st.one_of(
    VALUES, st.dictionaries(st.text(max_size=3), VALUES, max_size=2)
).map(lambda value: framed(json.dumps(value).encode()))


def framed(header):
    return struct.pack("<Q", len(header)) + header


@fuzzed
@given(HEADERS)
def test_any_bytes_as_weights(rlflow, model, content):
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").write_bytes(content)
    said(rlflow, model)


@fuzzed
@given(
    VALUES
    | st.fixed_dictionaries(
        {
            "weight_map": VALUES
            | st.dictionaries(st.text(max_size=3), st.text(max_size=8), max_size=2)
        }
    )
)
def test_any_index_of_weights(rlflow, model, content):
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors.index.json").write_text(json.dumps(content))
    said(rlflow, model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "x"}, "hidden_size is not what a model can have"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is not what a model can have"),
        ({"num_attention_heads": 0}, "num_attention_heads is not what a model can have"),
        ({"vocab_size": None}, "has no vocab_size"),
        ({"rms_norm_eps": None}, "rms_norm_eps is not what a model can have"),
        ({"eos_token_id": "a"}, "eos_token_id is not what a model can have"),
        ({"hidden_size": 2, "head_dim": None}, "more heads than a layer is wide"),
    ],
)
def test_what_is_wrong_is_named(rlflow, model, change, words):
    (model / "config.json").write_text(json.dumps({**CONFIG, **change}))
    result = said(rlflow, model, "check")
    assert "error[E205]" in result.err
    assert words in result.err


def test_an_index_does_not_lead_out_of_its_directory(rlflow, model):
    (model / "config.json").write_text(json.dumps(CONFIG))
    away = {"weight_map": {"model.norm.weight": "../../etc/weights.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(away))
    assert "names a file outside of its directory" in said(rlflow, model).err
