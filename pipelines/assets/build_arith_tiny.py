"""Writes the tokenizer and the config of a tiny Qwen2-style language model; no weights.

    python pipelines/assets/build_arith_tiny.py
    python pipelines/assets/build_arith_tiny.py --layers 4 --hidden 256 --out /tmp/arith-4x256

One token is one character. The same arguments give the same bytes. This file knows
neither how the model is trained nor what its text means.
"""

from __future__ import annotations

import argparse
import json
import string
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<eos>", "<unk>")
ALPHABET = string.digits + "+-*/=().,:? " + string.ascii_lowercase
CONTEXT = 128
HEADS, KV_HEADS = 4, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] }}: {{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else ' ' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE without merges: one token per character of the alphabet.

    Decoding joins the characters without spaces, so text of the alphabet comes back
    exactly. Any other character is left out: `transformers` loads the tokenizer of every
    Qwen2 model as a byte-level BPE, whatever the file says, and that has no unknown token.
    """
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
        **dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True)),
        "model_max_length": CONTEXT,
        "padding_side": "left",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": CHAT_TEMPLATE,
    }


def model_config(layers: int, hidden: int, intermediate: int) -> dict[str, Any]:
    """A `Qwen2Config`: 4 heads on 2 key-value heads, embeddings tied, float32."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(SPECIAL) + len(ALPHABET),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": SPECIAL.index("<eos>"),
        "pad_token_id": SPECIAL.index("<pad>"),
    }


def write(out: Path, layers: int, hidden: int, intermediate: int) -> None:
    """Write the three files into `out`, which is made; weights already there stay."""
    out.mkdir(parents=True, exist_ok=True)
    config = model_config(layers, hidden, intermediate)
    texts = {
        "tokenizer.json": build_tokenizer().to_str(pretty=True),
        "tokenizer_config.json": json.dumps(tokenizer_config(), indent=2),
        "config.json": json.dumps(config, indent=2),
    }
    for name, text in texts.items():
        (out / name).write_text(text + "\n", encoding="utf-8", newline="\n")


def main() -> None:
    """Parse the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--intermediate", type=int, help="default: 3 times hidden")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "arith-tiny")
    args = parser.parse_args()
    if args.layers < 1 or args.hidden < 1 or args.hidden % (2 * HEADS):
        parser.error(f"--layers must be at least 1 and --hidden a multiple of {2 * HEADS}")
    write(args.out, args.layers, args.hidden, args.intermediate or 3 * args.hidden)
    sys.stdout.write(f"wrote {args.out}\n")


if __name__ == "__main__":
    main()
