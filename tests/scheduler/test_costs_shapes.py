"""Public models by shape: the published parameter counts, and how `--model-shape` is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from rlflow.errors import UsageError
from rlflow.graph.model import Model
from rlflow.scheduler.models.known_shapes import KNOWN, known_widths, parse_model_shape
from rlflow.scheduler.models.shapes import Shape, known_shape, model_shape, stand_ins
from rlflow.scheduler.models.stages import stage_shapes
from tests.conftest import PIPELINES, Result

PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "deepseek-r1-distill-qwen-7b": 7_615_616_512,
    "deepseek-r1-distill-qwen-14b": 14_770_033_664,
    "deepseek-r1-distill-qwen-32b": 32_763_876_352,
    "deepseek-r1-distill-llama-8b": 8_030_261_248,
    "deepseek-r1-distill-llama-70b": 70_553_706_496,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    # Without the layer that predicts ahead, and without the part that sees pictures.
    "glm-4.5": 352_797_814_784,
    "llama-4-scout": 107_769_861_120,
}


@pytest.mark.parametrize("name", KNOWN)
def test_widths_give_the_published_count(name: str) -> None:
    assert PUBLISHED[name] == known_widths(name).parameters == known_shape(name).parameters


def test_the_count_of_a_layer_by_hand() -> None:
    """Qwen2.5-0.5B: q and o 896 x 896, k and v 896 x 128, three of 896 x 4864, biases, norms."""
    layer = 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864 + 896 + 2 * 128 + 2 * 896

    assert layer == known_widths("qwen2.5-0.5b").layer
    assert 494_032_768 == 24 * layer + 151_936 * 896 + 896


def test_a_path_may_name_a_shape() -> None:
    found = model_shape(Model("actor", "shape:qwen2.5-7b"))

    assert found is not None
    assert (28, 3584, 4, 152_064) == (found.layers, found.hidden, found.kv_heads, found.vocab)
    assert "the widths of qwen2.5-7b" == found.source


def test_one_name_is_for_all_and_pairs_for_some() -> None:
    models = ("actor", "critic", "ref")

    assert dict.fromkeys(models, "qwen3-8b") == parse_model_shape("qwen3-8b", models)
    assert {"critic": "qwen3-4b"} == parse_model_shape("critic=qwen3-4b", models)
    assert {
        "actor": "qwen3-8b",
        "critic": "qwen3-4b",
        "ref": "qwen3-8b",
    } == parse_model_shape("qwen3-8b, critic=qwen3-4b", models)


@pytest.mark.parametrize(
    ("text", "code", "near"),
    [
        ("qwen2.5-8b", "E231", "qwen2.5-7b"),
        ("actor=qwen2.5-8b", "E231", "qwen2.5-7b"),
        ("actr=qwen2.5-7b", "E232", "actor"),
        ("actor=", "E233", ""),
        ("qwen2.5-7b,", "E233", ""),
        ("=qwen2.5-7b", "E233", ""),
        ("qwen2.5-7b,qwen3-8b", "E233", ""),
        ("actor=qwen2.5-7b,actor=qwen3-8b", "E233", ""),
    ],
)
def test_what_is_not_known_is_refused_with_near_names(text: str, code: str, near: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_model_shape(text, ("actor", "ref"))

    (finding,) = raised.value.findings
    assert code == finding.code
    assert near in (*finding.near, "")


def test_all_that_is_not_known_is_said_at_once() -> None:
    with pytest.raises(UsageError) as raised:
        parse_model_shape("qwen3-9b,actor=qwen3-9b,draft=qwen3-5b", ("actor", "drafter"))

    assert [("E231", "qwen3-9b"), ("E231", "qwen3-5b"), ("E232", "draft")] == [
        (finding.code, finding.what.split("'")[-2]) for finding in raised.value.findings
    ]


DRAFTED = PIPELINES / "drafted_grpo.py"


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("plan", "actor=qwen2.5-7b,drafter=qwen2.5-0.5b"),
        *(
            (name, "qwen2.5-7b,drafter=qwen2.5-0.5b")
            for name in ("plan", "simulate", "tune", "diff")
        ),
    ],
)
def test_a_small_drafter_is_planned_beside_a_large_actor(
    rlflow: Callable[..., Result], command: str, text: str
) -> None:
    words = ["--devices", "h100:8", "--model-shape", text]
    words += ["--top", "1"] if command == "tune" else ["--placement", "h100"]
    words += ["--placement", "h100"] if command == "diff" else []
    words += ["--json"] if command == "plan" else []
    done = rlflow(command, DRAFTED, *words)

    assert 0 == done.code, done.err
    if command == "plan":
        sizes = {part["name"]: part["size"] for part in json.loads(done.out)["parts"]}
        assert 7_615_616_512 * 4 == sizes["actor@gen/weights"]
        assert 494_032_768 * 4 == sizes["drafter@gen/weights"]


def test_a_note_says_what_stands_for_what_in_which_dtype() -> None:
    models = [
        Model("actor", "shape:qwen2.5-7b", dtype="bfloat16"),
        Model("ref", "shape:qwen2.5-7b", dtype="bfloat16"),
        Model("judge", "somewhere/else"),
    ]

    assert [
        "actor and ref taken as qwen2.5-7b, 7.62 billion parameters, in bfloat16 as declared"
    ] == stand_ins(models)


@pytest.mark.parametrize(("name", "beside"), [("qwen2.5-7b", 152064 * 3584), ("qwen2.5-0.5b", 0)])
def test_a_value_model_has_no_head_over_the_vocabulary(name: str, beside: int) -> None:
    """One that is tied to the embedding stays, for it is the embedding."""
    whole = model_shape(Model("actor", f"shape:{name}"))
    body = model_shape(Model("critic", f"shape:{name}", head="value"))
    assert whole is not None
    assert body is not None
    assert (beside, beside) == (
        whole.parameters - body.parameters,
        whole.embedding - body.embedding,
    )


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("deepseek-v3", "deepseek_v3", {}),
        ("gpt-oss-20b", "gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
        ("gpt-oss-120b", "gpt_oss", {"num_hidden_layers": 36, "num_local_experts": 128}),
        (
            "glm-4.5",
            "glm4_moe",
            {
                **{"vocab_size": 151_552, "hidden_size": 5120, "intermediate_size": 12_288},
                **{"num_hidden_layers": 92, "num_attention_heads": 96, "head_dim": 128},
                **{"num_key_value_heads": 8, "moe_intermediate_size": 1536},
                **{"n_routed_experts": 160, "n_shared_experts": 1, "first_k_dense_replace": 3},
                **{"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
            },
        ),
    ],
)
def test_mixtures_have_the_parameters_that_transformers_gives_them(
    name: str, kind: str, said: dict[str, object]
) -> None:
    """Total and active, with shared experts and dense first layers; biases of routers beside."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[kind](**said)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    sizes = {key: parameter.numel() for key, parameter in module.named_parameters()}
    experts = sum(size for key, size in sizes.items() if ".experts." in key)
    widths = known_widths(name)
    total = sum(sizes.values())

    assert widths.parameters == total
    active = total - experts * (widths.experts - widths.chosen) // widths.experts
    assert widths.parameters - widths.idle == active


