"""Where models that are given pictures may lie."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.modelfiles.pictures.sights import seen_in, sight_in
from rlflow.scheduler.compile import compile_plan
from rlflow.scheduler.costs.lengths import Load, full_lengths
from rlflow.scheduler.costs.ranks.rank_memory import SEEN
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.devices.cluster import KINDS, cpu_cluster, parse_cluster
from rlflow.scheduler.models.prompts import NOT_LOADED, PictureTokens, with_picture_tokens
from rlflow.scheduler.models.shapes import read_shape
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.verify.verify import verify
from tests.conftest import TINY

SHAPES = Path(__file__).parents[2] / "pipelines" / "assets" / "shapes-tiny"


def qwen3(folder: Path, deep: Sequence[int] = (), **text: object) -> str:
    """The config of the tiny model of the assets, as one of Qwen3-VL has it."""
    config = json.loads((SHAPES / "config.json").read_text())
    config["model_type"] = "qwen3_vl"
    config["text_config"] |= {"model_type": "qwen3_vl_text", **text}
    config["vision_config"] |= {"num_position_embeddings": 16, "model_type": "qwen3_vl_vision"}
    config["vision_config"]["deepstack_visual_indexes"] = list(deep)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").symlink_to(SHAPES / "preprocessor_config.json")
    return str(folder)


def seeing(
    path: str,
    freeze: str | tuple[str, ...] = (),
    pp: int = 1,
    data: Any = None,
    **rollout: object,
) -> Plan:
    @rf.pipeline()
    def drawn(cfg: rf.Config) -> None:
        adam = rf.AdamW(lr=1e-3)
        actor = rf.Model("actor", path, optimizer=adam, init="random", freeze=freeze)
        prompts = ops.prompts(data or rf.data.shapes("colour"), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        adv = ops.advantage("grpo", samples, ops.reward(lambda response: 1.0, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))

    assign = {"*": rf.on("all", pp=pp), "actor.rollout": rf.on("gen", **rollout)}
    placement = rf.Placement(pools={"all": pp, "gen": 2}, assign=assign)
    devices = cpu_cluster(2 + pp, threads=1, memory=1.5e9)
    return compile_plan(drawn.trace(drawn.config()), placement, devices).plan


def test_data_with_pictures_that_is_not_loaded_is_planned() -> None:
    """A row of data has its text, of a rollout the tokens of its pictures too."""
    data = rf.data.huggingface("any/pictures", columns=["prompt"], images="image")
    plan = seeing(str(SHAPES), data=data)
    assert {a.node for a in plan.actions if a.kind == "transfer"} >= {"prompts", "actor.rollout"}


@pytest.mark.parametrize("tp", [1, 2])
def test_sglang_is_given_pictures_of_families_that_were_tried(tmp_path: Path, tp: int) -> None:
    plan = seeing(qwen3(tmp_path), engine="sglang", tp=tp)
    assert plan.instance("actor@gen/sglang").engine_plan.own_process


@pytest.mark.parametrize(
    ("mended", "how"),
    [
        (False, {"engine": "sglang"}),
        (True, {"engine": "vllm"}),
    ],
    ids=str,
)
def test_layouts_and_engines_that_bring_no_pictures_are_refused(
    tmp_path: Path, mended: bool, how: dict[str, object]
) -> None:
    with pytest.raises(PlanError, match=r"E554.*is given pictures"):
        seeing(qwen3(tmp_path) if mended else str(SHAPES), **how)


TOWER = {"image_size": 16, "patch_size": 4}
ROWS = {"model_type": "mistral3", "image_token_index": 2, "text_config": {"model_type": "mistral"}}
TILES = {"model_type": "internvl", "image_token_id": 2, "image_seq_length": 4}
SOFT = {"model_type": "gemma3", "image_token_index": 2, "mm_tokens_per_image": 4}


@pytest.mark.parametrize(
    ("config", "kind", "tower", "seen"),
    [
        (ROWS, "mistral", {"hidden_act": "silu"}, True),
        (ROWS, "mistral", {}, False),
        (ROWS | {"vision_feature_layer": -2}, "mistral", {"hidden_act": "silu"}, False),
        (TILES, "qwen3", {}, True),
        (TILES, "llama", {}, False),
        (TILES, "qwen2", {"use_mean_pooling": False}, False),
        (SOFT, "gemma3_text", {}, False),
    ],
)
def test_sglang_is_given_pictures_where_it_computes_what_the_trained_tower_does(
    config: dict[str, Any], kind: str, tower: dict[str, Any], seen: bool
) -> None:
    sight = sight_in(config | {"vision_config": TOWER | tower}, {})
    assert sight is not None
    assert seen == seen_in("sglang", kind, sight)
    assert not seen_in("vllm", kind, sight)


def moved(plan: Plan) -> int:
    """Bytes of the reshard."""
    (found,) = (a.cost.moved for a in plan.actions if a.kind == "reshard")
    assert found is not None
    return found


def test_frozen_parts_are_not_resharded(tmp_path: Path) -> None:
    """Each of two rollouts lacks what is trained, and the staging of an engine no more."""
    path = qwen3(tmp_path)
    for how in ({}, {"engine": "sglang"}):
        whole, tower, both = (
            seeing(path, freeze, **how) for freeze in ((), "vision", ("vision", "projector"))
        )
        assert moved(whole) > moved(tower) > moved(both)
        shape = read_shape(Path(path))
        assert moved(tower) == 2 * 4 * (shape.parameters - shape.seeing["vision"])
        assert moved(both) == 2 * 4 * (shape.parameters - shape.tower)


@pytest.mark.parametrize(
    ("path", "part", "message"),
    [
        (SHAPES, "visoin", "a model with projector, vision.*did you mean 'vision'"),
        (TINY, "vision", "a part for text alone.*leave out freeze="),
        ("nobody/has-this", "layers", "leave its part 'layers' as it is"),
    ],
    ids=["misspelt", "text alone", "not here"],
)
def test_a_part_that_is_not_there_is_refused(path: str | Path, part: str, message: str) -> None:
    with pytest.raises(PlanError, match=rf"(?s)E555.*{message}"):
        seeing(str(path), part)


def test_a_rollouts_copy_with_frozen_parts_is_offloaded_where_it_sleeps() -> None:
    """No update brings a frozen tower back, which the verifier would hold against a discard."""

    @rf.pipeline()
    def written(cfg: rf.Config) -> None:
        actor = rf.Model("actor", str(SHAPES), optimizer=rf.AdamW(lr=1e-3), freeze="vision")
        prompts = ops.prompts(rf.data.shapes("colour"), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        adv = ops.advantage("grpo", samples, ops.reward(lambda response: 1.0, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))

    assign = {"*": rf.on("all"), "actor.rollout": rf.on("all", weights="own")}
    placement = rf.Placement(pools={"all": 1}, assign=assign)
    graph = written.trace(written.config())
    held = "actor@all/rollout/weights"
    plan = compile_plan(graph, placement, cpu_cluster(1, threads=1, memory=4e6)).plan
    modes = {a.mode for a in plan.actions if a.part == held}
    assert modes == {"offload"}, [p.name for p in plan.parts]


@dataclass(frozen=True)
class Updated:
    """Seconds of an update beside its step, and what it holds of the tower and of layers."""

    seconds: float
    seen: int
    layers: int


def updated(freeze: tuple[str, ...], data: Any = None) -> tuple[Updated, Plan]:
    """On one H100, whose launches are not counted."""

    @rf.pipeline()
    def written(cfg: rf.Config) -> None:
        actor = rf.Model("actor", str(SHAPES), optimizer=rf.AdamW(lr=1e-3), freeze=freeze)
        prompts = ops.prompts(data or rf.data.shapes("colour"), batch=4096)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        adv = ops.advantage("grpo", samples, ops.reward(lambda response: 1.0, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))

    placement = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
    found = parse_cluster("h100:1", 1)
    cluster = replace(found, kind=replace(found.kind, launch=0.0))
    plan = compile_plan(written.trace(written.config()), placement, cluster).plan
    (run,) = (a for a in plan.actions if a.node == "actor.update")
    held = dict(run.cost.holds)
    sizes = held.get("activations of the tower", 0), held["activations"]
    return Updated(run.cost.seconds or 0.0, *sizes), plan


def test_a_tower_takes_seconds_and_memory_of_an_update_unless_it_is_frozen() -> None:
    """A frozen part has a forward alone, and leaves nothing to a backward."""
    (whole, plan), (tower, _), (both, _) = map(updated, ((), ("vision",), ("vision", "projector")))
    assert whole.seconds > tower.seconds > both.seconds
    assert whole.seen > tower.seen > both.seen == 0
    assert whole.layers == tower.layers == both.layers
    eyes = read_shape(SHAPES).eyes
    assert eyes is not None
    # 32,768 tokens a micro-batch, of rows of a prompt of 23 tokens and two responses.
    prompts = -(-(1 << 15) // (23 + 2 * 8))
    assert whole.seen == pytest.approx(
        eyes.left(prompts * 16, 4, vision=True, projector=True), rel=0.01
    )
    assert any("pictures 1 a prompt of 16 tokens (sizes in 256 rows)" in n for n in plan.inputs)


def test_pictures_of_data_that_is_not_loaded_are_assumed() -> None:
    sight = read_shape(SHAPES).sight
    found = with_picture_tokens(NOT_LOADED, rf.data.shapes("colour"), sight)
    assert found.pictures is not None
    assert found.longest == NOT_LOADED.longest + found.pictures.longest
    assert found.pictures.how == "assumed: one of 512 x 512 pixels"
    assert with_picture_tokens(NOT_LOADED, rf.data.arithmetic(), sight) == NOT_LOADED


@pytest.mark.parametrize("layout", [{"fsdp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_verifier_knows_how_much_of_a_model_is_trained(layout: Any, dtype: Any) -> None:
    """A reshard that moves frozen parts too is told of.

    Weights in bfloat16 lie beside trained ones in float32 where ranks share them.
    """

    @rf.pipeline()
    def written(cfg: rf.Config) -> None:
        adam = rf.AdamW(lr=1e-3)
        actor = rf.Model("actor", str(SHAPES), optimizer=adam, freeze="vision", dtype=dtype)
        prompts = ops.prompts(rf.data.shapes("colour"), batch=4)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        adv = ops.advantage("grpo", samples, ops.reward(lambda response: 1.0, samples))
        ops.update(actor, samples, adv, loss=rf.PolicyLoss("ppo_clip"))

    assign = {"*": rf.on("all", **layout), "actor.rollout": rf.on("gen")}
    placement = rf.Placement(pools={"all": 2, "gen": 1}, assign=assign)
    plan = compile_plan(
        written.trace(written.config()), placement, cpu_cluster(3, threads=1, memory=1e9)
    ).plan
    assert verify(plan, "notes") == []
    shape = read_shape(SHAPES)
    whole = moved(plan) * shape.parameters // (shape.parameters - shape.seeing["vision"])
    actions = tuple(
        replace(a, cost=replace(a.cost, moved=whole)) if a.kind == "reshard" else a
        for a in plan.actions
    )
    told = verify(replace(plan, actions=actions), "notes")
    assert any("its targets lack" in each for each in told)


@pytest.mark.parametrize(("layers", "pp", "cut"), [(5, 2, (3, 2)), (5, 3, (3, 1, 1)), (5, 4, ())])
def test_the_first_stage_has_the_layers_that_a_tower_adds_to(
    tmp_path: Path, layers: int, pp: int, cut: tuple[int, ...]
) -> None:
    """Of Qwen3-VL these are the first, as many as layers of the tower that are seen deep."""
    path = qwen3(tmp_path, deep=[0, 1, 1], num_hidden_layers=layers)
    if cut:
        assert seeing(path, pp=pp).instance("actor@all").stages == cut
        return
    with pytest.raises(PlanError, match=r"(?s)E531.*3 in the first.*pp=3\)"):
        seeing(path, pp=pp)


def test_each_micro_batch_under_way_has_left_its_pictures() -> None:
    """Of a pipeline's first stage, whose backwards come when the last stage has begun."""
    seen = PictureTokens(count=1, mean=16, squares=256, longest=16, how="")
    load = Load(rows=8, prompts=8, prompt=32, lengths=full_lengths(16), pictures=seen)
    roof = Roofline(kind=KINDS["h100"], shape=read_shape(SHAPES), size=2, micro_tokens=64)
    one, two = (
        dict(replace(roof, in_flight=count).pass_holds(load, train=True, recompute=False))[SEEN]
        for count in (1, 2)
    )
    assert two == 2 * one > 0
