"""Rows whose tokens lie on several ranks: what each has, and one rank's math.

A mesh is (replicate, fsdp, tp, ep, cp), of which ep and cp are within fsdp.
"""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings

import rlflow as rf
from rlflow.batch import ragged_rows
from rlflow.engines.hf.context.carrying import parts_of
from rlflow.engines.hf.context.cutting import TokenCut, part_of_layout
from rlflow.engines.hf.context.ring import ring_steps
from rlflow.engines.hf.forward.packed import pack
from rlflow.modelfiles.families import family_of
from rlflow.modelfiles.widths import carrying_in
from tests.engines import hybrids, latents, mixtures, sharded_routers
from tests.engines import sharded_checks as checks
from tests.engines.test_sharded_math import STEADY

pytestmark = pytest.mark.torch

CP2, CP4, ROWS2, TP2 = (1, 2, 1, 1, 2), (1, 4, 1, 1, 4), (1, 4, 1, 1, 2), (1, 2, 2, 1, 2)
RING, HEADS = {"cp_by": "ring"}, {"cp_by": "ulysses"}
EXACT = {"dtype": "float32", "limit": 1e-5, "spec": STEADY}
CUT = {"micro_tokens": 20}
LORA = rf.LoRA(rank=3, alpha=6, targets=("q_proj", "o_proj", "down_proj"))


def equal(world, path, shape, options):
    ranks = shape[0] * shape[1] * shape[2]
    assert all(world(ranks).run(checks.with_options, path, shape, options))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(
            *("qwen3", {**HEADS, **CUT, "recompute": "selective"}),
            id="heads-selective",
            marks=pytest.mark.slow,
        ),
        pytest.param("mistral", {**HEADS, "head": "value"}, id="heads-window-value"),
        pytest.param("qwen3", {**RING, **CUT, "recompute": "selective"}, id="ring-selective"),
        pytest.param("llama", {**RING, "lora": LORA, "chunk_bytes": 64}, id="ring-lora-chunks"),
    ],
)
def test_two_ranks_with_parts_of_rows_compute_what_one_does(family, options, world, model_dir):
    equal(world, model_dir(family), CP2, options)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["ulysses", "ring"])
@pytest.mark.parametrize(
    ("family", "shape", "options"),
    [
        pytest.param("qwen2", CP4, CUT, id="cp4"),
        pytest.param("llama", ROWS2, {**CUT, "uneven": True, "recompute": True}, id="fsdp2-cp2"),
        pytest.param("qwen3", TP2, {"head": "value"}, id="cp2-tp2"),
        pytest.param("qwen2", TP2, {**CUT, "sequence": True}, id="cp2-tp2-sequence"),
        pytest.param("gemma2", CP2, EXACT, id="softcap-window"),
        pytest.param("gptoss", CP2, EXACT, id="sinks-window"),
    ],
)
def test_ranks_with_parts_of_rows_beside_others(by, family, shape, options, world, model_dir):
    if by == "ring" and family in ("gemma2", "gptoss"):
        pytest.skip("no ring has windows")
    equal(world, model_dir(family), shape, {**options, "cp_by": by})


@pytest.mark.slow
@pytest.mark.parametrize("by", ["ulysses", "ring"])
def test_latents_and_mixtures_on_parts_of_rows(by, tmp_path, world):
    latent = latents.save_latent("deepseek_v3", tmp_path)
    mixture = mixtures.save_mixture("qwen3_moe", tmp_path)

    equal(world, latent, CP2, {**EXACT, "cp_by": by})
    equal(world, mixture, (1, 2, 1, 2, 2), {**EXACT, **CUT, "cp_by": by})


@pytest.mark.slow
def test_routers_on_parts_of_rows_choose_and_count_as_on_one_rank(tmp_path, world):
    path = mixtures.save_mixture("qwen3_moe", tmp_path)
    router = rf.Router(balance_coef=0.02, z_coef=0.01)

    assert all(world(2).run(sharded_routers.replay_equal, path, CP2))
    assert all(world(2).run(sharded_routers.check_equal, path, CP2, router))


# Heads of four ranks, where two have two.
FOUR = {
    "qwen3_5_text": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "nemotron_h": {"n_groups": 2},
    "granitemoehybrid": {},
    "lfm2": {},
}


AGAIN = {"uneven": True, "recompute": True, "limit": 1e-9}
CARRYING = [("qwen3_5_text", AGAIN)]
CARRYING += [
    pytest.param(family, CUT, marks=pytest.mark.slow)
    for family in (
        "qwen3_5_text",
        "qwen3_next",
        "olmo_hybrid",
        "nemotron_h",
        "granitemoehybrid",
        "lfm2",
    )
]


