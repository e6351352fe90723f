"""Rehearsals: training code on tensors without data, and the bytes found beside those planned."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.cli.commands import Target
from rlflow.cli.rehearsal.command import model_path, rehearse_target, require_agreement
from rlflow.engines.hf.flat import free, restore, storage_of, to_host
from rlflow.engines.hf.forward import spans
from rlflow.engines.hf.forward.sequences import Visible
from rlflow.engines.hf.sharded import model as sharded
from rlflow.errors import PlanError, UsageError
from rlflow.runtime.rehearse.device import NoData, without_data
from rlflow.runtime.rehearse.live import BLOCK, LiveStorages
from rlflow.runtime.rehearse.rehearse import SAVE
from rlflow.runtime.rehearse.rows import RowSizes

pytestmark = pytest.mark.torch

PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
SMALL = {"prompts_per_iteration": 2, "group_size": 2}


def rehearsed(pipeline: str, **more: Any) -> tuple[Any, Any]:
    settings = tuple(f"{key}={value}" for key, value in more.pop("settings", {}).items())
    return rehearse_target(Target(pipeline=str(PIPELINES / pipeline), settings=settings, **more))


def test_bytes_are_counted_while_their_storage_lives() -> None:
    with LiveStorages("meta") as live:
        one = torch.empty(1000, 1000, device="meta", requires_grad=True)
        assert live.now == -(-4_000_000 // BLOCK) * BLOCK
        size = live.now
        product = one @ one
        view = product[:1]
        del product
        assert live.now == 2 * size
        del view
        assert (live.now, live.most) == (size, 2 * size)
        one.sum().backward()
        assert live.now > size
        one.grad = None
        gc.collect()
        one.untyped_storage().resize_(0)
        assert live.now < size // 100
        with live.labelled("named"):
            kept = torch.empty(100, device="meta")
        assert live.held["named"] == BLOCK
        assert kept.shape == (100,)


def test_parts_are_found_as_they_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, moments and gradients of the real objects are those of the plan to the block.

    In another folder than the model's, which is found beside the pipeline.
    """
    monkeypatch.chdir(tmp_path)
    plan, (found,) = rehearsed("grpo_arithmetic.py", devices="h100:1", settings=SMALL)
    by_name = {action.action: action for action in found.actions}
    update = by_name["actor.update"]
    planned, seen = dict(update.planned_of), dict(update.found_of)
    for kind in ("weights", "optimizer", "gradients"):
        assert 0 <= seen[kind] - planned[kind] <= 16 * BLOCK, kind
    save = by_name.pop(SAVE)
    assert (plan.saved[0].size, save.planned) == (save.planned, save.found)
    assert update.found > sum(planned[kind] for kind in ("weights", "optimizer", "gradients"))
    assert "actor.rollout" in dict(found.left_out)
    runs = {a.id for a in plan.actions if a.kind == "run" and a.instance is not None}
    assert runs == {*by_name, *(name for name, _ in found.left_out if name in runs)}


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("placement", "devices"), [("fsdp", "h100:2"), ("fsdp_tp", "h100:4")], ids=["fsdp", "both"]
)
def test_a_rank_of_several_holds_its_shards_alone(placement: str, devices: str) -> None:
    _, (found,) = rehearsed(
        "grpo_arithmetic.py", placement=placement, devices=devices, settings=SMALL
    )
    update = next(action for action in found.actions if action.action == "actor.update")
    planned, seen = dict(update.planned_of), dict(update.found_of)
    for kind in ("weights", "optimizer"):
        assert 0 <= seen[kind] - planned[kind] <= 32 * 2 * BLOCK, kind
    assert seen["gathered weights"]


@pytest.mark.rows(1)
def test_every_stage_holds_its_own_layers(tmp_path: Path) -> None:
    """Of a pipeline's first and last stage, each beside what the plan counts for it."""
    _, found = rehearsed(
        "grpo_arithmetic.py",
        placement=placed(tmp_path, 2, pp=2),
        devices="h100:2",
        settings=SMALL,
    )
    assert [each.device for each in found] == [0, 1]
    for stage in found:
        update = next(action for action in stage.actions if action.action == "actor.update")
        planned, seen = dict(update.planned_of), dict(update.found_of)
        for kind in ("weights", "optimizer"):
            assert 0 <= seen[kind] - planned[kind] <= 32 * 2 * BLOCK, kind
        assert update.found > seen["weights"] + seen["optimizer"]
    require_agreement(found)


