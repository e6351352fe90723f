"""What rlflow computes of which family of models: one table, which plans and engines read.

A family is `model_type` in config.json. Those that are not in the table are judged by what their
config says, and the engines compare what they compute with the model's own forward in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rlflow.errors import Finding
from rlflow.modelfiles.configs import COUNTS, deep_layers, text_config, text_value

PACKED_LAYERS = {"full_attention", "sliding_attention"}
# What layers of a `hybrid` model are called besides.
CARRYING_LAYERS = {"linear_attention", "conv", "hybrid", "moe", "mlp", "mamba", "attention"}
# `full` and sliding windows are packed, and so is `latent`, multi-head latent attention (MLA);
# `hybrid` models have layers that carry a state from token to token, computed row by row;
# `state` layers that carry or pick something from row to row, `own` attention that transformers
# does not let another take the place of, `encoder` an encoder or a part of an encoder-decoder.
# Of `none` transformers makes no causal language model.
Attention = Literal["full", "latent", "hybrid", "state", "own", "encoder", "none"]
# How experts are kept: `apart` one by one in files and fused in memory, `fused` in both.
Experts = Literal["none", "apart", "fused"]
# How a family sees pictures; `modelfiles.pictures.sights` says what these are.
Sees = Literal["", "grid", "rows", "soft", "tiles"]
# Why one rank alone can hold a model: it has `buffers` and other parts that loading by shards does
# not fill, its `layers` are not found one by one, or its `experts` were never compared over ranks.
Alone = Literal["", "buffers", "layers", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a family has: its attention, its experts, who can hold it, and what its layers are.

    `cut` says whether `tp` can cut it, `alone` why several ranks cannot hold it, `dispatched`
    whether tokens can go to experts on other ranks, `staged` whether layers can be cut into stages
    of a pipeline, `parted` whether ranks can have some heads each of layers that carry states.
    Sizes follow from the rest: `gated` feed-forward layers have three matrices; `norms` counts
    those of a layer as wide as it, and 0 are norms without weights; with `shifts` norms have
    biases. `biases` are those of the projections to queries, keys and values (`qkv`, and by
    `attention_bias` where `asked`), to the layer too (`attention`, `asked_all`), or of the
    feed-forward layer as well (`all`). `head_norms` norm queries and keys by head (`each`) or all
    heads together (`wide`). `tied` is whether the head is the embedding where a config is silent. A
    model that is not `counted` has more than these; its files say how much. `sees` is how it sees,
    and so many of the first layers are `deep`: a tower adds to what they make (arXiv:2406.04334).
    """

    attention: Attention = "full"
    experts: Experts = "none"
    cut: bool = True
    layers: str = ""
    """Layers that cannot be packed, as config.json calls them."""
    alone: Alone = ""
    dispatched: bool = False
    staged: bool = False
    parted: bool = False
    gated: bool = True
    norms: int = 2
    shifts: bool = False
    biases: Literal["qkv", "asked", "attention", "asked_all", "all"] = "asked_all"
    head_norms: Literal["", "each", "wide"] = ""
    tied: bool = False
    counted: bool = True
    sees: Sees = ""
    deep: int = 0


DENSE = Family(staged=True)
WHOLE = replace(DENSE, cut=False)
TIED = replace(DENSE, tied=True)
OLDER = replace(
    WHOLE, staged=False, biases="all", shifts=True, gated=False, tied=True, counted=False
)
MIXED = replace(WHOLE, experts="apart", dispatched=True)
# Experts that compute in a way of their own.
UNSENT = replace(MIXED, dispatched=False)
FUSED = replace(WHOLE, experts="fused")
LATENT = Family(attention="latent", staged=True)
LATENT_MIXED = replace(LATENT, experts="apart", dispatched=True)
HYBRID = Family(attention="hybrid", cut=False, staged=True, counted=False)
HYBRID_MIXED = replace(HYBRID, experts="apart", dispatched=True)
PARTED, PARTED_MIXED = (replace(each, parted=True) for each in (HYBRID, HYBRID_MIXED))
STATE = Family(attention="state", cut=False, layers="linear_attention", counted=False)
SEEING = replace(WHOLE, staged=False, counted=False)
CUT_SEEING = replace(SEEING, cut=True, staged=True)
SEEING_MIXTURE = replace(CUT_SEEING, experts="fused", dispatched=True)
OWN = Family(attention="own", cut=False, counted=False)
ENCODER = Family(attention="encoder", cut=False, counted=False)
NONE = Family(attention="none", cut=False, counted=False)


