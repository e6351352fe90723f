"""Tiny models of each family that sees: files with random weights, and pictures."""

from __future__ import annotations

import io
import json
import string
from pathlib import Path

import numpy as np

GRIDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
PATCH = 4
KINDS = ("qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "mistral3")
SPECIAL = (
    *("<pad>", "<eos>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    *("[IMG_BREAK]", "[IMG_END]"),
)
PART, VIDEO, OPEN, CLOSE = 2, 3, 4, 5
# As published tokenizers spell them, by which engines find them.
SPELLED = {
    "mistral3": {PART: "[IMG]"},
    "internvl": {PART: "<IMG_CONTEXT>", VIDEO: "<video>", OPEN: "<img>", CLOSE: "</img>"},
}
ALPHABET = string.ascii_lowercase + string.digits + " ?\n:"
VOCABULARY = 64
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
# A feed-forward width that SGLang cuts over two ranks on a CPU, without filling it up.
GRID = {
    "intermediate_size": 64, "hidden_size": 16, "num_heads": 2,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
SQUARE = {
    "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
PROCESSORS = {
    "qwen2_5_vl": "Qwen2VLImageProcessor",
    "qwen3_vl": "Qwen2VLImageProcessor",
    "qwen3_vl_moe": "Qwen2VLImageProcessor",
    "gemma3": "Gemma3ImageProcessor",
    "internvl": "GotOcr2ImageProcessor",
    "mistral3": "PixtralImageProcessor",
}
SIZES = {
    "gemma3": {"size": {"height": 16, "width": 16}},
    "internvl": {"size": {"height": 16, "width": 16}, "max_patches": 3, "crop_to_patches": False},
    "mistral3": {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}},
}  # fmt: skip


def grid_sizes(patch):
    """Settings of the processor of a grid with patches of `patch` pixels a side."""
    size = {"shortest_edge": 4 * patch**2, "longest_edge": 64 * patch**2}
    return {"size": size, "patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}


def seeing_config(kind, patch=PATCH, layers=2):
    """The config of a tiny model of a family; grids have patches of `patch` pixels a side."""
    import transformers

    turned = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
    ends = {"vision_start_token_id": OPEN, "vision_end_token_id": CLOSE, "video_token_id": 3}
    text = TEXT | {"num_hidden_layers": layers}
    if kind == "qwen2_5_vl":
        seen = {"window_size": 4 * patch, "fullatt_block_indexes": [1]}
        vision = GRID | {"depth": 2, "patch_size": patch, **seen}
        text["rope_parameters"], more = turned, {"image_token_id": PART, **ends}
    elif kind in ("qwen3_vl", "qwen3_vl_moe"):
        seen = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        vision = GRID | {"depth": 3, "patch_size": patch, **seen}
        text |= {"rope_parameters": turned | {"mrope_interleaved": True}, "head_dim": 8}
        if kind == "qwen3_vl_moe":
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        more = {"image_token_id": PART, **ends}
    elif kind == "gemma3":
        vision = SQUARE
        text |= {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
        text["layer_types"] = ["sliding_attention", "full_attention"]
        more = {"image_token_index": PART, "boi_token_index": OPEN, "eoi_token_index": CLOSE}
        more["mm_tokens_per_image"] = 4
    elif kind == "internvl":
        vision = SQUARE | {"image_size": [16, 16], "patch_size": [4, 4]}
        text["model_type"] = "qwen2"
        more = {"image_token_id": PART, "image_seq_length": 4, "downsample_ratio": 0.5}
    else:
        vision = SQUARE | {"model_type": "pixtral", "image_size": 32, "head_dim": 8}
        # What Mistral 3 is published with, and transformers' default is not.
        vision["hidden_act"] = "silu"
        text |= {"model_type": "mistral", "head_dim": 8}
        more = {"image_token_index": PART, "spatial_merge_size": 2, "vision_feature_layer": -1}
    made = transformers.CONFIG_MAPPING[kind]
    return made(text_config=text, vision_config=vision, tie_word_embeddings=False, **more)


def special_tokens(kind):
    """The special tokens by number; a family calls some of them otherwise."""
    names = SPELLED.get(kind, {})
    return tuple(names.get(number, token) for number, token in enumerate(SPECIAL))


def write_tokenizer(path, kind):
    """A tokenizer of a token a character, with the marks of pictures."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = special_tokens(kind)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(ALPHABET)
    spelled = "".join(dict.fromkeys("".join(part for part, _ in letters)))
    vocab = {token: number for number, token in enumerate((*special, *spelled))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    opened = f"{special[OPEN]}{special[PART]}{special[CLOSE]}"
    mark = {"gemma3": special[OPEN]}.get(kind, opened if "qwen" in kind else special[PART])
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE.replace("MARK", mark),
    }
    if kind == "internvl":
        named = {"start_image_token": OPEN, "end_image_token": CLOSE, "context_image_token": PART}
        named["video_token"] = VIDEO
        said["extra_special_tokens"] = {name: special[number] for name, number in named.items()}
    (path / "tokenizer_config.json").write_text(json.dumps(said))


def write_seeing(path, kind, seed=0, patch=PATCH, layers=2):
    """The files of a tiny model of a family, with random weights; its path as text.

    Grids have patches of `patch` pixels a side; text passes so many `layers`.
    """
    import torch
    import transformers

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    plain = transformers.AutoModelForImageTextToText.from_config(seeing_config(kind, patch, layers))
    with torch.no_grad():
        for parameter in plain.parameters():
            # Wide enough that what a picture shows changes what is said of it.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    plain.save_pretrained(path)
    sizes = grid_sizes(patch) if kind in GRIDS else SIZES[kind]
    settings = {"image_processor_type": PROCESSORS[kind], **sizes}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    write_tokenizer(path, kind)
    return str(path)


def picture(width, height, seed):
    """A picture of noise as a PNG file."""
    from PIL import Image

    drawn = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(drawn).save(file, "PNG")
    return file.getvalue()
