"""Tiny random models on disk, and rows of tokens for them."""

from __future__ import annotations

import pytest

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_config(family, layers=2):
    import transformers

    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=96,
            bos_token_id=None, eos_token_id=None, initializer_range=0.3,
        )  # fmt: skip
    kinds = {
        "llama": (transformers.LlamaConfig, {}),
        "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
        "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
        "mistral": (transformers.MistralConfig, {"sliding_window": 5}),
        "gemma2": (transformers.Gemma2Config, {"head_dim": 16, "sliding_window": 5}),
        "cohere": (transformers.CohereConfig, {"logit_scale": 0.25}),
        "granite": (transformers.GraniteConfig, {"logits_scaling": 4.0}),
        "gptoss": (
            transformers.GptOssConfig,
            {"head_dim": 16, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
    }
    kind, more = kinds[family]
    # Weights this wide make attention matter to the logits.
    sizes = SIZES | {"num_hidden_layers": layers}
    return kind(**sizes, **more, initializer_range=0.3)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """A function from a family's name, and layers, to a directory with a tiny random model."""
    import torch
    import transformers

    made = {}

    def make(family, layers=2):
        if (family, layers) not in made:
            path = tmp_path_factory.mktemp("models") / family
            torch.manual_seed(len(family))
            config = make_config(family, layers)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
            made[family, layers] = str(path)
        return made[family, layers]

    return make


@pytest.fixture
def exact_softmax(monkeypatch):
    """Keep float64 in the softmax of transformers' eager attention."""
    import torch

    real = torch.nn.functional.softmax

    def softmax(x, dim=None, dtype=None, **more):
        return real(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype, **more)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)


@pytest.fixture(scope="session")
def world():
    """A function from a number of ranks to processes that run functions together."""
    from tests.engines.ranks import World

    made = {}

    def ranks(size):
        if size not in made or not made[size].alive:
            made[size] = World(size)
        return made[size]

    yield ranks
    for group in made.values():
        group.close()
