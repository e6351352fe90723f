"""Weights in float8 by blocks: values, bounds, names, and how they travel."""

from __future__ import annotations

import math

import pytest
import torch

from rlflow.engines.reshard import quantised
from rlflow.engines.reshard.bucket_layout import scratch_bytes, slot_bytes, weight_buckets
from rlflow.engines.reshard.quantised import dequantised, in_blocks, quantise
from tests.engines import reshard_ranks, stream_ranks
from tests.engines.reshard_layouts import tables

pytestmark = pytest.mark.torch

# Every number of float8_e4m3fn that is not negative, in order: 126 above nothing, 448 the largest.
NUMBERS = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def float32(value):
    return float(torch.tensor(value, dtype=torch.float64).float())


def by_hand(weight):
    """Number by number in float64: the codes, and the scales that are float32 numbers."""
    rows, columns = weight.shape
    scales = torch.zeros(math.ceil(rows / 128), math.ceil(columns / 128))
    codes = torch.zeros(rows, columns, dtype=torch.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            block = weight[at].double()
            scale = max(float32(float(block.abs().max()) / 448), 2.0**-126)
            scales[i, j] = scale
            # A quotient of float32 numbers rounded to float64 and then to float32 is as if once.
            asked = (block / scale).float().double()
            apart = (asked.abs()[..., None] - NUMBERS).abs()
            nearest = apart.amin(-1, keepdim=True)
            even = torch.where(apart == nearest, torch.arange(127) % 2, 2).argmin(-1)
            codes[at] = even.to(torch.uint8) + 128 * asked.signbit()
    return codes, scales


def drawn(shape, dtype=torch.bfloat16, seed=0):
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=source) * 0.02).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 128), (256, 130), (7, 300), (1, 1)])
def test_values_and_scales_are_those_of_a_float64_reference(shape, dtype):
    weight = drawn(shape, dtype)
    values, scales = quantise(weight)
    codes, wanted = by_hand(weight)
    assert torch.equal(wanted, scales)
    assert torch.equal(codes, values.view(torch.uint8))


def test_ties_go_to_even_and_the_largest_number_is_448():
    weight = torch.zeros(128, 128)
    # At a scale of 1: halfway between numbers at 17 (16 and 18) and at 19 (18 and 20).
    weight[0, :4] = torch.tensor([448.0, 17.0, 19.0, -0.0])
    values, scales = quantise(weight)
    assert 1.0 == float(scales[0, 0])
    assert [448.0, 16.0, 20.0, 0.0] == values[0, :4].float().tolist()


def test_blocks_of_zeros_and_of_tiny_numbers_stay_finite():
    weight = torch.zeros(128, 256)
    weight[5, 200] = 1e-40
    values, scales = quantise(weight)
    assert torch.isfinite(scales).all()
    assert 0.0 == float(values[:, :128].float().abs().max())
    back = dequantised(values, scales, torch.float32)
    assert 1e-40 == pytest.approx(float(back[5, 200]), rel=1 / 16)
    assert 1 == int((back != 0).sum())


def test_a_weight_comes_back_within_half_a_step():
    """A sixteenth of itself, or half of the least number of its block's scale."""
    weight = drawn((384, 200), torch.float32)
    values, scales = quantise(weight)
    back = dequantised(values, scales, torch.float32)
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:384, :200]
    bound = torch.maximum(weight.abs() / 16, wide * 2.0**-10) * (1 + 1e-6)
    assert bool(((weight - back).abs() <= bound).all())
    assert float((weight - back).abs().max()) > 0