def _each(names: str, family: Family) -> dict[str, Family]:
    return dict.fromkeys(names.split(), family)


FAMILIES: dict[str, Family] = {
    # Dense, cut by tensor parallelism.
    **_each("llama mistral ministral ministral3 internlm3 iquestcoder cwm helium granite", DENSE),
    **_each("ernie4_5 gemma vaultgemma smollm3", TIED),
    **_each("arcee", replace(DENSE, gated=False)),
    **_each("cohere cohere2", replace(TIED, norms=1)),
    **_each("qwen2", replace(DENSE, biases="qkv")),
    **_each("qwen3 exaone4", replace(DENSE, head_norms="each")),
    **_each("gemma2", replace(TIED, norms=4)),
    **_each("gemma3_text", replace(TIED, norms=4, head_norms="each")),
    **_each("gemma4_unified_text", replace(TIED, counted=False)),
    **_each("seed_oss", replace(DENSE, biases="asked")),
    **_each("hyperclovax", replace(DENSE, norms=4)),
    **_each("olmo", replace(DENSE, norms=0)),
    **_each("nanochat", replace(DENSE, norms=0, gated=False)),
    **_each("nemotron", replace(DENSE, gated=False, shifts=True)),
    **_each("starcoder2", replace(TIED, gated=False, shifts=True, biases="all")),
    **_each("jais2", replace(DENSE, gated=False, shifts=True, biases="all")),
    **_each("gpt_neox", replace(DENSE, gated=False, shifts=True, biases="all")),
    **_each("phi", replace(DENSE, gated=False, shifts=True, biases="all", norms=1, counted=False)),
    # Dense, whole or by `fsdp`.
    **_each("phi3", WHOLE), **_each("olmo2 olmo3", replace(WHOLE, head_norms="wide")),
    **_each("stablelm", replace(WHOLE, shifts=True)),
    **_each("glm", replace(WHOLE, biases="asked")),
    **_each("glm4", replace(WHOLE, biases="asked", norms=4)),
    **_each("hunyuan_v1_dense", replace(WHOLE, head_norms="each")),
    **_each("gpt2 gpt-sw3 gpt_bigcode opt biogpt persimmon", OLDER),
    **_each("bitnet granite_swa", replace(WHOLE, counted=False)),
    **_each("gemma4_text moshi modernbert-decoder", replace(WHOLE, staged=False, counted=False)),
    # Dense, on one rank.
    **_each("apertus", replace(WHOLE, alone="buffers", gated=False, counted=False)),
    **_each("ctrl", replace(OLDER, alone="layers")),
    **_each("gemma4 gemma4_unified phi4_multimodal fuyu",
            replace(WHOLE, alone="buffers", tied=True, counted=False)),
    # Models that see.
    **_each("qwen2_5_vl", replace(CUT_SEEING, sees="grid", biases="qkv")),
    **_each("qwen3_vl", replace(CUT_SEEING, sees="grid", head_norms="each")),
    **_each("qwen3_vl_moe", replace(SEEING_MIXTURE, sees="grid", head_norms="each")),
    **_each("mistral3", replace(CUT_SEEING, sees="rows")),
    **_each("internvl", replace(CUT_SEEING, sees="tiles")),
    **_each("gemma3", replace(CUT_SEEING, sees="soft", tied=True, norms=4, head_norms="each")),
    # Models that see, on text alone.
    **_each("qwen2_vl", SEEING), **_each("llava", replace(SEEING, alone="buffers")),
    # Mixtures of experts.
    **_each("mixtral", replace(MIXED, cut=True)),
    **_each("qwen2_moe", replace(MIXED, cut=True, biases="qkv")),
    **_each("qwen3_moe", replace(MIXED, cut=True, head_norms="each")),
    **_each("granitemoe solar_open", MIXED), **_each("aria_text", UNSENT),
    **_each("olmoe flex_olmo", replace(MIXED, head_norms="wide")),
    **_each("phimoe", replace(MIXED, shifts=True)),
    **_each("ernie4_5_moe", replace(MIXED, tied=True, counted=False)),
    **_each("mellum", replace(MIXED, head_norms="each")),
    **_each("minimax_m2", replace(MIXED, head_norms="wide")),
    **_each("glm4_moe", replace(MIXED, biases="asked")),
    **_each("cohere2_moe", replace(MIXED, tied=True, norms=1)),
    **_each("hunyuan_v1_moe granitemoeshared granitemoe_swa afmoe beam dots1 exaone_moe flint"
            " hy_v3 kolibri1 laguna mimo_v2_flash",
            replace(MIXED, counted=False)),
    **_each("minimax_m3_vl_text", replace(UNSENT, counted=False)),
    **_each("gpt_oss", replace(FUSED, biases="attention")),
    **_each("jetmoe", replace(FUSED, tied=True, counted=False)),
    # Latent attention.
    **_each("deepseek_v2 deepseek_v3 glm4_moe_lite", LATENT_MIXED),
    **_each("axk1", replace(LATENT_MIXED, counted=False)),
    **_each("longcat_flash", replace(LATENT_MIXED, alone="experts", counted=False)),
    **_each("minicpm3 youtu", replace(LATENT, tied=True)),
    # Layers that carry something from token to token, or pick tokens.
    **_each("olmo_hybrid lfm2 lfm3", PARTED),
    **_each("mamba2 bamba", replace(HYBRID, staged=False)),
    **_each("qwen3_5 qwen3_5_text", replace(PARTED, cut=True)),
    **_each("falcon_h1", replace(HYBRID, alone="buffers")),
    **_each("nemotron_h lfm2_moe granitemoehybrid", PARTED_MIXED),
    **_each("bailing_hybrid", HYBRID_MIXED),
    **_each("kimi_linear", replace(HYBRID_MIXED, alone="experts")),
    **_each("qwen3_next qwen3_5_moe qwen3_5_moe_text", replace(PARTED_MIXED, cut=True)),
    # Selective scans of transformers that begin with a state of zeros alone.
    **_each("mamba falcon_mamba", replace(STATE, layers="mamba")),
    **_each("jamba", replace(STATE, layers="mamba", experts="apart")),
    **_each("recurrent_gemma xlstm", STATE),
    **_each("hrm_text", replace(STATE, layers="layers that are passed several times")),
    **_each("zamba zamba2 zaya", replace(STATE, layers="hybrid")),
    **_each("minimax", replace(STATE, experts="apart")),
    **_each("llama4 llama4_text", replace(STATE, experts="fused", layers="chunked_attention")),
    **_each("glm_moe_dsa deepseek_v32 axk2 dots3_note dots3_note_text hy_v4 qwen4_exp"
            " qwen4_exp_text",
            replace(STATE, experts="apart", layers="indexed_attention")),
    **_each("deepseek_v4", replace(STATE, experts="apart", layers="compressed_sparse_attention")),
    # Attention in code of its own, or with more than queries, keys and values.
    **_each("bloom falcon gptj mpt rwkv codegen gpt_neo gpt_neox_japanese openai-gpt cpmant"
            " reformer xglm xlnet blt doge diffllama inkling_text inkling2_text gemma3n"
            " gemma3n_text gemma4_assistant gemma4_unified_assistant cohere_compass_text got_ocr2"
            " moss_transcribe_diarize", OWN),
    # Encoders, and parts of models with one.
    **_each("bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small"
            " camembert data2vec-text electra ernie git marian mbart megatron-bert musicgen"
            " musicgen_melody mvp pegasus plbart prophetnet rembert roberta roberta-prelayernorm"
            " roc_bert roformer trocr whisper xlm xlm-roberta xlm-roberta-xl xmod", ENCODER),
    # Known to transformers as language models, and not made of what their files say.
    **_each("emu3 mllama dbrx mistral4", NONE),
}  # fmt: skip


