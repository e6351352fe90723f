"""How mixtures of experts choose: one table of routers by family, which plans and engines read.

A family is `model_type` in config.json. Of a router that is not in the table nothing is known but
what it computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rlflow.errors import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRouter:
    """How a family's router scores experts, and what it adds to the scores before it chooses.

    `bias` is the last part of the name of a weight of one number an expert that is added for the
    choice alone (DeepSeek-V3, arXiv:2412.19437, equation 16); empty where there is none. A router
    that chooses once by the largest scores can be told what to choose: it `replays`.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    bias: str = ""
    replays: bool = True


SOFTMAX = KnownRouter()
SIGMOID = KnownRouter(scores="sigmoid")
CORRECTED = replace(SIGMOID, bias="e_score_correction_bias")

_SOFTMAX = """mixtral qwen2_moe qwen3_moe granitemoe granitemoeshared granitemoe_swa olmoe flex_olmo
 aria_text mellum hunyuan_v1_moe gpt_oss cohere2_moe deepseek_v2 qwen3_next qwen3_5_moe
 qwen3_5_moe_text qwen3_vl_moe_text granitemoehybrid"""
_CORRECTED = """glm4_moe dots1 exaone_moe solar_open mimo_v2_flash laguna minimax_m2 hy_v3
 minimax_m3_vl_text kolibri1 glm4_moe_lite deepseek_v3 kimi_linear"""

ROUTERS: dict[str, KnownRouter] = {
    **dict.fromkeys(_SOFTMAX.split(), SOFTMAX),
    "phimoe": replace(SOFTMAX, replays=False),
    "ernie4_5_moe": replace(SOFTMAX, bias="e_score_correction_bias"),
    "flint": SIGMOID,
    **dict.fromkeys(_CORRECTED.split(), CORRECTED),
}
BIASED = tuple(kind for kind, router in ROUTERS.items() if router.bias)


def router_finding(path: str, kind: str, *, corrected: bool = False) -> Finding | None:
    """E534 for a model whose router is not known, E535 where `corrected` and it has no bias."""
    router = ROUTERS.get(kind)
    if router is None:
        return Finding(
            code="E534",
            what=f"router= of a model without a router that is known: {path!r}",
            got=f"model_type {kind!r}" if kind else "no mixture of experts",
            expected="a mixture of experts: " + ", ".join(ROUTERS),
            fix="leave out router=",
        )
    if corrected and not router.bias:
        return Finding(
            code="E535",
            what=f"the routers of model {path!r} have no bias to correct",
            got=f"model_type {kind!r}",
            expected="one of " + ", ".join(BIASED),
            fix="rf.Router(balance_coef=0.001)   a loss in its place",
        )
    return None


def replay_finding(path: str, kind: str) -> Finding | None:
    """E536 for a model whose routers cannot be told which experts to choose."""
    router = ROUTERS.get(kind)
    if router is not None and router.replays:
        return None
    return Finding(
        code="E536",
        what=f"the routers of model {path!r} cannot be told which experts to choose",
        got=f"model_type {kind!r}" if kind else "no mixture of experts",
        expected="one of " + ", ".join(k for k, known in ROUTERS.items() if known.replays),
        fix="leave out routing=",
    )


def width_finding(path: str, width: int, own: int) -> Finding:
    """E536 for experts of tokens that chose in a mixture with other layers, or more of them."""
    return Finding(
        code="E536",
        what=f"the routers of model {path!r} cannot choose the experts that are offered",
        got=f"{width} experts of each token, in all layers",
        expected=f"{own}: those that the same model has recorded, or one of its shape",
        fix='ops.log_probs(..., routing="record")   to record its own',
    )
