from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rlflow.batch import make_batch, ragged_rows
from rlflow.engines.hf import checking
from rlflow.engines.hf.loading import load_model, load_tokenizer
from rlflow.engines.hf.train import TrainEngine
from rlflow.engines.hf.writing import save_model
from rlflow.errors import RunError, UsageError

pytestmark = pytest.mark.torch


def load(path, **more):
    return load_model(path, dtype=torch.float32, device="cpu", **more)


def log_probs(model):
    fields = {
        "prompt_tokens": ragged_rows([[1, 2, 3], [4, 5]], torch.int64),
        "response_tokens": ragged_rows([[6, 7], [8, 9, 10]], torch.int64),
    }
    engine = TrainEngine(model, None, micro_tokens=None)
    return engine.forward(make_batch(fields, 2), outputs=("log_probs",), temperature=1.0)[
        "log_probs"
    ]


def test_offloading_frees_the_storage_and_brings_it_back(model_dir):
    model = load(model_dir("qwen2"))
    expected = log_probs(model)
    size = sum(p.numel() * 4 for p in model.module.parameters())
    assert size == model.num_bytes()
    model.sleep()
    assert all(p.untyped_storage().nbytes() == 0 for p in model.module.parameters())
    with pytest.raises(RunError, match=r"E506.*asleep"):
        log_probs(model)
    with pytest.raises(RunError, match="E506"):
        model.named_tensors()
    with pytest.raises(RunError, match="E506"):
        model.sleep()
    model.wake()
    model.wake()
    assert torch.equal(expected, log_probs(model))


def test_after_discard_only_new_weights_make_it_whole(model_dir):
    model, other = load(model_dir("qwen2")), load(model_dir("qwen2"))
    expected = log_probs(model)
    model.sleep("discard")
    with pytest.raises(RunError, match="discarded"):
        model.load_tensors(other.named_tensors(), 3)
    model.wake()
    with pytest.raises(RunError, match="no weights"):
        log_probs(model)
    model.load_tensors(other.named_tensors(), 3)
    assert torch.equal(expected, log_probs(model))
    assert 3 == model.version


def test_weights_that_do_not_fit_change_nothing(model_dir):
    model = load(model_dir("qwen2"))
    before = {name: t.clone() for name, t in model.named_tensors().items()}
    wrong = {name: t + 1 for name, t in before.items()}
    wrong["model.norm.weigth"] = wrong.pop("model.norm.weight")
    wrong["model.embed_tokens.weight"] = torch.zeros(2, 2)
    with pytest.raises(RunError) as caught:
        model.load_tensors(wrong, 1)
    text = str(caught.value)
    assert "did you mean 'model.norm.weight'" in text
    assert "(2, 2)" in text
    assert "missing: model.norm.weight" in text
    assert all(torch.equal(before[name], t) for name, t in model.named_tensors().items())
    assert 0 == model.version


def test_tied_weights_appear_once_and_stay_tied(model_dir):
    model = load(model_dir("qwen2"))
    assert "lm_head.weight" not in model.named_tensors()
    module = model.module
    assert module.lm_head.weight is module.model.embed_tokens.weight
    load_into = {name: torch.zeros_like(t) for name, t in model.named_tensors().items()}
    model.load_tensors(load_into, 1)
    assert 0 == module.lm_head.weight.abs().max()


def test_random_weights_are_a_function_of_the_seed(model_dir, tmp_path):
    shutil.copy(f"{model_dir('qwen2')}/config.json", tmp_path)
    state = torch.get_rng_state()
    first, again, other = (load(str(tmp_path), init="random", seed=s) for s in (4, 4, 5))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(log_probs(first), log_probs(again))
    assert not torch.equal(log_probs(first), log_probs(other))


