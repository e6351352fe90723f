"""Families of models: plans refuse what engines refuse, and parameters are counted right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError, UsageError
from rlflow.modelfiles.families import dispatch_finding, family_of
from rlflow.modelfiles.layouts.carrying import Carrying
from rlflow.modelfiles.layouts.contexts import context_finding
from rlflow.modelfiles.widths import widths_of
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.models.shapes import known_shape, read_shape
from rlflow.scheduler.plan.plan import Plan
from tests.scheduler.strategies import exact, graph_of

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}
MIXED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
STATE = {"layer_types": ["linear_attention", "full_attention"]}
CONFIGS: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "phi3": {"pad_token_id": None},
    "bloom": {},
    "gpt_neox": {"num_key_value_heads": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**MIXED, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
    "qwen3_moe": {**MIXED, "decoder_sparse_step": 2},
    "glm4_moe": {**ROUTED, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v3": {**ROUTED, **LATENT},
    "deepseek_v2": {**ROUTED, **LATENT},
    "minicpm3": LATENT,
    "qwen3_next": {**MIXED, **STATE},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"num_local_experts": 4},
}
# What is refused on one device, on two by fsdp, by tp, by tp with the sequence shared, and by ep.
DENSE_REFUSED = ("", "", "", "", "E533", "", "")
REFUSED = {
    "phi3": ("", "", "E521", "E521", "E533", "", ""),
    "bloom": ("E503",) * 7,
    "glm4_moe": ("", "", "E521", "E521", "", "", ""),
    "gpt_oss": ("", "", "E521", "E521", "E533", "", "E537"),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), ("", "", "", "E530", "", "", "")),
    **dict.fromkeys(("deepseek_v3", "deepseek_v2"), ("", "", "", "E530", "", "", "")),
    "qwen3_next": ("", "", "", "E530", "", "", "E537"),
    "minicpm3": ("", "", "", "E530", "E533", "", ""),
    "lfm2": ("", "", "E521", "E521", "E533", "", "E537"),
    **dict.fromkeys(("gemma2", "gemma3_text"), ("", "", "", "", "E533", "", "E537")),
    "llama4_text": ("E503",) * 7,
}
# Layers that carry states of two heads.
TWO = Carrying(layers=3, heads=2, entering=40, leaving=8)
COUNTED = [f for f in CONFIGS if family_of({"model_type": f}).counted]
DIGITS = rf.data.arithmetic(digits=2)
LAYOUTS = {
    "one": {},
    "fsdp": {"fsdp": 2},
    "tp": {"tp": 2},
    "sequence": {"tp": 2, "sequence": True},
    "ep": {"fsdp": 2, "ep": 2},
    "ulysses": {"cp": 2, "cp_by": "ulysses"},
    "ring": {"cp": 2, "cp_by": "ring"},
}
STAGES = {"pp": {"pp": 2}}


def declared(path: str) -> None:
    actor = rf.Model("actor", path, optimizer=rf.AdamW(lr=1e-6))
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=10)
    advantages = ops.advantage("grpo", samples, ops.reward(exact, samples))
    ops.update(actor, samples, advantages, loss=rf.PolicyLoss())


def planned(path: str, layout: str, devices: str = "cpu:2@64GB") -> Plan:
    graph = graph_of(lambda: declared(path), "families")
    count = 1 if layout == "one" else 2
    where = rf.on("all", **(LAYOUTS | STAGES)[layout])  # type: ignore[arg-type]
    placement = rf.Placement(pools={"all": count}, assign={"*": where})
    return compile_plan(graph, placement, parse_cluster(devices, count, 1)).plan


def written(folder: Path, family: str) -> Path:
    folder.mkdir(exist_ok=True)
    config = {**SMALL, **CONFIGS[family], "model_type": family}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.rows(20)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_refuses_from_the_config_what_cannot_be_computed(
    family: str, layout: str, tmp_path: Path
) -> None:
    path = str(written(tmp_path / "model", family))
    code = REFUSED.get(family, DENSE_REFUSED)[list(LAYOUTS).index(layout)]

    if not code:
        assert planned(path, layout).actions
        return
    with pytest.raises(PlanError, match=code) as raised:
        planned(path, layout)
    assert raised.value.findings[0].where is not None


@pytest.mark.parametrize("drafts", ["qwen2", "lfm2"])
def test_layers_that_carry_states_draft_for_nobody(drafts: str, tmp_path: Path) -> None:
    """Of the policy, and of a drafter for a policy with attention alone."""
    other = "lfm2" if drafts == "qwen2" else "qwen2"
    paths = {kind: str(written(tmp_path / kind, kind)) for kind in (drafts, other)}

    def pipeline() -> None:
        actor = rf.Model("actor", paths[other], optimizer=rf.AdamW(lr=1e-6))
        drafter, prompts = rf.Model("small", paths[drafts]), ops.prompts(DIGITS, batch=4)
        made = ops.rollout(actor, prompts, n=2, max_new_tokens=9, drafter=drafter, draft_tokens=2)
        advantages = ops.advantage("grpo", made, ops.reward(exact, made))
        ops.update(actor, made, advantages, loss=rf.PolicyLoss())

    placement = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
    with pytest.raises(PlanError, match="E598"):
        compile_plan(graph_of(pipeline, "drafted"), placement, parse_cluster("cpu:1@64GB", 1, 1))


# A family, its experts, (ep, fsdp, tp), and what is said: the numbers that work, or why none does.
DISPATCHES = [
    ("qwen3_moe", 128, (8, 32, 1), ""),
    ("qwen3_moe", 128, (8, 16, 4), ""),
    ("mixtral", 8, (8, 8, 1), ""),
    ("mixtral", 8, (16, 16, 1), "one of 1, 2, 4, 8:"),
    ("mixtral", 8, (8, 8, 2), "one of 1, 2, 4:"),
    ("qwen3_moe", 128, (8, 12, 1), "one of 1, 2, 4:"),
    ("qwen2", 0, (2, 2, 1), "a dense model"),
    ("glm4_moe", 160, (2, 2, 1), ""),
    ("gpt_oss", 32, (2, 2, 1), "never compared"),
]


@pytest.mark.parametrize(("kind", "experts", "sizes", "said"), DISPATCHES)
def test_experts_lie_apart_where_they_and_the_ranks_divide(
    kind: str, experts: int, sizes: tuple[int, int, int], said: str
) -> None:
    found = dispatch_finding("m", family_of({"model_type": kind}), experts, *sizes)

    told = "" if found is None else f"{found.code} {found.expected or found.got}"
    assert bool(said) == bool(told)
    assert told.startswith("E533" if said else "")
    assert said in told


def test_plans_print_experts_that_lie_apart_and_refuse_them_where_there_are_none(
    tmp_path: Path,
) -> None:
    def compiled(**how: int) -> Plan:
        where = rf.on("all", **how)
        placement = rf.Placement(pools={"all": 4}, assign={"*": where})
        return compile_plan(graph, placement, parse_cluster("cpu:4@64GB", 4, 1)).plan

    graph = graph_of(lambda: declared(str(written(tmp_path / "moe", "qwen3_moe"))), "families")
    apart, shared = compiled(ep=2), compiled()
    layouts = {i.name: i.layout() for i in apart.instances}

    assert {"actor@all": "fsdp=4 ep=2", "actor@all/rollout": "x4"} == layouts
    assert apart.hash != shared.hash
    assert "ep" not in shared.instances[0].as_json()
    with pytest.raises(PlanError, match=r"(?s)E533.*does not divide fsdp=2.*one of 1, 2:"):
        compiled(ep=4, fsdp=2)
    graph = graph_of(lambda: declared(str(written(tmp_path / "dense", "qwen2"))), "families")
    with pytest.raises(PlanError, match=r"(?s)E533.*a dense model.*ep=1"):
        compiled(ep=2)


def test_what_is_in_no_table_is_judged_by_its_config() -> None:
    def found(**config: object) -> tuple[str, str]:
        family = family_of({"model_type": "of-next-year", **config})
        return family.attention, family.experts

    assert ("full", "none") == found()
    assert ("full", "apart") == found(num_experts=64)
    assert ("latent", "none") == found(kv_lora_rank=512)
    assert ("state", "none") == found(layer_types=["mamba", "full_attention"])
    assert ("full", "none") == found(layer_types=["sliding_attention"])
    assert ("none", "none") == found(text_config={"model_type": "gemma3_text"})
    inner = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    assert family_of(inner).attention == "full"


def test_a_config_of_other_names_is_refused_for_what_it_is(tmp_path: Path) -> None:
    config = {"model_type": "bart", "d_model": 32, "decoder_layers": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(UsageError, match=r"(?s)E503.*encoder"):
        planned(str(tmp_path), "one")


def test_a_width_said_for_each_layer_is_read(tmp_path: Path) -> None:
    config = {**SMALL, "model_type": "gemma3n_text", "intermediate_size": [48, 64]}
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert read_shape(tmp_path).ffn == 64
    with pytest.raises(PlanError, match="E503"):
        planned(str(tmp_path), "one")


PUBLISHED = {
    "qwen3-30b-a3b": (30.5e9, 3.3e9),
    "qwen3-235b-a22b": (235e9, 22e9),
    "mixtral-8x7b": (46.7e9, 12.9e9),
    "deepseek-v3": (671e9, 37.5e9),
    # OpenAI leaves the embedding out of what is active, Zhipu embedding and head out of both
    # (which have a layer that predicts ahead), Meta counts the part that sees pictures.
    "gpt-oss-20b": (20.91e9, 3.61e9 + 0.58e9),
    "gpt-oss-120b": (116.83e9, 5.13e9 + 0.58e9),
    "glm-4.5": (355e9 + 1.55e9 - 3.8e9, 32e9 + 1.55e9),
    "llama-4-scout": (109e9 - 0.9e9, 17e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_experts_are_memory_and_the_chosen_ones_time(name: str) -> None:
    shape = known_shape(name)
    total, active = PUBLISHED[name]

    assert total == pytest.approx(shape.parameters, rel=0.005)
    assert active == pytest.approx(shape.active, rel=0.02)
    assert shape.active < shape.touched(1) * 1.0001 < shape.touched(64) < shape.parameters
    assert shape.touched(1e6) == pytest.approx(shape.parameters)


def test_a_mixture_is_planned_on_one_device_with_all_of_its_memory() -> None:
    plan = planned("shape:qwen3-30b-a3b", "one", "cpu:1@2000GB")
    dense = planned("shape:qwen3-32b", "one", "cpu:1@2000GB")

    weights = {part.name: part.size for part in plan.parts}
    assert 30.5e9 * 4 == pytest.approx(weights["actor@all/weights"], rel=0.01)
    seconds = {a.id: a.cost.seconds for a in plan.actions}
    slower = {a.id: a.cost.seconds for a in dense.actions}
    assert seconds["actor.rollout"] < slower["actor.rollout"] / 2
    assert seconds["actor.update"] < slower["actor.update"]  # steps of all parameters included
    assert planned("shape:qwen3-30b-a3b", "fsdp", "cpu:2@2000GB").actions
    assert planned("shape:deepseek-v3", "fsdp", "cpu:2@20000GB").actions
    with pytest.raises(PlanError, match="E401"):
        planned("shape:deepseek-v3", "fsdp", "h100:2")


def test_a_token_of_latent_attention_is_cached_as_its_latent_on_every_rank() -> None:
    """61 layers of 512 + 64 numbers (DeepSeek-V3, arXiv:2412.19437, section 4.2)."""
    latent, dense = known_shape("deepseek-v3"), known_shape("qwen2.5-7b")

    assert 61 * 576 == latent.cached_on_each(1) == latent.cached_on_each(8)
    assert 28 * 2 * 512 == dense.cached_on_each(1) == 4 * dense.cached_on_each(4)


@pytest.mark.torch
@pytest.mark.parametrize("family", COUNTED)
def test_counts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    import torch
    import transformers

    written(tmp_path, family)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        made = transformers.AutoModelForCausalLM.from_config(config)

    assert sum(p.numel() for p in made.parameters()) == read_shape(tmp_path).parameters


QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151_936, "tie_word_embeddings": False, "max_position_embeddings": 40_960,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18_432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "vocab_size": 129_280, "tie_word_embeddings": False, "max_position_embeddings": 163_840,
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize(
    ("config", "name"), [(QWEN3_MOE, "qwen3-30b-a3b"), (DEEPSEEK_V3, "deepseek-v3")]
)
def test_real_counts_are_those_of_transformers(config: dict[str, object], name: str) -> None:
    import torch
    import transformers

    kind = transformers.CONFIG_MAPPING[str(config["model_type"])]
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(kind(**config))

    widths = widths_of(config, Path("config.json"))
    counted = sum(p.numel() for p in made.parameters())
    assert counted == widths.parameters == known_shape(name).parameters
    assert widths.parameters - widths.idle == known_shape(name).active


def test_plans_derive_what_cp_leaves_of_fsdp_and_refuse_rows_that_cannot_be_cut(
    tmp_path: Path,
) -> None:
    def compiled(**how: object) -> Plan:
        placement = rf.Placement(pools={"all": 4}, assign={"*": rf.on("all", **how)})
        return compile_plan(graph, placement, parse_cluster("cpu:4@64GB", 4, 1)).plan

    def layouts(plan: Plan) -> dict[str, str]:
        return {instance.name: instance.layout() for instance in plan.instances}

    graph = graph_of(lambda: declared(str(written(tmp_path / "dense", "qwen2"))), "families")
    said = layouts(compiled(cp=2, cp_by="ring"))
    assert {"actor@all": "fsdp=2 cp=2 ring", "actor@all/rollout": "x4"} == said
    assert "fsdp=2 cp=2 " in layouts(compiled(cp=2))["actor@all"]
    with pytest.raises(PlanError, match=r"(?s)E212.*fsdp=1 x cp=3 x tp=1 does not fit.*4 % 3 = 1"):
        compiled(cp=3)


@pytest.mark.parametrize(
    ("kind", "way", "fix"),
    [
        ("qwen2", {"cp": 4}, None),
        ("qwen2", {"cp": 8}, None),
        ("qwen2", {"cp": 8, "by": "ulysses"}, 'cp=8, cp_by="ring"'),
        ("qwen2", {"cp": 4, "tp": 2, "by": "ulysses"}, 'cp=4, cp_by="ring"'),
        ("gpt_oss", {"cp": 2, "windows": True}, None),
        ("gpt_oss", {"cp": 2, "windows": True, "by": "ring"}, 'cp_by="ulysses"'),
        ("gpt_oss", {"cp": 6, "windows": True}, "cp=4"),
        ("deepseek_v3", {"cp": 2}, None),
        ("qwen3_next", {"cp": 2, "carrying": TWO}, None),
        ("qwen3_next", {"cp": 4, "carrying": TWO}, "cp=2"),
        ("qwen3_next", {"cp": 2, "carrying": TWO, "by": "ring"}, 'cp_by="ulysses"'),
        ("bamba", {"cp": 2, "carrying": TWO}, "cp=1"),
    ],
)
def test_rows_are_cut_over_ranks_that_can_attend(
    kind: str, way: dict[str, Any], fix: str | None
) -> None:
    found = context_finding("models/it", family_of({"model_type": kind}), heads=4, **way)

    assert (None if found is None else found.code) == (fix and "E537")
    assert fix is None or (found is not None and fix in found.fix)
