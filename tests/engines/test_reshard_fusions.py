"""Fused parameters: a shard under tensor parallelism is the shards of its parts in a row.

q_proj [4 rows] -+                     rank 0: q0 q1 k0 v0
k_proj [2 rows] -+-> qkv_proj, TP 2 ->
v_proj [2 rows] -+                     rank 1: q2 q3 k1 v1
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.engines.reshard.fusions import (
    LLAMA_FUSIONS,
    TIED_HEAD,
    FusionRule,
    tensor_parallel_tables,
)
from rlflow.engines.reshard.slices import minimum_bytes, plan_moves, plan_targets
from rlflow.errors import RunError
from tests.engines.reshard_layouts import carried_out, lacking, tables, whole_arrays

P = "model.layers.0."


def llama(heads, kv_heads, head, hidden, width):
    """Shapes of a layer with biases on the attention, and what is around it."""
    attention, mlp = f"{P}self_attn.", f"{P}mlp."
    return {
        "model.embed_tokens.weight": (8, hidden),
        f"{attention}q_proj.weight": (heads * head, hidden),
        f"{attention}q_proj.bias": (heads * head,),
        f"{attention}k_proj.weight": (kv_heads * head, hidden),
        f"{attention}k_proj.bias": (kv_heads * head,),
        f"{attention}v_proj.weight": (kv_heads * head, hidden),
        f"{attention}v_proj.bias": (kv_heads * head,),
        f"{attention}o_proj.weight": (hidden, heads * head),
        f"{mlp}gate_proj.weight": (width, hidden),
        f"{mlp}up_proj.weight": (width, hidden),
        f"{mlp}down_proj.weight": (hidden, width),
        f"{P}input_layernorm.weight": (hidden,),
    }


def shard(array, dim, rank, n):
    return np.split(array, n, axis=dim)[rank]


def tp_by_hand(values, rank, n, kv_heads):
    """What rank i of n of an engine holds: its heads, its share of the MLP, fused."""
    a, m = f"{P}self_attn.", f"{P}mlp."
    kv = min(n, kv_heads)
    found = {
        f"{a}o_proj.weight": shard(values[f"{a}o_proj.weight"], 1, rank, n),
        f"{m}down_proj.weight": shard(values[f"{m}down_proj.weight"], 1, rank, n),
        "model.embed_tokens.weight": shard(values["model.embed_tokens.weight"], 0, rank, n),
        f"{P}input_layernorm.weight": values[f"{P}input_layernorm.weight"],
    }
    for kind in ("weight", "bias"):
        q = shard(values[f"{a}q_proj.{kind}"], 0, rank, n)
        k, v = (
            shard(values[f"{a}{part}_proj.{kind}"], 0, rank * kv // n, kv) for part in ("k", "v")
        )
        found[f"{a}qkv_proj.{kind}"] = np.concatenate([q, k, v])
    gate, up = (shard(values[f"{m}{part}_proj.weight"], 0, rank, n) for part in ("gate", "up"))
    found[f"{m}gate_up_proj.weight"] = np.concatenate([gate, up])
    return found


@given(
    st.sampled_from([(4, 1), (4, 2), (4, 4), (8, 2)]),
    st.integers(1, 3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["whole", "fsdp", "hsdp", "fsdp x tp"]),
    st.sampled_from([0, 1, 4]),
)
def test_fused_shards_are_the_shards_of_their_parts(heads, head, n, layout, first):
    params = llama(*heads, head, hidden=4, width=8)
    source = tables(params, layout, [0, 1, 2, 3])
    shapes = {name: (shape, "float32") for name, shape in params.items()}
    found = tensor_parallel_tables(shapes, n, rules=LLAMA_FUSIONS, kv_heads=heads[1])
    target = {first + rank: table for rank, table in enumerate(found)}

    moves = plan_moves(source, target, rules=LLAMA_FUSIONS)
    made, arrived = carried_out(source, [target], moves)

    assert max((count.max() for count in arrived.values()), default=1) == 1
    for rank in range(n):
        expected = tp_by_hand(whole_arrays(source), rank, n, heads[1])
        mine = {name: made[0, first + rank, name] for name in found[rank]}
        assert set(expected) == set(mine)
        assert {k: v.tolist() for k, v in expected.items()} == {
            k: v.tolist() for k, v in mine.items()
        }


def test_bytes_of_fused_targets_are_those_of_their_parts():
    params = llama(4, 2, 2, hidden=4, width=8)
    source = tables(params, "fsdp", [0, 1])
    shapes = {name: (shape, "float32") for name, shape in params.items()}
    plain, fused = (
        dict(enumerate(tensor_parallel_tables(shapes, 2, rules=rules)))
        for rules in ((), LLAMA_FUSIONS)
    )

    least = minimum_bytes(source, fused, LLAMA_FUSIONS)

    by_hand = {
        rank: 4 * sum(int(mask.sum()) for mask in lacking(source, [plain], rank).values())
        for rank in plain
    }
    assert by_hand == minimum_bytes(source, plain) == least
    moves = plan_moves(source, fused, rules=LLAMA_FUSIONS)
    assert least == {
        rank: sum(m.bytes for m in moves if m.travels and m.receiver == rank) for rank in fused
    }


def test_a_tied_head_is_the_embedding_and_travels_once():
    source = tables({"model.embed_tokens.weight": (4, 2)}, "whole", [0])
    both = {"model.embed_tokens.weight": (4, 2), "lm_head.weight": (4, 2)}
    target = tables(both, "whole", [1])

    (move,) = plan_moves(source, target, rules=(TIED_HEAD,))
    made, _ = carried_out(source, [target], [move])

    assert 32 == move.bytes == minimum_bytes(source, target, (TIED_HEAD,))[1]
    assert {"model.embed_tokens.weight", "lm_head.weight"} == {p.name for p in move.places}
    head, embedding = made[0, 1, "lm_head.weight"], made[0, 1, "model.embed_tokens.weight"]
    assert head.tolist() == embedding.tolist()


def test_only_the_named_parts_of_a_fused_parameter_are_written():
    params = {"a.q_proj.weight": (2, 1), "a.k_proj.weight": (2, 1), "a.v_proj.weight": (2, 1)}
    source = tables(params, "whole", [0])
    target = tables({"a.qkv_proj.weight": (6, 1)}, "whole", [0])

    moves = plan_targets(source, [target], rules=LLAMA_FUSIONS, only=frozenset({"a.k_proj.weight"}))
    made, _ = carried_out(source, [target], moves)

    assert [-1, -1, 3.25, 4.25, -1, -1] == made[0, 0, "a.qkv_proj.weight"].flatten().tolist()


def test_a_rule_may_fuse_along_another_dimension():
    rule = FusionRule(target="{p}.ab", parts=("{p}.a", "{p}.b"), dim=1)
    source = tables({"x.a": (2, 2), "x.b": (2, 2)}, "fsdp", [0, 1])
    target = tables({"x.ab": (2, 4)}, "tp rows", [0, 1])

    made, _ = carried_out(source, [target], plan_moves(source, target, rules=(rule,)))

    assert [[1.25, 5.25], [3.25, 7.25]] == made[0, 0, "x.ab"].tolist()
    assert [[2.25, 6.25], [4.25, 8.25]] == made[0, 1, "x.ab"].tolist()


def refused(source, target):
    with pytest.raises(RunError) as caught:
        plan_moves(source, target, rules=LLAMA_FUSIONS)
    return str(caught.value)


def test_fused_parameters_that_do_not_come_out_are_refused():
    gate_up = {"m.gate_proj.weight": (6, 2), "m.up_proj.weight": (6, 2)}
    source = tables(gate_up, "whole", [0])
    name = "m.gate_up_proj.weight"

    uneven = {0: {name: ((12, 2), "float32", ((0, 5), (0, 2)))}}
    quarters = tables({name: (12, 2)}, "fsdp", [0, 1, 2, 3])
    assert "not one of equal parts" in refused(source, uneven)
    assert "does not divide over 4 ranks" in refused(source, quarters)
    assert "do not make up its shape" in refused(source, tables({name: (13, 2)}, "whole", [0]))
    assert "do not make up its shape" in refused(source, tables({name: (12, 3)}, "whole", [0]))
    half = tables({"m.gate_proj.weight": (6, 2)}, "whole", [0])
    assert "m.up_proj.weight" in refused(half, tables({name: (12, 2)}, "whole", [0]))


def test_heads_and_ranks_that_do_not_divide_are_refused():
    shapes = {"a.k_proj.weight": ((6, 2), "float32")}

    for n, kv_heads in ((4, None), (4, 3), (4, 6)):
        with pytest.raises(RunError, match="E542"):
            tensor_parallel_tables(shapes, n, kv_heads=kv_heads)


def test_ranks_beyond_the_heads_of_keys_hold_copies():
    shapes = {"a.k_proj.weight": ((4, 2), "float32"), "a.q_proj.weight": ((8, 2), "float32")}

    found = tensor_parallel_tables(shapes, 4, kv_heads=2)

    assert [(0, 2), (0, 2), (2, 4), (2, 4)] == [t["a.k_proj.weight"][2][0] for t in found]
    assert [(0, 2), (2, 4), (4, 6), (6, 8)] == [t["a.q_proj.weight"][2][0] for t in found]