def test_a_saved_model_loads_again_here_and_in_transformers(model_dir, tmp_path):
    model = load(model_dir("qwen2"))
    save_model(model, str(tmp_path))
    written = set(load_file(tmp_path / "model.safetensors"))
    assert "lm_head.weight" not in written, "tied weights are written once"
    assert set(model.named_tensors()) == written
    assert torch.equal(log_probs(model), log_probs(load(str(tmp_path))))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, expected in model.named_tensors().items():
        assert torch.equal(expected, plain.get_parameter(name))


def test_a_directory_without_weights_says_how_to_start_at_random(model_dir, tmp_path):
    shutil.copy(f"{model_dir('qwen2')}/config.json", tmp_path)
    with pytest.raises(UsageError, match=r'E507(.|\n)*init="random"'):
        load(str(tmp_path))


def test_a_path_that_is_not_there_names_its_neighbours(tmp_path):
    (tmp_path / "arith-tiny").mkdir()
    with pytest.raises(UsageError, match=r"E501(.|\n)*arith-tiny"):
        load(str(tmp_path / "arith-tini"))
    with pytest.raises(UsageError, match=r"no config\.json"):
        load(str(tmp_path / "arith-tiny"))


def test_damaged_weights_are_refused(model_dir, tmp_path):
    shutil.copytree(model_dir("qwen2"), tmp_path, dirs_exist_ok=True)
    blob = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(blob[:100])
    with pytest.raises(UsageError, match="E501"):
        load(str(tmp_path))


def test_weights_that_lack_a_tensor_are_refused(model_dir, tmp_path):
    from safetensors.torch import save_file

    shutil.copytree(model_dir("qwen2"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"E507(.|\n)*layers\.1\.mlp\.up_proj"):
        load(str(tmp_path))


def test_layers_with_a_running_state_are_refused(model_dir, tmp_path):
    shutil.copytree(model_dir("qwen2"), tmp_path, dirs_exist_ok=True)
    config = transformers.MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="E503"):
        load(str(tmp_path), init="random")


def test_attention_that_cannot_be_packed_is_refused(tmp_path):
    transformers.BloomConfig(
        vocab_size=32, hidden_size=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    ).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"(?s)E503.*code of its own"):
        load(str(tmp_path), init="random")


@pytest.mark.parametrize("way", ["packed", "packed in rows", "decoded"])
def test_a_model_that_computes_something_else_is_refused(way, model_dir, monkeypatch):
    name = "decoded_outputs" if way == "decoded" else "packed_outputs"
    real = getattr(checking, name)

    def wrong(*args):
        off = way == "decoded" or (args[3] == 0) == (way == "packed in rows")
        return real(*args) * (1.001 if off else 1)

    monkeypatch.setattr(checking, name, wrong)
    with pytest.raises(UsageError, match=f"E504.*rows are {way}\n"):
        load(model_dir("qwen2"))


def test_the_check_sees_rows_that_leak_into_each_other(model_dir, monkeypatch):
    from rlflow.engines.hf.forward import packed

    real = packed.np.tril
    monkeypatch.setattr(packed.np, "tril", lambda sees: real(packed.np.ones_like(sees)))
    with pytest.raises(UsageError, match="E504"):
        load(model_dir("qwen2"))


def tokenizer_dir(path, **more):
    tokens = {"<eos>": 0, "a": 1, "b": 2}
    model = {"type": "WordLevel", "vocab": tokens, "unk_token": "a"}
    content = {"version": "1.0", "model": model, "added_tokens": []}
    (path / "tokenizer.json").write_text(json.dumps(content))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", **more}
    (path / "tokenizer_config.json").write_text(json.dumps(kind))
    return str(path)


def test_a_tokenizer_needs_an_eos_token(model_dir, tmp_path):
    # Qwen2 and GPT-2 tokenizers bring an EOS of their own; a generic one does not.
    shutil.copy(f"{model_dir('mistral')}/config.json", tmp_path)
    with pytest.raises(UsageError, match="E502") as caught:
        load_tokenizer(tokenizer_dir(tmp_path))
    assert "tokenizer_config.json" in str(caught.value)
    assert 0 == load_tokenizer(tokenizer_dir(tmp_path, eos_token="<eos>")).eos_token_id
