"""Layouts of instances: pieces, what a reshard moves and how, what memory takes."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pydantic import ValidationError

import rlflow as rf
from rlflow.errors import PlanError
from rlflow.graph.graph import Graph
from rlflow.graph.placement import Recompute
from rlflow.scheduler.compile import compile_plan, dump_plan
from rlflow.scheduler.costs.layouts import (
    CUTS,
    common,
    grid_of,
    held_in_place,
    lacking,
    parameters_per_rank,
    piece,
    shares,
    size,
)
from rlflow.scheduler.devices.cluster import KINDS, Cluster, cpu_cluster
from rlflow.scheduler.models.shapes import Shape, read_shape, trained_parameters
from rlflow.scheduler.plan.plan import Action, Instance, Plan
from rlflow.scheduler.plan.saved import read_plan
from tests.scheduler.examples import OWN, SPLIT, TWICE, compiled_with, grpo
from tests.scheduler.strategies import PLENTY

LAYERS = 6
STAGES = {1: (), 2: (2, 4), 3: (1, 3, 2), 4: (1, 2, 2, 1), 6: (1,) * 6}
SIDE = 48
# What is no part of layers: a tower that sees, an embedding, a head, what is both.
BESIDE = ("tower", "first", "last", "ends")


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """A layout over up to eight of twelve devices, in any order."""
    sizes = [(1, 1, 2, 1), (2, 2, 2, 1), (4, 2, 1, 1), (4, 1, 2, 1), (2, 2, 1, 2), (1, 1, 2, 3)]
    fsdp, tp, copies, pp = draw(st.sampled_from(sizes))
    virtual = draw(st.sampled_from([1, 2] if pp > 1 else [1]))
    devices = draw(st.permutations(range(12)))[: fsdp * tp * copies * pp]
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if fsdp % n == 0]))
    cp = draw(st.sampled_from([n for n in (1, 2, 4) if fsdp % n == 0]))
    whole = made(tuple(devices), fsdp // cp, tp, ep, cp)
    return replace(whole, pp=pp, virtual=virtual, stages=STAGES[pp * virtual])


def made(
    devices: tuple[int, ...], fsdp: int = 1, tp: int = 1, ep: int = 1, cp: int = 1
) -> Instance:
    return Instance(
        name="m@p",
        model="m",
        pool="p",
        devices=devices,
        uses=("forward",),
        trained=False,
        fsdp=fsdp,
        tp=tp,
        ep=ep,
        cp=cp,
    )


def cells(instance: Instance, device: int, how: str) -> set[tuple[int, int, int]]:
    """The elements of `LAYERS` matrices of `SIDE` x `SIDE` that a device holds, one by one.

    What is beside layers is one matrix.
    """
    place = instance.devices.index(device) // instance.stage_ranks % instance.pp
    layers = instance.stages or (LAYERS,)
    stages = range(place, len(layers), instance.pp)
    mine = [n for s in stages for n in range(sum(layers[:s]), sum(layers[: s + 1]))]
    if how in BESIDE:
        first, last = place == 0, place == instance.pp - 1
        there = {"tower": first, "first": first, "last": last, "ends": first or last}
        mine = [0] * there[how]
    return {(layer, *each) for layer in mine for each in _cells(instance, device, how)}


def count(how: str) -> int:
    return SIDE**2 * (1 if how in BESIDE else LAYERS)


def _cells(instance: Instance, device: int, how: str) -> set[tuple[int, int]]:
    rank = instance.devices.index(device)
    layer, shard = rank % instance.tp, rank // instance.tp % instance.shards
    rows, columns = list(range(SIDE)), list(range(SIDE))
    if how in ("columns", "experts", "first", "last", "ends"):
        rows = rows[layer * SIDE // instance.tp : (layer + 1) * SIDE // instance.tp]
    if how == "rows":
        columns = columns[layer * SIDE // instance.tp : (layer + 1) * SIDE // instance.tp]
    if how == "experts":  # Those of this rank along ep, then what is left of fsdp.
        beside = shard % instance.ep
        rows = rows[beside * len(rows) // instance.ep :][: len(rows) // instance.ep]
        each = len(rows) * instance.ep // instance.shards
        rows = rows[shard // instance.ep * each :][:each]
        return {(row, column) for row in rows for column in columns}
    each = len(rows) // instance.shards
    rows = rows[shard * each : (shard + 1) * each]
    return {(row, column) for row in rows for column in columns}


@given(one=instances(), other=instances())
def test_pieces_and_overlaps_are_those_of_matrices_counted_by_element(
    one: Instance, other: Instance
) -> None:
    grid = grid_of(one, other)
    whole = math.prod(grid)
    for how in CUTS:
        for device in set(one.devices) & set(other.devices):
            mine, theirs = cells(one, device, how), cells(other, device, how)
            each = [piece(i, i.devices.index(device), how, grid) for i in (one, other)]
            assert Fraction(len(mine), count(how)) == Fraction(size(each[0]), whole)
            assert Fraction(len(mine & theirs), count(how)) == Fraction(common(*each), whole)


@given(source=instances(), target=instances())
def test_what_is_lacking_is_what_no_process_of_the_target_holds(
    source: Instance, target: Instance
) -> None:
    found = lacking(source, target)
    for how in CUTS:
        missing = 0
        for device in target.devices:
            held = cells(source, device, how) if device in source.devices else set()
            missing += len(cells(target, device, how) - held)
        assert Fraction(missing, count(how)) == found[how]
    assert held_in_place(source, target) is (sum(found.values()) == 0)


@given(instance=instances())
def test_ranks_hold_every_parameter_once_for_each_replica(instance: Instance) -> None:
    for how in CUTS:
        times = instance.tp if how in ("whole", "tower") else 1
        times *= 2 if how == "ends" and instance.pp > 1 else 1
        grid = grid_of(instance)
        held = sum(size(piece(instance, r, how, grid)) for r in range(len(instance.devices)))
        assert held == instance.replicas * times * math.prod(grid)
        assert lacking(None, instance)[how] == instance.replicas * times


def shape(path: str = "models/mid") -> Shape:
    from pathlib import Path

    return read_shape(Path(path))


def test_parameters_are_counted_by_how_they_are_cut() -> None:
    found = shape()
    counts = shares(found)

    assert found.parameters == sum(counts.values())
    attention_out, down = 4 * 64 * 256, 4 * 256 * 256
    assert 2 * (attention_out + down) == counts["rows"]
    norms = (2 * 2 + 1) * 256
    assert norms == counts["whole"]
    whole_and_cut = norms + (found.parameters - norms) // 2
    assert whole_and_cut // 2 == parameters_per_rank(made((0, 1, 2, 3), 2, 2), counts)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ({}, "x4"),
        ({"fsdp": 4}, "fsdp=4"),
        ({"fsdp": 2}, "fsdp=2 x2"),
        ({"fsdp": 2, "tp": 2}, "fsdp=2 tp=2"),
        ({"fsdp": 2, "ep": 2}, "fsdp=2 ep=2 x2"),
        ({"fsdp": 2, "cp": 2}, "fsdp=2 cp=2"),
        ({"cp": 2, "tp": 2}, "cp=2 tp=2"),
        ({"pp": 2, "tp": 2}, "pp=2 tp=2"),
        ({"tp": 2, "recompute": True}, "tp=2 x2 recompute"),
        ({"tp": 4, "offload": "layers"}, "tp=4 offload=layers"),
    ],
)
def test_layouts_are_printed(layout: dict[str, object], text: str) -> None:
    assert text == replace(made((0, 1, 2, 3)), **layout).layout()


def reshards(plan: Plan) -> list[Action]:
    return [action for action in plan.actions if action.kind == "reshard"]


def resharded(
    train: dict[str, int], gen: dict[str, int], *, apart: bool = False, hosts: int = 1
) -> tuple[Plan, Action]:
    """The reshard from four training devices to a rollout on the same or on four others."""
    pools = {"all": 4, "gen": 4} if apart else {"all": 4}
    where = rf.on("gen" if apart else "all", weights="own", **gen)
    assign = {"*": rf.on("all", **train), "actor.rollout": where}
    placement = rf.Placement(pools=pools, assign=assign)
    devices = replace(cpu_cluster(8, threads=1, memory=PLENTY), hosts=hosts)
    plan = compile_plan(grpo(), placement, devices).plan
    (reshard,) = reshards(plan)
    return plan, reshard


@pytest.mark.parametrize(
    ("train", "gen", "apart", "transport", "times"),
    [
        ({"fsdp": 1, "tp": 1}, {}, False, "copy", 4),
        ({"fsdp": 4}, {"fsdp": 4}, False, "copy", 1),
        ({"fsdp": 4}, {}, False, "shared memory", 4 - 1),
        ({"fsdp": 2, "tp": 2}, {"tp": 2}, False, "shared memory", 2 - 1),
        ({"fsdp": 1, "tp": 1}, {"tp": 2}, False, "copy", 2),
        ({"fsdp": 4}, {}, True, "shared memory", 4),
        ({"fsdp": 4}, {"tp": 2}, True, "shared memory", 2),
    ],
)
def test_a_reshard_moves_what_the_targets_ranks_lack(
    train: dict[str, int], gen: dict[str, int], apart: bool, transport: str, times: int
) -> None:
    plan, reshard = resharded(train, gen, apart=apart)

    assert transport == reshard.transport
    found = shape()
    norms = 4 * found.norms * len(reshard.devices)
    assert 0 <= (reshard.cost.moved or 0) - times * 4 * found.parameters <= norms
    assert f"by {transport} (" in "".join(_lines(plan))


def _lines(plan: Plan) -> list[str]:
    from rlflow.scheduler.plan.text import plan_text

    return plan_text(plan).splitlines()


def test_weights_go_by_collectives_between_hosts_and_gpus() -> None:
    assert "collective" == resharded({"fsdp": 4}, {}, apart=True, hosts=2)[1].transport
    assert "copy" == resharded({"fsdp": 1}, {}, hosts=2)[1].transport
    gpus = Cluster(kind=replace(KINDS["h100"], memory=PLENTY), count=2)
    (reshard,) = reshards(compile_plan(grpo(), SPLIT, gpus).plan)
    assert "collective" == reshard.transport
    assert ["copy"] == [a.transport for a in reshards(compiled_with(grpo(), OWN).plan)]


def test_targets_with_a_device_in_common_share_one_pass() -> None:
    """actor@train -> actor@gen (forwards, fsdp=2) and its copy for rollouts (x2)."""
    plan = compiled_with(grpo(epochs=2), TWICE).plan
    (reshard,) = reshards(plan)

    assert "reshard:actor@train->actor@gen+actor@gen/rollout" == reshard.id
    assert ("actor@gen", "actor@gen/rollout") == reshard.targets
    assert (("actor@gen", -1), ("actor@gen/rollout", -1)) == reshard.writes
    whole = 4 * shape().parameters
    assert reshard.cost.moved == whole + 2 * whole
    for reader in ("actor.rollout", "actor.log_probs", "eval"):
        assert reshard.id in [dep.action for dep in plan.action(reader).after]


def test_targets_that_would_wait_for_each_other_are_filled_apart() -> None:
    assign = {
        "*": rf.on("train"),
        "actor.rollout": rf.on("gen"),
        "actor.forward": rf.on("look"),
    }
    placement = rf.Placement(pools={"train": 1, "gen": 1, "look": 1}, assign=assign)

    assert 2 == len(reshards(compiled_with(grpo(epochs=2), placement).plan))


def test_targets_that_are_filled_at_other_times_are_filled_apart() -> None:
    assign = {
        "*": rf.on("train"),
        "actor.rollout": rf.on("gen"),
        "actor.forward": rf.on("gen", fsdp=2),
        "eval": rf.on("look"),
    }
    placement = rf.Placement(pools={"train": [0], "gen": [1, 2], "look": [2]}, assign=assign)
    plan = compiled_with(grpo(epochs=2, every=3), placement).plan

    assert [1, 3] == sorted(reshard.every for reshard in reshards(plan))


def test_targets_that_do_not_fit_together_are_filled_apart() -> None:
    assign = {
        "*": rf.on("all"),
        "actor.rollout": rf.on("all", weights="own"),
        "actor.forward": rf.on("look"),
    }
    placement = rf.Placement(pools={"all": [0], "look": [0]}, assign=assign)
    together = compiled_with(grpo(epochs=2), placement).plan
    (reshard,) = reshards(together)
    weights = 4 * shape().parameters
    tight = compiled_with(grpo(epochs=2), placement, memory=int(6.5 * weights)).plan
    assert 1 == len(reshards(tight))
    with pytest.raises(PlanError, match="E401"):
        compiled_with(grpo(epochs=2), placement, memory=int(2.5 * weights))


def test_recomputing_takes_less_memory_and_a_forward_more() -> None:
    plans = [
        compiled_with(grpo(), rf.Placement(pools={"all": 1}, assign={"*": where})).plan
        for where in (rf.on("all"), rf.on("all", recompute=True))
    ]
    plain, recomputed = (plan.action("actor.update").cost for plan in plans)

    assert plain.seconds is not None
    assert recomputed.seconds is not None
    assert plain.seconds < recomputed.seconds < 4 / 3 * plain.seconds  # the step stays as it is
    assert (plain.transient or 0) > (recomputed.transient or 0)
    assert ["whole recompute", "whole"] == [i.layout() for i in plans[1].instances]


def test_an_update_says_what_is_recomputed_for_all_uses_of_its_weights() -> None:
    def placed(one: Recompute | None, other: Recompute | None) -> Plan:
        wheres = (rf.on("all", recompute=said) for said in (one, other))
        assign = dict(zip(("*", "actor.rollout"), wheres, strict=True))
        return compiled_with(grpo(), rf.Placement(pools={"all": 1}, assign=assign)).plan

    assert placed(None, True).instances[0].recompute
    assert placed(True, None).instances[0].recompute
    assert placed(1, 1).instances[0].recomputes == 1
    assert placed(True, False).instances[0].recompute  # a rollout has no backward
    assert placed(1, True).instances[0].recomputes == 1
    assert not placed(False, True).instances[0].recompute


@pytest.mark.parametrize(
    ("said", "printed"),
    [(True, "recompute"), ("selective", "recompute=selective"), (1, "recompute=1")],
)
def test_what_is_recomputed_is_printed_and_saved(
    said: Recompute, printed: str, tmp_path: Path
) -> None:
    where = rf.on("all", recompute=said)
    plan = compiled_with(grpo(), rf.Placement(pools={"all": 1}, assign={"*": where})).plan
    (tmp_path / "plan.json").write_text(dump_plan(plan))

    assert plan.instances[0].layout() == f"whole {printed}"
    assert read_plan(tmp_path / "plan.json").instances[0] == plan.instances[0]
    assert repr(plan.instances[0].recomputes) == repr(said)
    assert where.describe() == f"all recompute={said}"
    many = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all", recompute=99)})
    with pytest.raises(PlanError, match=r"E253.*recomputes 99 layers"):
        compiled_with(grpo(), many)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "full", "true"])
def test_what_is_recomputed_is_one_of_three_forms(wrong: object) -> None:
    with pytest.raises(ValidationError, match="recompute"):
        rf.on("all", recompute=wrong)


def test_layers_of_a_frozen_model_come_in_two_at_a_time() -> None:
    assign = {"*": rf.on("all"), "ref": rf.on("all", offload="layers")}
    plan = compiled_with(
        grpo(path="models/wide"), rf.Placement(pools={"all": 2}, assign=assign)
    ).plan
    found = shape("models/wide")
    ref = plan.instance("ref@all")

    assert ("x2 offload=layers", 1) == (ref.layout(), ref.fsdp)
    assert 4 * (found.embedding + 2 * found.layer) == plan.part("ref@all/weights").size
    whole = compiled_with(grpo(path="models/wide"), rf.Placement(
        pools={"all": 2}, assign={"*": rf.on("all"), "ref": rf.on("all", fsdp=1)}
    )).plan  # fmt: skip
    assert (plan.part("ref@all/weights").size or 0) < (whole.part("ref@all/weights").size or 0)


@pytest.mark.parametrize(
    "assign",
    [
        {"*": rf.on("all"), "actor": rf.on("all", offload="layers")},
        {"*": rf.on("all"), "actor.rollout": rf.on("all", weights="own", offload="layers")},
        {"*": rf.on("all"), "ref": rf.on("all", offload="layers", fsdp=2)},
        {"*": rf.on("all"), "ref": rf.on("all", offload="layers", tp=2)},
    ],
)
def test_layers_come_in_whole_and_are_never_written(assign: dict[str, rf.On]) -> None:
    with pytest.raises(PlanError) as found:
        compiled_with(grpo(), rf.Placement(pools={"all": 2}, assign=assign))

    assert ["E218"] == [finding.code for finding in found.value.findings]


def test_tp_has_to_divide_the_feed_forward_width_too(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = replace(shape(), sides=(1023,))
    monkeypatch.setattr("rlflow.scheduler.compile.model_shape", lambda *_: odd)
    placement = rf.Placement(pools={"all": 2}, assign={"*": rf.on("all", tp=2)})
    with pytest.raises(PlanError, match="does not divide the feed-forward width") as found:
        compiled_with(grpo(), placement, name="of another width")

    assert {"E213"} == {finding.code for finding in found.value.findings}


def with_adapters(graph: Graph, dtype: str = "float32", **adapters: object) -> Graph:
    """The same pipeline with an actor that trains adapters, or in another dtype."""
    lora = rf.LoRA(**adapters) if adapters else None
    models = tuple(
        rf.Model(m.name, m.path, optimizer=m.optimizer, dtype=dtype, lora=lora)
        if m.optimizer is not None
        else m
        for m in graph.models
    )
    return replace(graph, models=models)


def sizes(plan: Plan) -> dict[str, int | None]:
    return {part.name.removeprefix("actor@"): part.size for part in plan.parts}


@pytest.mark.parametrize(
    ("devices", "dtype", "weights", "gradients", "moments"),
    [
        (1, "float32", 4, 4, 8),
        (1, "bfloat16", 2, 6, 12),
        (2, "float32", 4, 4, 8),
        (2, "bfloat16", 4, 4, 8),
        (2, "float64", 8, 8, 16),
    ],
)
def test_parts_have_the_bytes_that_training_takes(
    devices: int, dtype: str, weights: int, gradients: int, moments: int
) -> None:
    """Below float32 gradients are summed, and weights kept once more, in float32, beside.

    Ranks that share the weights keep them in float32 alone.
    """
    placement = rf.Placement(pools={"all": devices}, assign={"*": rf.on("all")})
    found = sizes(compiled_with(with_adapters(grpo(), dtype), placement).plan)
    each = shape().parameters // devices

    assert each * weights == found["all/weights"]
    assert each * gradients == found["all/gradients"]
    assert each * moments == found["all/optimizer"]


def test_gradients_and_moments_are_of_adapters_alone_and_only_they_travel() -> None:
    graph = with_adapters(grpo(), rank=4, targets=("q_proj", "down_proj"))
    plan = compiled_with(graph, SPLIT).plan
    found, (reshard,) = sizes(plan), reshards(plan)
    adapters = 2 * 4 * ((256 + 256) + (1024 + 256))

    assert adapters == trained_parameters(graph.model("actor"), shape())
    assert 4 * (shape().parameters + adapters) == found["train/weights"]
    assert 4 * adapters == found["train/gradients"] == reshard.cost.moved
    assert 8 * adapters == found["train/optimizer"]


def test_adapters_of_a_layer_of_unknown_widths_have_no_size() -> None:
    graph = with_adapters(grpo(), rank=4, targets=("q_proj", "in_proj"))

    assert None is sizes(compiled_with(graph, SPLIT).plan)["train/gradients"]


def test_weights_that_adapters_alone_would_fill_are_never_discarded() -> None:
    graph = with_adapters(grpo(path="models/wide", every=0), rank=4)
    modes = {
        mutant: {
            a.mode
            for a in compiled_with(mutant, OWN, share=share).plan.actions
            if a.part == "actor@all/rollout/weights"
        }
        for mutant, share in ((grpo(path="models/wide", every=0), 0.75), (graph, 0.9))
    }

    assert [{"discard"}, {"offload"}] == list(modes.values())


@pytest.mark.parametrize("share", [0.9, 0.7])
def test_gradients_are_given_up_before_anything_that_has_to_be_kept(share: float) -> None:
    plan = compiled_with(grpo(path="models/wide"), OWN, share=share).plan
    gradients = "actor@all/gradients"
    awake = set(plan.awake_at_start)
    given_up = 0

    assert gradients in plan.action("actor.update").needs
    for number, action in enumerate(plan.actions):
        following = next(a for a in plan.actions[number:] if a.kind not in ("sleep", "wake"))
        if action.kind == "sleep" and action.part == gradients:
            given_up += 1
            assert ("discard", 0) == (action.mode, action.cost.moved)
        elif action.kind == "sleep" and gradients not in following.needs:
            assert gradients not in awake
        (awake.discard if action.kind == "sleep" else awake.add)(action.part or "")
    assert given_up


def test_transients_leave_gradients_to_their_part() -> None:
    plan = compiled_with(grpo(), SPLIT).plan
    update, found = plan.action("actor.update"), shape()
    held = sum(plan.part(name).size or 0 for name in update.needs)

    assert held == found.parameters * (4 + 4 + 8)
    assert update.peak == held + (update.cost.transient or 0)
    assert (update.cost.transient or 0) < 4 * found.parameters
