"""Widths of public models, as their `config.json` files say, and how many parameters follow.

For plans of models that are not on this machine: `--model-shape qwen2.5-7b`. Knows no files.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.errors import Finding, UsageError, near_names
from rlflow.modelfiles.widths import Widths

PREFIX = "shape:"
QWEN_VOCAB, LLAMA_VOCAB = 151_936, 128_256


def _qwen25(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int = 152_064
) -> Widths:
    """Qwen2.5 (Yang et al. 2024): heads of 128 but in the smallest; tied up to 3B."""
    return Widths(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=vocab,
        context=32_768,
        tied=vocab == QWEN_VOCAB,
        biases=True,
    )


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool = False) -> Widths:
    """Qwen3, dense (Yang et al. 2025): 8 key-value heads, heads of 128, norms by head."""
    return Widths(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        ffn=ffn,
        vocab=QWEN_VOCAB,
        context=40_960,
        tied=tied,
        head_norms=True,
    )


def _llama(layers: int, hidden: int, heads: int, ffn: int, *, tied: bool = False) -> Widths:
    """Llama 3.1 and 3.2 (Grattafiori et al. 2024): 8 key-value heads."""
    return Widths(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=LLAMA_VOCAB,
        context=131_072,
        tied=tied,
    )


_MISTRAL = Widths(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=14_336,
    vocab=32_768,
    context=32_768,
)
_DISTILLED_1_5B = Widths(
    layers=28,
    hidden=1536,
    heads=12,
    kv_heads=2,
    head_dim=128,
    ffn=8960,
    vocab=QWEN_VOCAB,
    context=131_072,
    biases=True,
)


def _qwen3_moe(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> Widths:
    """Qwen3 with 128 experts in each layer, of which a token takes 8 (Yang et al. 2025)."""
    return replace(
        _qwen3(layers, hidden, heads, ffn),
        kv_heads=kv_heads,
        experts=128,
        chosen=8,
        expert_ffn=ffn,
    )


_MIXTRAL = replace(_MISTRAL, vocab=32_000, experts=8, chosen=2, expert_ffn=14_336)
# Liu et al., "DeepSeek-V3" (arXiv:2412.19437), section 4.2, without the layer that predicts ahead.
_DEEPSEEK_V3 = Widths(
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    head_dim=64,
    ffn=18_432,
    vocab=129_280,
    context=163_840,
    experts=256,
    chosen=8,
    expert_ffn=2048,
    shared_ffn=2048,
    dense=3,
    latent=512,
    query_rank=1536,
    rope_dim=64,
    nope_dim=128,
    value_dim=128,
)


def _gpt_oss(layers: int, experts: int) -> Widths:
    """GPT-OSS (OpenAI 2025, arXiv:2508.10925): biases everywhere, a sink for each head."""
    return Widths(
        layers=layers,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        ffn=2880,
        vocab=201_088,
        context=131_072,
        all_biases=True,
        extra=64,
        experts=experts,
        chosen=4,
        expert_ffn=2880,
        expert_biases=True,
    )


# GLM-4.5 (arXiv:2508.06471), table 1, without the layer that predicts ahead.
_GLM_4_5 = Widths(
    layers=92,
    hidden=5120,
    heads=96,
    kv_heads=8,
    head_dim=128,
    ffn=12_288,
    vocab=151_552,
    context=131_072,
    biases=True,
    head_norms=True,
    experts=160,
    chosen=8,
    expert_ffn=1536,
    shared_ffn=1536,
    dense=3,
)
# Llama 4 Scout (Meta 2025): one expert of 16 and a shared one in every layer.
_LLAMA_4_SCOUT = Widths(
    layers=48,
    hidden=5120,
    heads=40,
    kv_heads=8,
    head_dim=128,
    ffn=8192,
    vocab=202_048,
    context=10_485_760,
    experts=16,
    chosen=1,
    expert_ffn=8192,
    shared_ffn=8192,
)

KNOWN: dict[str, Widths] = {
    "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, QWEN_VOCAB),
    "qwen2.5-1.5b": _qwen25(28, 1536, 12, 2, 8960, QWEN_VOCAB),
    "qwen2.5-3b": _qwen25(36, 2048, 16, 2, 11_008, QWEN_VOCAB),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18_944),
    "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 13_824),
    "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 27_648),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29_568),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600),
    "llama-3.1-8b": _llama(32, 4096, 32, 14_336),
    "llama-3.1-70b": _llama(80, 8192, 64, 28_672),
    "llama-3.2-1b": _llama(16, 2048, 32, 8192, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 24, 8192, tied=True),
    "mistral-7b": _MISTRAL,
    "deepseek-r1-distill-qwen-1.5b": _DISTILLED_1_5B,
    "deepseek-r1-distill-qwen-7b": replace(_qwen25(28, 3584, 28, 4, 18_944), context=131_072),
    "deepseek-r1-distill-qwen-14b": replace(_qwen25(48, 5120, 40, 8, 13_824), context=131_072),
    "deepseek-r1-distill-qwen-32b": replace(_qwen25(64, 5120, 40, 8, 27_648), context=131_072),
    "deepseek-r1-distill-llama-8b": _llama(32, 4096, 32, 14_336),
    "deepseek-r1-distill-llama-70b": _llama(80, 8192, 64, 28_672),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 4, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 4, 1536),
    "mixtral-8x7b": _MIXTRAL,
    "deepseek-v3": _DEEPSEEK_V3,
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "glm-4.5": _GLM_4_5,
    "llama-4-scout": _LLAMA_4_SCOUT,
}

# Mixtures of experts, and their families; the others are dense.
KINDS = {
    "qwen3-30b-a3b": "qwen3_moe",
    "qwen3-235b-a22b": "qwen3_moe",
    "mixtral-8x7b": "mixtral",
    "deepseek-v3": "deepseek_v3",
    "gpt-oss-20b": "gpt_oss",
    "gpt-oss-120b": "gpt_oss",
    "glm-4.5": "glm4_moe",
    "llama-4-scout": "llama4",
}


def known_model_type(name: str) -> str:
    """The family of a public model, as its config.json calls it; empty for a dense one."""
    return KINDS.get(name, "")


def known_widths(name: str) -> Widths:
    """The widths of a public model. Raises UsageError (E231) for a name that is not known."""
    if name not in KNOWN:
        raise UsageError(_unknown(name))
    return KNOWN[name]


def _unknown(name: str) -> Finding:
    return Finding(
        code="E231",
        what=f"no model shape {name!r} is known",
        expected=", ".join(KNOWN),
        near=near_names(name, list(KNOWN)),
    )


def parse_model_shape(text: str, models: tuple[str, ...]) -> dict[str, str]:
    """What `--model-shape` says, by model: one name for all, or `model=name` pairs.

    `qwen2.5-7b,critic=qwen2.5-1.5b` gives the critic another shape than the rest. Raises
    UsageError, with all of a kind, for a spelling, a model that the graph has not or that is
    named twice, a shape that is not known.
    """
    pairs = [tuple(word.strip() for word in part.partition("=")) for part in text.split(",")]
    if any(not left or (given and not right) for left, given, right in pairs):
        raise UsageError(_misspelled(text, "is no shape, nor model=shape"))
    found = {left: right for left, given, right in pairs if given}
    rest = [left for left, given, _ in pairs if not given]
    if len(found) + min(len(rest), 1) < len(pairs):
        raise UsageError(_misspelled(text, "gives a model two shapes"))
    names = dict.fromkeys(right or left for left, _, right in pairs)
    wrong = [_unknown(name) for name in names if name not in KNOWN]
    wrong += [
        Finding(
            code="E232",
            what=f"--model-shape {text!r}: the graph has no model {name!r}",
            expected=", ".join(models),
            near=near_names(name, models),
        )
        for name in found
        if name not in models
    ]
    if wrong:
        raise UsageError(*wrong)
    return dict.fromkeys(models, rest[0]) | found if rest else found


def _misspelled(text: str, how: str) -> Finding:
    return Finding(
        code="E233",
        what=f"--model-shape {text!r} {how}",
        expected="a shape for all models, and others for some: model=shape",
        fix="--model-shape qwen2.5-7b,critic=qwen2.5-1.5b",
    )