SEEN_BY = tuple(sorted(name for name, family in FAMILIES.items() if family.sees))


def family_of(config: Mapping[str, Any]) -> Family:
    """What the model of a config has, by its family or by what the config says."""
    text, outer = text_config(config), FAMILIES.get(str(config.get("model_type")))
    inner = FAMILIES.get(str(text.get("model_type")))
    if text is not config and outer is None:
        return NONE
    if outer is not None and outer.sees and inner is not None:
        outer = _seeing(outer, inner)
    known = replace(outer, deep=deep_layers(config)) if outer is not None else inner
    others = sorted(set(text.get("layer_types") or ()) - PACKED_LAYERS)
    experts = experts_in(text)
    if known is not None and known.attention == "hybrid" and CARRYING_LAYERS.issuperset(others):
        return known
    if others and (known is None or known.attention in ("full", "hybrid", "state")):
        base = known or Family(experts="apart" if experts else "none")
        return replace(base, attention="state", layers=", ".join(others))
    if known is not None:
        return known
    latent = bool(text.get("kv_lora_rank"))
    return replace(
        DENSE,
        attention="latent" if latent else "full",
        experts="apart" if experts else "none",
        cut=not experts and not latent,
        alone="experts" if experts else "",
        # A public model that is known by its widths alone names no family.
        staged=not config.get("model_type") and not experts,
    )


