"""Tiny reward models on disk, in the forms that the field keeps them in."""

from __future__ import annotations

import json

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests.engines.conftest import make_config

KIND = {"score": "SequenceClassification", "tokens": "TokenClassification"}


def one_label(family, labels=1):
    config = make_config(family)
    config.num_labels = labels
    return config


def classifier(path, family, kind="score", labels=1):
    """A model saved by transformers, and itself."""
    torch.manual_seed(3)
    maker = getattr(transformers, f"AutoModelFor{KIND[kind]}")
    # Later versions choose this by themselves for a model with a soft cap.
    made = maker.from_config(one_label(family, labels), attn_implementation="eager").eval()
    for parameter in (made.score if hasattr(made, "score") else made.classifier).parameters():
        nn.init.normal_(parameter)
    made.save_pretrained(path)
    return made


def with_head(path, family, tensors, architecture=None, model="AutoModelForCausalLM"):
    """A model saved as a causal one, with more tensors beside."""
    torch.manual_seed(4)
    plain = getattr(transformers, model).from_config(make_config(family)).eval()
    plain.save_pretrained(path)
    file = path / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    if architecture is not None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return plain


def linear(name, bias=True, out=1, into=32):
    torch.manual_seed(5)
    found = {f"{name}.weight": torch.randn(out, into)}
    return {**found, f"{name}.bias": torch.randn(out)} if bias else found


MATH_RM = {**linear("score.0", out=32), **linear("score.2")}


def math_rm_score(plain):
    """What Qwen2.5-Math-RM makes of a row: a linear layer, ReLU, a linear layer."""
    first, second = nn.Linear(32, 32), nn.Linear(32, 1)
    first.load_state_dict({k[8:]: v for k, v in MATH_RM.items() if k.startswith("score.0")})
    second.load_state_dict({k[8:]: v for k, v in MATH_RM.items() if k.startswith("score.2")})
    head = nn.Sequential(first, nn.ReLU(), second)
    return lambda tokens: head(body_of(plain)(input_ids=tokens).last_hidden_state)[0, -1, 0]


def body_of(plain):
    return plain.base_model


def expected_scores(score, batch):
    """Of every whole row, one at a time."""
    prompts, responses = batch["prompt_tokens"].unbind(), batch["response_tokens"].unbind()
    with torch.no_grad():
        return torch.stack(
            [score(torch.cat(pair)[None]) for pair in zip(prompts, responses, strict=True)]
        )