@pytest.mark.parametrize(("family", "options"), CARRYING)
def test_layers_that_carry_states_on_parts_of_rows(family, options, tmp_path, world):
    """In float64: prompts and rows cut between heads of two ranks, and layers recomputed."""
    path = hybrids.save_hybrid(family, tmp_path)

    assert all(world(2).run(checks.with_exact_layers, path, CP2, {**HEADS, **options}))


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("shape", [CP4, ROWS2, TP2], ids=["cp4", "fsdp2-cp2", "cp2-tp2"])
@pytest.mark.parametrize("family", FOUR)
def test_layers_that_carry_states_beside_other_ranks(family, shape, tmp_path, world):
    if shape == TP2 and family != "qwen3_5_text":
        pytest.skip("no tp cuts it")
    path = hybrids.save_hybrid(family, tmp_path, **FOUR[family])

    assert all(world(4).run(checks.with_exact_layers, path, shape, {**HEADS, **CUT, "limit": 1e-9}))


@pytest.mark.rows(2)
@pytest.mark.parametrize("family", sorted(hybrids.FAMILIES))
def test_what_plans_say_of_layers_that_carry_states_is_what_ranks_exchange(family, tmp_path):
    module = transformers.AutoModelForCausalLM.from_pretrained(
        hybrids.save_hybrid(family, tmp_path)
    )
    layers = [
        each
        for each in module.modules()
        if any(isinstance(part, torch.nn.Conv1d) for part in each.children())
    ]
    said = carrying_in(module.config.to_dict())

    assert len(layers) == said.layers
    if not family_of(module.config.to_dict()).parted:
        return
    for layer in layers:
        parts = parts_of(layer)
        sizes = [size for sizes in parts.projections.values() for size in sizes]
        sizes = sizes[bool(parts.gated) :]
        assert sum(sizes) == said.entering
        assert getattr(layer, parts.back).in_features == said.leaving
        apart = [size for at, size in enumerate(sizes) if at not in parts.grouped]
        cut = [*apart, *(getattr(layer, name) for name in parts.counts)]
        assert not any(size % said.heads for size in cut)
        assert said.shared == sum(sizes[at] for at in parts.grouped)


rows = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=6)


def layout_of(drawn, dense):
    """A layout of rows with one of three prompts, and responses of so many tokens."""
    prompts = [[1, 2], [3] * 7, [4, 5, 6]]
    made = [(prompts[prompt], [7 + place] * size) for place, (prompt, size) in enumerate(drawn)]
    ragged = [ragged_rows(list(part), torch.int64) for part in zip(*made, strict=True)]
    return pack(*ragged, torch.device("cpu"), dense=dense)


@given(drawn=rows, ranks=st.integers(2, 5), chunks=st.sampled_from([1, 2]))
@settings(max_examples=60, deadline=None)
def test_every_token_and_every_prediction_is_on_one_rank(drawn, ranks, chunks):
    whole = layout_of(drawn, dense=True)
    parts = [part_of_layout(whole, ranks, rank, chunks=chunks) for rank in range(ranks)]

    places = np.concatenate([part.cut.places(rank) for rank, part in enumerate(parts)])
    assert sorted(places[places < len(whole.tokens)]) == list(range(len(whole.tokens)))
    assert len({len(part.tokens) for part in parts}) == 1
    found = torch.cat([part.places[part.targets] for part in parts])
    assert torch.equal(found[parts[0].joined], whole.targets[: whole.predictions])
    assert sum(len(part.own) for part in parts) == whole.predictions
    for part in parts:
        assert torch.equal(part.positions, whole.positions[part.places])


@given(drawn=rows, ranks=st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_a_ring_shows_every_query_each_key_that_it_sees_once(drawn, ranks):
    whole = layout_of(drawn, dense=False)
    cut = TokenCut(total=len(whole.tokens), ranks=ranks, chunks=2)
    seen = np.zeros((cut.part * ranks, cut.part * ranks), dtype=int)
    for rank in range(ranks):
        for step, computed in enumerate(ring_steps(whole.spans, cut, rank)):
            source = (rank - step) % ranks
            for runs in computed:
                q, k = (np.arange(cut.part)[each] for each in (runs.q, runs.k))
                ends = zip(runs.runs.q_bounds, runs.runs.k_bounds, strict=True)
                for (q0, k0), (q1, k1) in itertools.pairwise(ends):
                    shown = np.ones((q1 - q0, k1 - k0), dtype=int)
                    shown = np.tril(shown, k1 - k0 - (q1 - q0)) if runs.causal else shown
                    at = np.ix_(cut.places(rank)[q[q0:q1]], cut.places(source)[k[k0:k1]])
                    seen[at] += shown

    expected = np.zeros_like(seen)
    spans = whole.spans
    for start, length, before, prompt in zip(
        spans.start, spans.length, spans.prefix_start, spans.prefix_length, strict=True
    ):
        own = slice(start, start + length)
        expected[own, own] = np.tril(np.ones((length, length), dtype=int))
        expected[own, before : before + prompt] = 1
    assert np.array_equal(seen, expected)
