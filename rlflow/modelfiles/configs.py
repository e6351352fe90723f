"""Reading `config.json`: values by any of their names, of the text part where there are several."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlflow.errors import Finding, UsageError

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
INSIDE = ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
CONTEXT = ("max_position_embeddings", "n_positions")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# What a model has at least one of, and what it may have none of.
POSITIVE = (*HIDDEN, *HEADS, *LAYERS, "vocab_size", "num_key_value_heads", "head_dim", *CONTEXT)
COUNTED = (
    *(*INSIDE, *COUNTS, "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"),
    *("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size"),
    *("n_shared_experts", "moe_num_shared_experts", "first_k_dense_replace", "num_dense_layers"),
    *("moe_layer_start_index", "decoder_sparse_step", "kv_lora_rank", "q_lora_rank"),
    *("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
)
# No model is larger; what counts by layers or widths ends in time.
MOST, MOST_LAYERS = 2**40, 10_000
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_config(directory: Path) -> dict[str, Any]:
    """What a model's `config.json` says.

    Raises UsageError (E205) where that is not JSON, or where a size is none.
    """
    path = directory / "config.json"
    try:
        found = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(Finding(code="E205", what=f"{path} is not JSON: {error}")) from None
    if not isinstance(found, dict):
        raise UsageError(Finding(code="E205", what=f"{path} is no JSON object"))
    _check_values(found, path)
    return found


def _check_values(config: Mapping[str, Any], path: Path) -> None:
    """Raise UsageError (E205) for a value of the language model that nothing can be made of."""
    text = text_config(config)
    # A family may have two kinds of norms, and one of them alone; one without a number is none.
    normed = any(text.get(name) is not None for name in EPSILONS)
    for name, value in text.items():
        values = value if isinstance(value, list) else [value]
        if value is None and (normed or name not in EPSILONS):
            continue
        if name in POSITIVE or name in COUNTED:
            least, most = int(name in POSITIVE), MOST_LAYERS if name in LAYERS else MOST
            good = bool(values) and all(_whole(each) and least <= each <= most for each in values)
            expected = f"a whole number from {least} to {most:,}"
        elif name in TOKENS:
            good = all(map(_whole, values))
            expected = "the number of a token, or a list of such"
        elif name in EPSILONS:
            good = isinstance(value, int | float) and 0 <= value < 1
            expected = "a number from 0 to 1"
        elif name == "model_type":
            good, expected = isinstance(value, str), "the name of a family"
        else:
            continue
        if not good:
            raise _no_value(path, name, value, expected)


def _whole(value: object) -> bool:
    return isinstance(value, int | float) and value == value // 1 and not isinstance(value, bool)


def _no_value(path: Path, name: str, value: object, expected: str) -> UsageError:
    what = f"{path}: {name} is not what a model can have"
    return UsageError(Finding(code="E205", what=what, got=f"{value!r:.80}", expected=expected))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that describes the language model, of a model that is more than one."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def text_value(config: Mapping[str, Any], *names: str) -> int:
    """A number by the first of its names that is there; 0 where none is."""
    text = text_config(config)
    return next((_number(text[name]) for name in names if text.get(name) is not None), 0)


def _number(value: Any) -> int:
    """A number; the largest where a config says one for each layer."""
    return max(map(int, value), default=0) if isinstance(value, list) else int(value)


def required(config: Mapping[str, Any], path: Path) -> Callable[..., int]:
    """A function that gives a number by the first of its names; UsageError (E205) for none."""

    def get(*names: str) -> int:
        for name in names:
            if config.get(name) is not None:
                return _number(config[name])
        raise UsageError(
            Finding(
                code="E205",
                what=f"{path} has no {' or '.join(names)}",
                expected="the config.json of a Hugging Face causal language model",
            )
        )

    return get


def deep_layers(config: Mapping[str, Any]) -> int:
    """To how many of the first layers of text a tower adds what its own layers make."""
    return len((config.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
