"""What rlflow computes of which family of models: one table, which plans and engines read.

A family is `model_type` in config.json. Those that are not in the table are judged by what their
config says, and the engines compare what they compute with the model's own forward in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlflow.errors import Finding
from rlflow.modelfiles.configs import text_config, text_value

# `full` and sliding windows are packed; `latent` is multi-head latent attention (MLA, DeepSeek-V2),
# `state` layers that carry or pick something from row to row, `own` attention that transformers
# does not let another take the place of.
Attention = Literal["full", "latent", "state", "own"]
# How experts are kept: `apart` one by one in files and fused in memory, `fused` in both.
Experts = Literal["none", "apart", "fused"]

PACKED_LAYERS = {"full_attention", "sliding_attention"}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a family has: its attention, its experts, and whether `tp` can cut it."""

    attention: Attention = "full"
    experts: Experts = "none"
    cut: bool = True
    layers: str = ""
    """Layers that cannot be packed, as config.json calls them."""


DENSE = Family()


def _each(names: str, family: Family) -> dict[str, Family]:
    return dict.fromkeys(names.split(), family)


FAMILIES: dict[str, Family] = {
    **_each(
        "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text olmo cohere cohere2 starcoder2 granite"
        " smollm3 exaone4 ernie4_5 seed_oss nemotron phi gpt_neox",
        DENSE,
    ),
    **_each("phi3 olmo2 olmo3 stablelm glm glm4 hunyuan_v1_dense opt gpt2", Family(cut=False)),
    **_each("bloom falcon gptj mpt rwkv", Family(attention="own", cut=False)),
    **_each(
        "mixtral qwen2_moe qwen3_moe olmoe phimoe granitemoe glm4_moe ernie4_5_moe hunyuan_v1_moe"
        " dots1 flex_olmo minimax_m2",
        Family(experts="apart", cut=False),
    ),
    **_each("gpt_oss jetmoe", Family(experts="fused", cut=False)),
    **_each(
        "deepseek_v2 deepseek_v3 glm4_moe_lite longcat_flash",
        Family(attention="latent", experts="apart", cut=False),
    ),
    **_each("minicpm3", Family(attention="latent", cut=False)),
    **_each("mamba mamba2 bamba falcon_h1 recurrent_gemma olmo_hybrid lfm2 qwen3_5_text qwen3_5",
            Family(attention="state", cut=False, layers="linear_attention")),
    **_each(
        "qwen3_next jamba granitemoehybrid zamba2 nemotron_h minimax kimi_linear lfm2_moe",
        Family(attention="state", experts="apart", cut=False, layers="linear_attention"),
    ),
    **_each("llama4 llama4_text",
            Family(attention="state", experts="fused", cut=False, layers="chunked_attention")),
    **_each("glm_moe_dsa deepseek_v32",
            Family(attention="state", experts="apart", cut=False, layers="indexed_attention")),
}  # fmt: skip


def family_of(config: Mapping[str, Any]) -> Family:
    """What the model of a config has, by its family or by what the config says."""
    text = text_config(config)
    known = FAMILIES.get(str(text.get("model_type")))
    others = sorted(set(text.get("layer_types") or ()) - PACKED_LAYERS)
    if others:
        base = known or Family(experts="apart" if experts_in(text) else "none")
        return Family(
            attention="state", experts=base.experts, cut=base.cut, layers=", ".join(others)
        )
    if known is not None:
        return known
    experts = experts_in(text)
    return Family(
        attention="latent" if text.get("kv_lora_rank") else "full",
        experts="apart" if experts else "none",
        cut=not experts and not text.get("kv_lora_rank"),
    )


def experts_in(config: Mapping[str, Any]) -> int:
    """How many experts a layer chooses from; 0 where there are none."""
    found = text_value(config, *COUNTS)
    return found if found > 1 else 0


def packing_finding(path: str, family: Family) -> Finding | None:
    """E503 where packed rows would be computed wrongly; None where they are not."""
    if family.attention == "full":
        return None
    why = {
        "latent": ("multi-head latent attention", "keys as wide as values"),
        "own": ("attention in code of its own", "attention that transformers lets be replaced"),
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


def sharding_finding(path: str, family: Family) -> Finding | None:
    """E526 where several ranks cannot hold a model; None where they can."""
    if family.experts != "apart":
        return None
    return Finding(
        code="E526",
        what=f"the experts of model {path!r} cannot be shared out over ranks",
        got="a mixture of experts whose files keep each expert apart, on several devices",
        expected="one device for each use of the model",
        fix='rf.Placement(pools={"one": 1}, ...)',
    )


def stacked_finding(path: str) -> Finding:
    """E527: weights of a model that are no matrices, which Muon makes updates of."""
    return Finding(
        code="E527",
        what=f"Muon cannot train the experts of model {path!r}",
        got="weights of three dimensions, a stack of many experts' matrices",
        expected="matrices in layers, each made orthogonal by itself",
        fix="optimizer=rf.AdamW(lr=...)",
    )


def cutting_finding(path: str, family: Family, kind: str) -> Finding | None:
    """E521 where tensor parallelism cannot cut a model; None where it can, or nobody knows."""
    if family.cut:
        return None
    got = "experts" if family.experts != "none" else "no plan of which all is known"
    return uncut(path, kind, got)


def uncut(path: str, kind: str, got: str, expected: str = "") -> Finding:
    """E521: an architecture that nobody says how to cut."""
    return Finding(
        code="E521",
        what=f"model {path!r} ({kind}) cannot be shared out by tensor parallelism",
        got=got,
        expected=expected,
        fix="rf.on(..., tp=1, fsdp=...)",
    )
