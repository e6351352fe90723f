"""Writes the tokenizer, the config and the image processor of a tiny model that sees; no weights.

    python pipelines/assets/build_shapes_tiny.py

It is a Qwen2.5-VL in which one token is one character, and a picture of 32 x 32 pixels 16 tokens.
`warm_up_shapes.py` beside it trains the weights. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import string
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = (
    *("<pad>", "<eos>", "<unk>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
ALPHABET = string.ascii_lowercase + string.digits + "? "
CONTEXT = 128
HIDDEN, SEEN = 64, 48
PATCH, MERGED = 4, 2


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE without merges: one token per character of the alphabet."""
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    characters = ALPHABET.replace(" ", space)
    vocab = {token: number for number, token in enumerate((*SPECIAL, *characters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """What `AutoTokenizer` needs beside `tokenizer.json`."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        **dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=False)),
        "model_max_length": CONTEXT,
        "padding_side": "left",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def model_config() -> dict[str, Any]:
    """A `Qwen2_5_VLConfig`: two layers that read and two that see, float32."""
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "dtype": "float32",
        "tie_word_embeddings": True,
        "image_token_id": SPECIAL.index("<|image_pad|>"),
        "video_token_id": SPECIAL.index("<|video_pad|>"),
        "vision_start_token_id": SPECIAL.index("<|vision_start|>"),
        "vision_end_token_id": SPECIAL.index("<|vision_end|>"),
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "vocab_size": len(SPECIAL) + len(ALPHABET),
            "hidden_size": HIDDEN,
            "intermediate_size": 3 * HIDDEN,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
            },
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": SPECIAL.index("<eos>"),
            "pad_token_id": SPECIAL.index("<pad>"),
        },
        "vision_config": {
            "model_type": "qwen2_5_vl_vision",
            "depth": 2,
            "hidden_size": SEEN,
            "intermediate_size": 2 * SEEN,
            "num_heads": 3,
            "patch_size": PATCH,
            "spatial_merge_size": MERGED,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "window_size": 8 * PATCH,
            "fullatt_block_indexes": [0, 1],
            "out_hidden_size": HIDDEN,
        },
    }


def processor_config() -> dict[str, Any]:
    """What the image processor is set to: pictures as they are, of up to 64 x 64 pixels."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGED,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (2 * PATCH * MERGED) ** 2, "longest_edge": 64 * 64},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def write(out: Path) -> None:
    """Write the files into `out`, which is made; weights already there stay."""
    out.mkdir(parents=True, exist_ok=True)
    texts = {
        "tokenizer.json": build_tokenizer().to_str(pretty=True),
        "tokenizer_config.json": json.dumps(tokenizer_config(), indent=2),
        "config.json": json.dumps(model_config(), indent=2),
        "preprocessor_config.json": json.dumps(processor_config(), indent=2),
    }
    for name, text in texts.items():
        (out / name).write_text(text + "\n", encoding="utf-8", newline="\n")


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "shapes-tiny")
    args = parser.parse_args()
    write(args.out)
    sys.stdout.write(f"wrote {args.out}\n")


if __name__ == "__main__":
    main()