def test_a_weight_is_quantised_a_few_rows_at_a_time(monkeypatch):
    weight = drawn((700, 300))
    values, scales = quantise(weight)
    monkeypatch.setattr(quantised, "AT_ONCE", 1)
    again, its = quantise(weight)
    assert torch.equal(values.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(scales, its)


MODEL = {
    "model.embed_tokens.weight": (320, 128),
    "model.layers.0.self_attn.q_proj.weight": (256, 128),
    "model.layers.0.self_attn.q_proj.bias": (256,),
    "model.layers.0.self_attn.q_proj.lora_A": (8, 128),
    "model.layers.0.mlp.down_proj.weight": (128, 320),
    "model.layers.0.mlp.gate.weight": (4, 128),
    "model.norm.weight": (128,),
    "lm_head.weight": (320, 128),
}


def test_the_names_shapes_and_dtypes_are_those_of_a_checkpoint_in_blocks():
    made = in_blocks({name: drawn(shape) for name, shape in MODEL.items()})
    told = {name: (tuple(t.shape), t.dtype) for name, t in made.items()}
    wanted = {name: (shape, torch.bfloat16) for name, shape in MODEL.items()}
    attention, inside = (
        f"model.layers.0.{n}.weight" for n in ("self_attn.q_proj", "mlp.down_proj")
    )
    wanted[attention] = (256, 128), torch.float8_e4m3fn
    wanted[inside] = (128, 320), torch.float8_e4m3fn
    wanted[f"{attention}_scale_inv"] = (2, 1), torch.float32
    wanted[f"{inside}_scale_inv"] = (1, 3), torch.float32
    assert wanted == told
    names = list(made)
    assert names.index(attention) + 1 == names.index(f"{attention}_scale_inv")


PARAMS = {
    "embed_tokens.weight": (40, 12),
    "layers.0.self_attn.q_proj.weight": (140, 12),
    "layers.0.self_attn.q_proj.bias": (140,),
    "layers.0.mlp.up_proj.weight": (16, 300),
    "layers.0.mlp.down_proj.weight": (12, 16),
    "norm.weight": (7,),
}


def in_float8(params):
    """The table of an engine that holds some parameters in blocks."""
    plain = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in params.items()}
    return {
        name: (tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in in_blocks(plain).items()
    }


@pytest.mark.parametrize("limit", [600, 8000, 1 << 20])
def test_a_weight_and_its_scales_are_in_one_bucket_aligned_and_half_as_large(limit):
    table = in_float8(MODEL)
    buckets = weight_buckets(table, limit, [0])
    for bucket in buckets:
        rows = {row[0]: row for row in bucket.rows}
        for name, (_, dtype, shape, begin) in rows.items():
            assert begin % (16 if bucket.quantised else 2) == 0
            if dtype == "float8_e4m3fn":
                assert f"{name}_scale_inv" in rows
                assert begin + math.prod(shape) <= bucket.bytes
        units = len(bucket.gathered.rows)
        assert bucket.gathered.bytes <= limit or (1, 0) == (units, bucket.slot)
        if bucket.quantised:
            elements = sum(math.prod(shape) for _, _, shape, _ in bucket.gathered.rows)
            assert 2 * elements == bucket.gathered.bytes
            assert elements <= bucket.bytes <= 1.01 * elements + 16 * len(rows)
    assert list(table) == [row[0] for bucket in buckets for row in bucket.rows]
    assert scratch_bytes(buckets) == max(b.gathered.bytes for b in buckets if b.quantised)
    assert slot_bytes(buckets)[1] <= limit


@pytest.mark.rows(2)
@pytest.mark.parametrize("limit", [600, 1 << 20])
@pytest.mark.parametrize(
    ("layout", "ranks", "replicas"),
    [("fsdp", [0, 1], [[0, 1]]), ("tp rows", [0, 1], [[2], [3]]), ("whole", [0], [[1, 2]])],
)
def test_an_engine_in_float8_opens_what_its_weights_are_quantised_to(
    world, layout, ranks, replicas, limit
):
    """Whatever ranks hold, in float32: the same as of whole weights in bfloat16."""
    source = tables(PARAMS, layout, ranks)
    found = world(4).run(
        reshard_ranks.in_group,
        4,
        stream_ranks.quantised,
        source,
        in_float8(PARAMS),
        replicas,
        limit,
    )
    names = {name for names, _, _ in found for name in names}
    assert {*in_float8(PARAMS)} <= names
    for _, scratch, wrong in found:
        assert [] == wrong
        # Of the largest that a rank gathers, in bfloat16: nothing, one matrix, or two of the MLP.
        assert scratch in {0, 2 * 12 * 16, 2 * 140 * 12, 2 * 16 * 300, 2 * (16 * 300 + 12 * 16)}
    assert [0, 0] == [scratch for _, scratch, _ in found][2:]
    assert any(scratch for _, scratch, _ in found)


def test_what_was_damaged_before_or_after_quantising_is_told_apart(world):
    source = tables(PARAMS, "fsdp", [0, 1])
    run = world(4).run
    up = "layers.0.mlp.up_proj.weight"
    for where, wanted in (("gathered", f"{up} before it is quantised"), ("lent", up)):
        found = run(
            reshard_ranks.in_group,
            4,
            stream_ranks.damaged_quantised,
            source,
            in_float8(PARAMS),
            [[2, 3]],
            where,
        )
        assert [[wanted]] * 4 == found