@pytest.mark.slow
def test_a_plan_that_counts_otherwise_is_refused() -> None:
    """Too little and too much alike."""
    _, (found,) = rehearsed("grpo_arithmetic.py", devices="h100:1", settings=SMALL)
    action = replace(found.actions[0], found=4 << 30)
    for planned in (int(action.found / 1.06), int(action.found * 1.06)):
        wrong = replace(found, actions=(replace(action, planned=planned),))
        with pytest.raises(PlanError, match=r"E407.*actor\.update"):
            require_agreement([wrong])
    for planned in (action.found, int(action.found * 1.04)):
        require_agreement([replace(found, actions=(replace(action, planned=planned),))])
    require_agreement([found])


def test_what_cannot_be_rehearsed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"E256.*sizes of actor and ref are not known"):
        rehearsed("grpo_gsm8k.py", placement="colocate", devices="h100:8")
    with pytest.raises(UsageError, match=r"E256.*CPU devices"):
        rehearsed("grpo_arithmetic.py", devices="cpu:1")


def test_a_model_of_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"E256.*mixtral"):
        model_path("shape:mixtral-8x7b", tmp_path)


@pytest.mark.slow
@pytest.mark.extra
def test_what_a_plan_recomputes_of_itself_is_rehearsed(tmp_path: Path) -> None:
    plan, found = rehearsed(
        "grpo_gsm8k.py",
        placement=placed(tmp_path, 2),
        devices="h100:2",
        model_shape="qwen2.5-7b",
        settings={"max_new_tokens": 8192, "prompts_per_iteration": 16},
    )
    assert plan.trained_instance("actor").recompute_first
    require_agreement(found)


def placed(folder: Path, devices: int, **on: object) -> str:
    """A file with a placement of everything on so many devices."""
    path = folder / "placed.py"
    path.write_text(
        "import rlflow as rf\n"
        f"where = {{'*': rf.on('all', **{on!r})}}\n"
        f"placement = rf.Placement(pools={{'all': {devices}}}, assign=where)\n"
    )
    return str(path)


