"""Every family of mixtures of experts computes over ranks what it does on one."""

from __future__ import annotations

import pytest

from tests.engines import hybrids, latents, mixtures, sharded_checks
from tests.engines.test_sharded_math import STEADY

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.extra]

# Along replicate, fsdp and tp; and along ep, which is within fsdp.
FSDP, TP, REPLICAS, EP = (1, 2, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1, 2)
MIXES = [(1, 4, 1, 2), (1, 4, 1, 4), (2, 2, 1, 2), (1, 2, 2, 2)]
EXACT = {"dtype": "float32", "limit": 1e-5, "spec": STEADY}


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *((family, FSDP) for family in sorted(mixtures.KINDS)),
        *((family, TP) for family in ("mixtral", "qwen2_moe")),
        *((family, EP) for family in sorted(mixtures.KINDS)),
        ("qwen3_moe", REPLICAS),
    ],
)
def test_ranks_compute_what_one_does(family, shape, tmp_path, world):
    path = mixtures.save_mixture(family, tmp_path)
    options = {**EXACT, "limit": 1e-4} if family == "granitemoe" else EXACT  # larger activations

    assert all(world(2).run(sharded_checks.with_options, path, shape, options))


BESIDE = {"deepseek_v3": latents.save_latent, "qwen3_next": hybrids.save_hybrid}


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *((family, EP) for family in ("deepseek_v2", "glm4_moe_lite", *BESIDE)),
        *((family, mix) for family in BESIDE for mix in (MIXES[0], MIXES[3])),
    ],
)
def test_experts_of_latent_attention_and_hybrids_lie_apart_too(family, shape, tmp_path, world):
    path = BESIDE.get(family, latents.save_latent)(family, tmp_path)
    options = {**EXACT, "limit": 1e-4 if family == "qwen3_next" else 1e-5}
    ranks = shape[0] * shape[1] * shape[2]

    assert all(world(ranks).run(sharded_checks.with_options, path, shape, options))


@pytest.mark.parametrize("shape", MIXES, ids=str)
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_apart_among_others_that_share_compute_what_one_rank_does(
    family, shape, tmp_path, world
):
    path = mixtures.save_mixture(family, tmp_path)
    options = {**EXACT, "uneven": True, "micro_tokens": 20, "recompute": shape[0] == 1}

    assert all(world(4).run(sharded_checks.with_options, path, shape, options))
