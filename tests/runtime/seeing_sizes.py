"""Configs of models that see, as wide as published ones and of few layers; without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engines.seeing import GRIDS, PROCESSORS, seeing_config, write_tokenizer

# Widths of the config.json of Qwen2.5-VL-7B, Qwen3-VL-8B, Gemma 3 4B, InternVL3-8B and Mistral
# Small 3.1 24B. `text` and `vision`, and what is beside them.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {
            **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 4},
            **{"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064},
            "rope_parameters": {
                **{"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
            },
        },
        {
            **{"depth": 8, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
            **{"patch_size": 14, "window_size": 112, "out_hidden_size": 3584},
            "fullatt_block_indexes": [3, 7],
        },
        {},
    ),
    "qwen3_vl": (
        {
            **{"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
            "vocab_size": 151936,
            "rope_parameters": {
                **{"rope_type": "default", "mrope_section": [24, 20, 20], "rope_theta": 5e6},
                "mrope_interleaved": True,
            },
        },
        {
            **{"depth": 8, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16},
            **{"patch_size": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096},
            "deepstack_visual_indexes": [2, 4, 6],
        },
        {},
    ),
    "gemma3": (
        {
            **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 4},
            **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
            **{"vocab_size": 262208, "sliding_window": 1024, "query_pre_attn_scalar": 256},
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        },
        {
            **{"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 8},
            **{"num_attention_heads": 16, "image_size": 896, "patch_size": 14},
        },
        {"mm_tokens_per_image": 256, "tie_word_embeddings": True},
    ),
    "internvl": (
        {
            **{"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 4},
            **{"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 151674},
        },
        {
            **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8},
            **{"num_attention_heads": 16, "image_size": [448, 448], "patch_size": [14, 14]},
        },
        {"image_seq_length": 256},
    ),
    "mistral3": (
        {
            **{"hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 4},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
            "vocab_size": 131072,
        },
        {
            **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8},
            **{"num_attention_heads": 16, "head_dim": 64, "image_size": 1540, "patch_size": 14},
        },
        {},
    ),
}
# Settings of their image processors.
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma3": {"size": {"height": 896, "width": 896}},
    "internvl": {"size": {"height": 448, "width": 448}, "max_patches": 12},
    "mistral3": {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
}


def write_published(path: Path, kind: str) -> str:
    """Config, settings and a tokenizer of a family's published widths; the path as text."""
    text, vision, beside = PUBLISHED[kind]
    said = seeing_config(kind).to_dict()
    # What transformers derives of the number of layers it derives anew.
    derived = ("layer_types", "max_window_layers", "rope_parameters", "head_dim")
    kept = {name: value for name, value in said["text_config"].items() if name not in derived}
    said["text_config"] = {**kept, "max_position_embeddings": 32768, **text}
    said["vision_config"] |= vision
    made = type(seeing_config(kind))(**said | beside)
    path.mkdir(parents=True)
    made.save_pretrained(path)
    settings = {"image_processor_type": PROCESSORS[kind], **SETTINGS.get(kind, {})}
    if kind in GRIDS:
        size = {"shortest_edge": 56 * 56, "longest_edge": 12845056}
        settings |= {"size": size, "patch_size": vision["patch_size"]}
        settings |= {"temporal_patch_size": 2, "merge_size": 2}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    write_tokenizer(path, kind)
    return str(path)
