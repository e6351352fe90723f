"""By what attention is computed: a table, and what a plan says and counts of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.modelfiles.kernels.attention import AttentionAsked, attention_choice, softcap_of
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.plan.plan import Plan
from tests.scheduler.strategies import exact, graph_of


@pytest.mark.parametrize(
    ("asked", "by", "why"),
    [
        ({}, "varlen", "takes all of it"),
        ({"dtype": "float16", "window": 4096, "sinks": True}, "varlen", "takes all of it"),
        ({"head": 256, "value": 256}, "varlen", "takes all of it"),
        ({"softcap": 50.0}, "flex", "has no soft cap"),
        ({"softcap": 50.0, "window": 4096, "sinks": True}, "flex", "has no soft cap"),
        ({"dtype": "float32"}, "flex", "has no float32"),
        ({"dtype": "float32", "window": 128}, "flex", "has no float32"),
        ({"head": 100, "value": 100}, "flex", "takes no head of 100"),
        ({"head": 192, "value": 128}, "varlen", "takes all of it"),
        ({"head": 128, "value": 192}, "flex", "takes no values wider than keys"),
        ({"window": 9, "knows_windows": False}, "flex", "knows no window"),
        ({"rocm": True}, "flex", "pads its log-sums with ROCm"),
        ({"dtype": "float64"}, "blocks", "has no float64, FlexAttention has no float64"),
        ({"head": 320, "value": 320}, "blocks", "FlexAttention takes no head of 320"),
        ({"head": 12, "value": 12}, "blocks", "FlexAttention takes no head of 12"),
        ({"softcap": 50.0, "compiles": False}, "blocks", "needs Triton, which is not installed"),
        ({"capability": (7, 5)}, "blocks", "needs an Ampere or later"),
        ({"device": "cpu", "dtype": "float32", "softcap": 50.0}, "masks", "a CPU"),
        ({"device": "xpu"}, "blocks", "no kernel is known of xpu devices"),
    ],
)
def test_the_choice_is_one_table(asked: dict[str, Any], by: str, why: str) -> None:
    most: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "head": 128, "value": 128}
    found = attention_choice(AttentionAsked(**{**most, **asked}))
    assert (by, True) == (found.by, why in found.reason), found


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sinks_decide_nothing(device: str, softcap: float | None, sinks: bool) -> None:
    """Each way gives log-sums, by which they are merged."""
    one, other = (
        attention_choice(
            AttentionAsked(
                device=device, dtype="bfloat16", head=64, value=64, softcap=softcap, sinks=each
            )
        )
        for each in (sinks, False)
    )
    assert one == other


def test_the_soft_cap_is_that_of_the_config_or_of_a_family_that_is_silent() -> None:
    assert 50.0 == softcap_of({"model_type": "gemma2"})
    assert 30.0 == softcap_of({"model_type": "gemma2", "attn_logit_softcapping": 30})
    assert softcap_of({"model_type": "gemma2", "attn_logit_softcapping": None}) is None
    assert softcap_of({"model_type": "qwen2"}) is None


def planned(
    folder: Path, devices: str, dtype: str = "bfloat16", cap: float | None = 50.0, **layout: object
) -> Plan:
    """GRPO of 2B, as wide as Gemma 2 is, with a soft cap or without."""
    config = {
        "model_type": "gemma2",
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "attn_logit_softcapping": cap,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))

    def declare() -> None:
        actor = rf.Model("actor", str(folder), dtype=dtype, optimizer=rf.AdamW(lr=1e-6))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=16)
        samples = ops.rollout(actor, prompts, n=8, max_new_tokens=4096)
        advantages = ops.advantage("grpo", samples, ops.reward(exact, samples))
        ops.update(actor, samples, advantages, loss=rf.PolicyLoss("ppo_clip"))

    placement = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all", **layout)})
    return compile_plan(graph_of(declare), placement, parse_cluster(devices, 1), name="p").plan


def notes(plan: Plan) -> list[str]:
    return [note.text for note in plan.notes if note.rule == "attention"]


def test_a_plan_says_what_computes_attention_where_that_is_not_the_rule(tmp_path: Path) -> None:
    found = notes(planned(tmp_path, "h100:1"))
    assert found == [
        "actor@all computes attention by FlexAttention: the varlen kernel has no soft cap"
    ]
    assert not notes(planned(tmp_path, "h100:1", cap=None))
    assert not notes(planned(tmp_path, "cpu:1@400GB"))
    (wide,) = notes(planned(tmp_path, "b200:1", "float64", None))
    assert "by blocks of matrix products, slowly: the varlen kernel has no float64" in wide


def test_attention_that_is_computed_again_is_not_counted_as_kept(tmp_path: Path) -> None:
    """Of 26 layers: 8 heads of 256 numbers of 2 bytes, and a log-sum of 4, for each token."""
    seconds, held = [], []
    for cap in (None, 50.0):
        plan = planned(tmp_path, "h200:1", cap=cap, recompute="selective")
        cost = plan.action("actor.update").cost
        seconds.append(cost.seconds)
        held.append(dict(cost.holds)["activations"])
        assert [] == notes(plan) if cap is None else "computes it again" in notes(plan)[0]
    assert seconds[0] < seconds[1]
    tokens = (held[0] - held[1]) / (26 * 8 * (256 * 2 + 4))
    assert tokens == pytest.approx(round(tokens), abs=1e-3)
    assert tokens > 4096