def _seeing(outer: Family, text: Family) -> Family:
    """A family that sees, with the language model of another one."""
    alike = {name: getattr(text, name) for name in ("biases", "norms", "shifts", "head_norms")}
    cut = outer.cut and text.cut and text.experts == "none"
    return replace(outer, cut=cut, staged=outer.staged and text.staged, **alike)


def experts_in(config: Mapping[str, Any]) -> int:
    """How many experts a layer chooses from; 0 where there are none."""
    found = text_value(config, *COUNTS)
    return found if found > 1 else 0


def packing_finding(path: str, family: Family) -> Finding | None:
    """E503 where packed rows would be computed wrongly; None where they are not.

    E501 where transformers has no causal language model for the config.
    """
    if family.attention in ("full", "latent", "hybrid"):
        return None
    if family.attention == "none":
        return Finding(
            code="E501",
            what=f"model {path!r} cannot be loaded as a language model",
            got="a config of which transformers makes no causal language model",
            expected="a causal language model that transformers knows, with safetensors weights",
        )
    why = {
        "own": ("attention in code of its own", "attention that transformers lets be replaced"),
        "encoder": ("an encoder, or a part of a model with one", "a decoder by itself"),
        "state": (family.layers, "attention layers only: " + ", ".join(sorted(PACKED_LAYERS))),
    }
    got, expected = why[family.attention]
    what = "has layers that carry state from row to row when packed"
    return cannot_be_packed(
        path, what if family.attention == "state" else "cannot be packed", got, expected
    )


def cannot_be_packed(path: str, what: str, got: str, expected: str = "") -> Finding:
    """E503: a model that cannot be packed."""
    return Finding(code="E503", what=f"model {path!r} {what}", got=got, expected=expected)


def undrafted(name: str) -> Finding:
    """E598: layers that carry states, which cannot forget tokens that a drafter proposed."""
    return Finding(
        code="E598",
        what=f"{name} carries states from token to token, and takes no token back",
        expected="attention layers only, of a model and of its drafter",
        fix="ops.rollout(...) without drafter=",
    )


def sharding_finding(
    path: str, family: Family, experts: int = 0, fsdp: int = 1, tp: int = 1
) -> Finding | None:
    """E526, E523 or E515 where several ranks cannot hold a model; None where they can.

    Each of `fsdp` times `tp` ranks has whole experts of a layer, and as many as any other.
    """
    if family.alone:
        return _alone_finding(path, family)
    if experts % (fsdp * tp) == 0:
        return None
    divisors = [ranks for ranks in range(1, experts + 1) if experts % ranks == 0]
    nearest = max(ranks for ranks in divisors if ranks <= fsdp)
    what = f"fsdp={fsdp} does" if tp == 1 else f"fsdp={fsdp} times tp={tp} does"
    return Finding(
        code="E526",
        what=f"{what} not divide the experts of model {path!r}",
        got=f"{experts} experts a layer, of which each rank has as many",
        expected=f"one of {', '.join(map(str, divisors))}; other devices hold replicas",
        fix=f"rf.on(..., fsdp={nearest})" if tp == 1 else f"rf.on(..., fsdp=1, tp={tp})",
    )