def test_ranks_divide_widths_that_there_are() -> None:
    """GLM-4.5: 12,288 in three layers, else 1,536; no layer has the mean, 13,773."""
    glm, qwen, dense = map(known_shape, ("glm-4.5", "qwen3-30b-a3b", "qwen2.5-7b"))

    assert [((1536, 12_288), 1536), ((), 768), ((18_944,), 0)] == [
        (shape.sides, shape.expert_ffn) for shape in (glm, qwen, dense)
    ]
    assert [[], [], []] == [glm.uncut(tp, repeats=tp > 8) for tp in (2, 8, 32)]
    odd = replace(glm, sides=(1536, 12_286), expert_ffn=1534)
    wrong = ["feed-forward width", "width of experts"]
    assert [wrong[:1], wrong] == [odd.uncut(4, repeats=repeats) for repeats in (False, True)]


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b", "glm-4.5"])
@pytest.mark.parametrize("pp", [2, 7, 16])
def test_stages_have_no_more_for_every_token_than_their_model(name: str, pp: int) -> None:
    whole = known_shape(name)
    stages = stage_shapes(whole, pp, predicts=True)

    def body(shape: Shape) -> int:
        return shape.active - shape.embedding

    assert sum(map(body, stages)) == pytest.approx(body(whole), rel=1e-6)
    assert sum(stage.in_experts for stage in stages) == pytest.approx(whole.in_experts, rel=1e-6)
    for stage in stages:
        assert 1 <= stage.expert_layers <= stage.layers
        assert body(stage) / stage.layers == pytest.approx(body(whole) / whole.layers, rel=1e-6)
