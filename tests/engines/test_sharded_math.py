"""The math does not depend on the layout: outputs, gradients and steps of one rank, on several.

A mesh is (replicate, fsdp, tp). qwen2's embeddings are tied, llama's are not, qwen3 has norms
of its heads, and the tiny model a vocabulary of 51.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import rlflow as rf
from tests.conftest import TINY
from tests.engines import sharded_checks as checks
from tests.engines.examples import Spec

pytestmark = pytest.mark.torch

LORA = rf.LoRA(rank=3, alpha=6, targets=("q_proj", "o_proj", "down_proj"))
CUT = {"uneven": True, "micro_tokens": 20}
HOSTING = {"hosts_activations": True}
SEQUENCE = {"sequence": True, "micro_tokens": 20}


def path_of(family, model_dir):
    return str(TINY) if family == "tiny" else model_dir(family)


def equal(world, path, shape, **options):
    ranks = shape[0] * shape[1] * shape[2] * options.get("pp", 1)
    assert all(world(ranks).run(checks.with_options, path, shape, options))


@pytest.mark.rows(2)
@pytest.mark.parametrize(
    ("shape", "family", "options"),
    [
        pytest.param((1, 2, 1), "qwen2", {"recompute": "selective"}, id="fsdp2-selective"),
        pytest.param((1, 2, 1), "llama", {**CUT, "recompute": True}, id="fsdp2-recompute"),
        pytest.param((1, 2, 1), "qwen3", {**CUT, **HOSTING}, id="fsdp2-hosting"),
        pytest.param((2, 1, 1), "qwen3", {**CUT, "head": "value"}, id="dp2-value"),
        pytest.param((1, 1, 2), "qwen2", {"micro_tokens": 20}, id="tp2-tied"),
        pytest.param((1, 1, 2), "llama", {"head": "value", "recompute": 1}, id="tp2-value-first"),
        pytest.param((1, 1, 2), "qwen3", {**HOSTING, "recompute": True}, id="tp2-hosting"),
        pytest.param((1, 1, 2), "tiny", {}, id="tp2-uneven-vocabulary"),
        pytest.param((1, 1, 2), "mistral", {}, id="tp2-window"),
        pytest.param((1, 1, 2), "llama", {"lora": LORA}, id="tp2-lora"),
        pytest.param((1, 1, 2), "qwen2", SEQUENCE, id="sequence-tied"),
        pytest.param((1, 1, 2), "qwen3", {**SEQUENCE, "recompute": 1}, id="sequence-recompute"),
        pytest.param((1, 1, 2), "llama", {**SEQUENCE, "head": "value"}, id="sequence-value"),
        pytest.param((1, 1, 2), "llama", {**SEQUENCE, "lora": LORA}, id="sequence-lora"),
        pytest.param((1, 1, 2), "tiny", {**SEQUENCE, **HOSTING}, id="sequence-hosting"),
    ],
)
def test_two_ranks_compute_what_one_does(shape, family, options, world, model_dir):
    equal(world, path_of(family, model_dir), shape, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "family", "options"),
    [
        pytest.param((1, 4, 1), "llama", {**CUT, "head": "value"}, id="fsdp4-value"),
        pytest.param((1, 2, 2), "llama", {**CUT, "recompute": "selective"}, id="selective"),
        pytest.param((1, 2, 2), "qwen2", {**CUT, "recompute": 1}, id="first"),
        pytest.param((2, 2, 1), "qwen2", {**CUT, "recompute": True}, id="hsdp"),
        pytest.param((1, 2, 2), "qwen3", {**CUT, "recompute": True}, id="fsdp2xtp2-recompute"),
        pytest.param((1, 2, 2), "qwen2", {"uneven": True, "init": "random", "seed": 7}, id="drawn"),
        pytest.param((2, 1, 2), "tiny", CUT, id="dp2xtp2"),
        pytest.param((1, 2, 2), "qwen3", {**CUT, "lora": LORA}, id="fsdp2xtp2-lora"),
        pytest.param((1, 2, 2), "qwen2", {**CUT, "sequence": True}, id="sequence-fsdp2xtp2"),
        pytest.param((2, 1, 2), "mistral", SEQUENCE, id="sequence-dp2xtp2"),
    ],
)
def test_four_ranks_compute_what_one_does(shape, family, options, world, model_dir):
    equal(world, path_of(family, model_dir), shape, **options)


STAGES = {"pp": 2, "micro_tokens": 20}


@pytest.mark.rows(3)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("llama", {}, id="llama"),
        pytest.param("qwen2", {"recompute": True}, id="tied"),
        pytest.param("qwen3", {"head": "value", "recompute": 1}, id="value"),
        pytest.param("mistral", {"recompute": "selective"}, id="window"),
        pytest.param("llama", {"lora": LORA}, id="lora"),
        pytest.param("qwen3", HOSTING, id="hosting"),
        pytest.param("qwen2", {"init": "random", "seed": 7, "micro_tokens": None}, id="drawn"),
    ],
)
def test_two_stages_compute_what_one_rank_does(family, options, world, model_dir):
    """Micro-batches of different lengths, several under way at once, and one alone."""
    equal(world, path_of(family, model_dir), (1, 1, 1), **{**STAGES, **options})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "family", "options"),
    [
        pytest.param((1, 2, 1), "llama", {"uneven": True}, id="pp2xfsdp2"),
        pytest.param((1, 2, 1), "qwen2", {"recompute": True}, id="pp2xfsdp2-tied"),
        pytest.param((2, 1, 1), "qwen2", {}, id="dp2-tied"),
        pytest.param((1, 1, 2), "qwen3", {}, id="pp2xtp2"),
        pytest.param((1, 1, 2), "qwen2", {"sequence": True}, id="sequence-tied"),
        pytest.param((1, 1, 2), "llama", {"sequence": True}, id="sequence"),
        pytest.param((1, 2, 1, 1, 2), "llama", {}, id="pp2xcp2"),
        pytest.param((1, 2, 1, 1, 2), "qwen2", {"cp_by": "ring"}, id="pp2xcp2-ring-tied"),
    ],
)
def test_stages_of_two_ranks_compute_what_one_does(shape, family, options, world, model_dir):
    equal(world, path_of(family, model_dir), shape, **{**STAGES, **options})


VIRTUAL = {**STAGES, "stages": (2, 1, 1, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "family", "options"),
    [
        pytest.param((1, 1, 1), "llama", {}, id="llama"),
        pytest.param((1, 1, 1), "qwen2", {"recompute": True}, id="tied"),
        pytest.param((1, 1, 1), "qwen3", {"head": "value"}, id="value"),
        pytest.param((1, 1, 1), "mistral", {"micro_tokens": None}, id="alone"),
        pytest.param((1, 2, 1), "llama", {"uneven": True}, id="fsdp2"),
        pytest.param((1, 2, 1), "qwen2", {"dtype": "float32", "limit": 2e-4}, id="fsdp2-tied"),
        pytest.param((2, 1, 1), "llama", {"recompute": 3}, id="dp2"),
        pytest.param((1, 1, 2), "qwen2", {"sequence": True}, id="sequence-tied"),
        pytest.param((1, 1, 2), "qwen3", {}, id="tp2"),
        pytest.param((1, 2, 1, 1, 2), "llama", {}, id="cp2"),
    ],
)
def test_several_stages_on_a_rank_compute_what_one_does(shape, family, options, world, model_dir):
    """Each of two ranks has two runs of layers, that micro-batches pass through in turns."""
    equal(world, model_dir(family, 5), shape, **{**VIRTUAL, **options})


SPLIT = {"schedule": "zero-bubble", "stages": (2, 2), "micro_tokens": 20, "pp": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "family", "options"),
    [
        pytest.param((1, 1, 1), "llama", {}, id="llama"),
        pytest.param((1, 1, 1), "qwen2", {"recompute": True}, id="tied"),
        pytest.param((1, 1, 1), "qwen3", {"head": "value", **HOSTING}, id="value-hosting"),
        pytest.param((1, 1, 1), "llama", {"lora": LORA}, id="lora"),
        pytest.param((1, 1, 1), "mistral", {"micro_tokens": None}, id="alone"),
        pytest.param((1, 1, 1), "llama", {"pp": 4, "stages": (1, 1, 1, 1)}, id="pp4"),
        pytest.param((1, 2, 1), "llama", {"uneven": True}, id="fsdp2"),
        pytest.param((2, 1, 1), "qwen2", {"recompute": 3}, id="dp2-tied"),
        pytest.param((1, 1, 2), "qwen2", {"sequence": True}, id="sequence-tied"),
        pytest.param((1, 1, 2), "qwen3", {}, id="tp2"),
        pytest.param((1, 2, 1, 1, 2), "llama", {}, id="cp2"),
    ],
)
def test_a_backward_in_two_halves_computes_what_one_does(shape, family, options, world, model_dir):
    equal(world, model_dir(family, 4), shape, **{**SPLIT, **options})


def test_two_halves_of_a_backward_are_one(world, model_dir):
    """Nothing is computed twice; what layers' weights are multiplied by is in the second half."""
    layer = 32 * (32 + 2 * 16 + 32) + 3 * 32 * 64
    for whole, first, second, same in world(2).run(checks.two_halves, model_dir("llama")):
        assert same
        assert whole == first + second
        assert second % (2 * 2 * layer) == 0
        assert 0.4 < second / whole < 0.5


# A gradient that is all rounding, such as that of a key's bias, would be scaled up to a step.
STEADY = replace(Spec(), eps=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "limit"), [pytest.param("float32", 1e-5), pytest.param("bfloat16", 0.1)]
)
def test_lower_precision_agrees_to_its_tolerance(dtype, limit, world, model_dir):
    options = {"dtype": dtype, "limit": limit, "spec": STEADY, "micro_tokens": 20}

    equal(world, model_dir("qwen2"), (1, 2, 2), **options)