def dispatch_finding(
    path: str, family: Family, experts: int, ep: int, fsdp: int, tp: int = 1
) -> Finding | None:
    """E533 where tokens of a model cannot go to experts on `ep` of `fsdp` ranks; None where so.

    Ranks along `ep` are among those along `fsdp`; each has as many of the experts that its `tp`
    rank has of a layer.
    """
    if ep == 1:
        return None
    what, fix = f"ep={ep}: model {path!r} has no experts to share out", "rf.on(..., ep=1)"
    if not experts:
        return Finding(code="E533", what=what, got="a dense model", fix=fix)
    if not family.dispatched:
        what = f"ep={ep}: tokens of model {path!r} cannot go to experts on other ranks"
        got = "a family of mixtures whose experts compute otherwise, or were never compared"
        return Finding(code="E533", what=what, got=got, fix=fix)
    if fsdp % ep == 0 and experts % (ep * tp) == 0:
        return None
    works = [n for n in range(1, fsdp + 1) if fsdp % n == 0 and experts % (n * tp) == 0] or [1]
    undivided = f"the {experts} experts of a layer" if fsdp % ep == 0 else f"fsdp={fsdp}"
    undivided += f" over tp={tp}" if fsdp % ep == 0 and tp > 1 else ""
    nearest = min(works, key=lambda n: (abs(n - ep), n))
    return Finding(
        code="E533",
        what=f"ep={ep} does not divide {undivided} of model {path!r}",
        got=f"{experts} experts a layer, fsdp={fsdp}" + (f", tp={tp}" if tp > 1 else ""),
        expected=f"one of {', '.join(map(str, works))}: ranks along ep are among those along fsdp",
        fix=f"rf.on(..., ep={nearest})",
    )


def _alone_finding(path: str, family: Family) -> Finding:
    if family.alone == "buffers":
        what = f"model {path!r} has parts beside its layers that only loading it whole fills"
        return Finding(code="E523", what=what, fix="rf.on(..., fsdp=1, tp=1)")
    if family.alone == "experts":
        return Finding(
            code="E526",
            what=f"the experts of model {path!r} cannot be shared out over ranks",
            got="a family of mixtures that was never compared over ranks, on several devices",
            expected="one device for each use of the model",
            fix='rf.Placement(pools={"one": 1}, ...)',
        )
    return Finding(
        code="E515",
        what=f"model {path!r} has no list of decoder layers, to be shared out one by one",
        fix="rf.on(..., fsdp=1, tp=1)",
    )


def cutting_finding(path: str, family: Family, kind: str) -> Finding | None:
    """E521 where tensor parallelism cannot cut a model; None where it can, or nobody knows."""
    if family.alone in ("buffers", "layers"):
        return _alone_finding(path, family)
    if family.cut:
        return None
    got = "experts" if family.experts != "none" else "no plan of which all is known"
    return uncut(path, kind, got)


def sequence_finding(path: str, family: Family) -> Finding | None:
    """E530 where the ranks of `tp` cannot share a model's tokens; None where they can."""
    if family.experts != "none":
        return unshared_sequence(path, "experts")
    if family.attention == "full":
        return None
    return unshared_sequence(path, f"{family.attention} attention, with weights")


def unshared_sequence(path: str, got: str) -> Finding:
    """E530: a model whose tokens the ranks of `tp` cannot share."""
    return Finding(
        code="E530",
        what=f"the ranks of tp= cannot share the tokens of model {path!r}",
        got=f"{got} in a block that every rank computes whole",
        expected="attention and feed-forward layers of which each rank has a part (no mixture)",
        fix="rf.on(..., sequence=False)",
    )


def uncut(path: str, kind: str, got: str, expected: str = "") -> Finding:
    """E521: an architecture that nobody says how to cut."""
    return Finding(
        code="E521",
        what=f"model {path!r} ({kind}) cannot be shared out by tensor parallelism",
        got=got,
        expected=expected,
        fix="rf.on(..., tp=1, fsdp=...)",
    )