@pytest.mark.rows(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_on_the_host_takes_nothing_of_the_device(tmp_path: Path, ranks: int) -> None:
    """The part has no bytes in plan and rehearsal, asleep or awake; its copies on the host none."""
    plan, (found,) = rehearsed(
        "grpo_arithmetic.py",
        placement=placed(tmp_path, ranks, offload="optimizer"),
        devices=f"h100:{ranks}",
        settings=SMALL,
    )
    assert plan.trained_instance("actor").offload == "optimizer"
    update = next(action for action in found.actions if action.action == "actor.update")
    assert dict(update.planned_of).get("optimizer", 0) == 0
    assert dict(update.found_of).get("optimizer", 0) == 0
    assert dict(update.found_of)["weights"]


@pytest.mark.rows(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_activations_on_the_host_take_what_is_planned_there(tmp_path: Path, ranks: int) -> None:
    plan, (found,) = rehearsed(
        "grpo_arithmetic.py",
        placement=placed(tmp_path, ranks, offload=["activations", "optimizer"], recompute=True),
        devices=f"h100:{ranks}",
        settings=SMALL,
    )
    part = plan.part("actor@all/activations")
    (hosted,) = (each for each in found.actions if each.action == f"{part.name}, on the host")
    assert (part.size, part.on_host) == (0, hosted.planned)
    assert hosted.found == hosted.planned > 0


def test_what_goes_to_the_host_takes_no_memory_of_a_rehearsal() -> None:
    with NoData():
        state = torch.empty(1 << 40, device="meta")
        (copy,) = to_host([state])
        assert copy.shape == state.shape
        assert copy.untyped_storage().nbytes() == 4
        free([state])
        restore([state], [copy])
        assert state.untyped_storage().nbytes() == 4 << 40


def test_weights_that_sleep_are_saved_in_a_rehearsal() -> None:
    """A copy that was never made has one zero in it, and no layout."""
    like = torch.empty(4, 6, dtype=torch.bfloat16, device="meta")[:, 1:]
    live = NoData()
    with without_data(live, 1), live:
        (copy,) = to_host([storage_of(like)])
        found = sharded.in_storage(copy, like)
        assert (found.shape, found.dtype) == (like.shape, like.dtype)
        bytes_of = torch.arange(16, dtype=torch.int32).view(torch.uint8)
        assert sharded.in_storage(bytes_of, torch.empty(2, 2).int()).tolist() == [[0, 1], [2, 3]]


def test_the_kernel_of_an_accelerator_attends_in_a_rehearsal() -> None:
    q, v = (torch.empty(5, 4, size, dtype=torch.bfloat16) for size in (64, 64))
    seen = Visible(scale=1.0, causal=True, window=None, softcap=None)
    with without_data(NoData(), 1):
        assert "varlen" == spans.attends_by(q, v, seen)
        assert "flex" == spans.attends_by(q.float(), v.float(), seen)
        assert "flex" == spans.attends_by(q, v, replace(seen, softcap=30.0))
        assert "blocks" == spans.attends_by(q.double(), v.double(), seen)


@pytest.mark.parametrize(
    ("sizes", "micro", "steps", "expected"),
    [
        # 128 + 3 x 512 leaves 384 of 2048: of 480 four fit.
        ((64, 8, 128, 512), 2048, 1, 480),
        # All of a step fit: as long as they are.
        ((64, 8, 128, 512), 32768, 16, 512),
        # A row alone is beyond a micro-batch.
        ((4, 4, 128, 4096), 2048, 1, 4096),
        # Nothing is left over.
        ((64, 8, 0, 512), 2048, 1, 512),
    ],
)
def test_rows_fill_micro_batches(sizes: Any, micro: int, steps: int, expected: int) -> None:
    rows, prompts, prompt, response = sizes
    size = RowSizes(rows=rows, prompts=prompts, prompt=prompt, response=response)
    assert size.filling(micro, steps=steps).response == expected


# Few activations, beside which all that is gathered shows.
WHOLE_AGAIN = {"reshard_after_forward": False, "recompute": True, "micro": 2048}


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize(
    ("pipeline", "placement", "devices", "shape", "prompts"),
    [
        ("grpo_gsm8k.py", "one", "h100:1", "qwen2.5-1.5b", 64),
        ("grpo_gsm8k.py", "colocate", "h100:8", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", "sglang_colocate", "h100:8", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", "sglang_colocate", "h100:8", "qwen2.5-7b", 16),
        ("grpo_gsm8k.py", "sglang_colocate", "h100:8", "qwen2.5-7b", 32),
        ("grpo_gsm8k.py", "sglang_colocate", "h100:8", "qwen2.5-7b", 128),
        ("grpo_gsm8k.py", "colocate", "h100:8", "qwen2.5-0.5b", 16),
        ("grpo_gsm8k.py", "split", "h100:8", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", {}, "h100:2", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", {"offload": "optimizer"}, "h100:2", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", {"reshard_after_forward": False}, "h100:8", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", WHOLE_AGAIN, "h100:8", "qwen2.5-1.5b", 64),
        ("grpo_gsm8k.py", {"recompute": "selective"}, "h100:8", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", {"recompute": 14, "tp": 2}, "h100:8", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", {"tp": 2}, "h100:8", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", {"tp": 2, "sequence": False}, "h100:8", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", {"cp": 2, "cp_by": "ulysses"}, "h100:8", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", {"cp": 2, "cp_by": "ring"}, "h100:8", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", {"cp": 4, "cp_by": "ring"}, "h100:8", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", {}, "h100:64", "qwen2.5-32b", 512),
        ("grpo_gsm8k.py", {"pp": 2}, "h100:8", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", {"pp": 4, "tp": 2}, "h100:16", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", {"pp": 4, "schedule": "zero-bubble"}, "h100:4", "qwen2.5-7b", 64),
        ("grpo_gsm8k.py", {"pp": 2}, "h100:4", "qwen3-1.7b", 64),
        ("ppo_gsm8k.py", "split", "h100:8", "qwen2.5-7b", 64),
        ("ppo_gsm8k.py", "colocate", "h100:8", "qwen2.5-7b", 64),
        ("ppo_gsm8k.py", {"reshard_after_forward": False}, "h100:8", "qwen2.5-7b", 64),
        ("ppo_gsm8k.py", "rack", "h100:64", "qwen2.5-32b", 512),
    ],
    ids=lambda value: str(value).removeprefix("qwen2.5-"),
)
def test_plans_of_real_shapes_are_within_five_percent(
    pipeline: str, placement: Any, devices: str, shape: str, prompts: int, tmp_path: Path
) -> None:
    if isinstance(placement, dict):
        placement = placed(tmp_path, int(devices.split(":")[1]), **placement)
    rows = {"prompts_per_iteration": prompts}
    _, found = rehearsed(
        pipeline, placement=placement, devices=devices, model_shape=shape, settings=rows
    )
    require_agreement(found)
    models = {"actor.update", "ref.log_probs", SAVE}
    models |= {"critic.update", "critic.values"} if pipeline.startswith("ppo") else set()
    assert {a.action for each in found for a in each.actions} == models


TINY = PIPELINES / "assets" / "arith-tiny"
GRPO = """
import rlflow as rf
from rlflow import ops


def length(response: str) -> float:
    return float(len(response))


WHERE = rf.Placement(pools={{"all": {devices}}}, assign={{"*": rf.on("all", {on})}})


@rf.pipeline(placements={{"all": WHERE}})
def grpo(cfg: rf.Config):
    adam = rf.AdamW(lr=1e-6)
    actor = rf.Model("actor", "{path}", dtype="bfloat16", init="random", optimizer=adam)
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=4 * {devices})
    samples = ops.rollout(actor, prompts, n=8, max_new_tokens=2048)
    advantage = ops.advantage("grpo", samples, ops.reward(length, samples))
    ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))
"""


def grpo_of(config: dict[str, Any], folder: Path, devices: int, on: str) -> Target:
    """GRPO of a model with such a config, on so many devices."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    for file in TINY.glob("token*"):
        shutil.copy(file, model)
    pipeline = folder / "grpo.py"
    pipeline.write_text(GRPO.format(on=on, path=model, devices=devices))
    return Target(pipeline=str(pipeline), devices=f"h100:{devices}")


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize(
    ("on", "devices"),
    [
        ("pp=2", [0, 4]),
        ("ep=4", [0]),
        ("ep=8, recompute=True", [0]),
        ("pp=2, ep=4", [0, 4]),
        ('pp=2, schedule="zero-bubble"', [0, 4]),
        ('pp=4, ep=2, schedule="zero-bubble"', [0, 2, 6]),
        ("tp=2", [0]),
        ("ep=2, tp=2", [0]),
    ],
)
def test_mixtures_are_within_five_percent(on: str, devices: list[int], tmp_path: Path) -> None:
    """A mixture whose queries and keys have norms, as Qwen3-30B-A3B has with half of its depth.

    Of experts that lie apart as many tokens come to a rank as a plan counts for the fullest.
    """
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 32768,
    }
    _, found = rehearse_target(grpo_of(config, tmp_path, 8, on))
    assert [each.device for each in found] == devices
    require_agreement(found)
    updates = [a for each in found for a in each.actions if a.action == "actor.update"]
    assert all(each.found > 35e9 for each in updates)
    assert updates[0].found >= updates[-1].found


@pytest.mark.slow
@pytest.mark.parametrize("on", ['recompute="selective"', "recompute=True"])
def test_soft_caps_are_within_five_percent(tmp_path: Path, on: str) -> None:
    """Gemma 2 of 2B by FlexAttention, of which nothing is kept where a layer is computed again."""
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
        "sliding_window": 1024,
    }
    _, (found,) = rehearse_target(grpo_of(config, tmp_path, 1, on))
    require_agreement([found])
    update = next(action for action in found.actions if action.action == "actor.update")
    assert update.found > 50e9
