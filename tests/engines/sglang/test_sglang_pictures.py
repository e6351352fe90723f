"""Pictures in the real engine: tokens, log-probs and updates of a tower as in the embedded one."""

from __future__ import annotations

import pytest
import torch

from rlflow.batch import flat, make_batch, shared_rows
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.train import TrainEngine
from rlflow.engines.process.client.load import load_sglang
from rlflow.graph.fields import PICTURES, PIXELS
from rlflow.modelfiles.pictures.towers import is_tower
from tests.engines.seeing import write_seeing
from tests.engines.sglang.conftest import Pair, needs_sglang, options, same
from tests.engines.test_pictures import seen_prompts

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.sglang]

KEY = SampleKey(seed=1, iteration=0, stream="gen")
GREEDY = Sampling(max_new_tokens=9, temperature=0.0, n=2)


# A family, the side of its patches, and the ranks of its engine.
WAYS = [
    pytest.param(("qwen3_vl", 4, 1), id="qwen3_vl"),
    pytest.param(("qwen3_vl", 4, 2), id="qwen3_vl-tp2", marks=pytest.mark.extra),
    pytest.param(("qwen2_5_vl", 14, 2), id="qwen2_5_vl-tp2", marks=pytest.mark.extra),
    pytest.param(("mistral3", 4, 1), id="mistral3"),
    pytest.param(("mistral3", 4, 2), id="mistral3-tp2", marks=pytest.mark.extra),
    pytest.param(("internvl", 4, 1), id="internvl"),
    pytest.param(("internvl", 4, 2), id="internvl-tp2", marks=pytest.mark.extra),
]


@pytest.fixture(scope="module", params=WAYS)
def way(request):
    return request.param


@pytest.fixture(scope="module")
def path(tmp_path_factory, way):
    kind, patch, _ = way
    return write_seeing(tmp_path_factory.mktemp(kind), kind, patch=patch)


@pytest.fixture(scope="module")
def pair(path, way):
    """One engine for all tests, and the embedded one beside it."""
    needs_sglang()
    wanted = {"name": "gen", "dtype": torch.float32, "device": "cpu", "devices": range(way[-1])}
    model, rollout = load_sglang(path, options=options(), **wanted)
    plain = load_model(path, dtype=torch.float32, device="cpu")
    yield Pair(model, rollout, TorchRollout(plain))
    model.close()


def shown(pair, path, sampling):
    """Rows of both engines for prompts with one picture, two and none, the real one's first."""
    prompts, pictures = seen_prompts(path)
    ids = torch.arange(len(prompts) * sampling.n)
    how = {"pictures": pictures}
    return [e.generate(prompts, sampling, KEY, ids, **how) for e in (pair.rollout, pair.plain)]


def test_it_generates_what_the_embedded_engine_does(pair, path):
    same(*shown(pair, path, GREEDY))
    assert {} == pair.model.check()


def test_an_update_of_the_tower_changes_what_the_same_pictures_say(pair, path):
    source = torch.Generator().manual_seed(3)
    own = load_model(path, dtype=torch.float32, device="cpu").named_tensors()
    moved = {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=source)
        if is_tower(name)
        else tensor
        for name, tensor in own.items()
    }
    before, _ = shown(pair, path, GREEDY)
    pair.bring(moved, 1)
    pair.plain.update_weights(moved, 1)
    real, plain = shown(pair, path, GREEDY)

    assert {} == pair.model.check()
    assert flat(before.log_probs).tolist() != flat(real.log_probs).tolist()
    same(real, plain)


def test_log_probs_are_those_of_the_trainer(pair, path):
    sampling = Sampling(max_new_tokens=8, temperature=0.7, n=3)
    real, _ = shown(pair, path, sampling)
    prompts, pictures = seen_prompts(path)
    parent = torch.arange(len(prompts)).repeat_interleave(3)
    batch = make_batch(
        {
            "prompt_tokens": shared_rows(prompts, parent),
            "response_tokens": real.response_tokens,
            PIXELS: shared_rows(pictures.pixels, parent),
            PICTURES: shared_rows(pictures.shapes, parent),
        },
        len(parent),
    )
    trainer = TrainEngine(pair.plain.model, None, micro_tokens=None)
    found = trainer.forward(batch, outputs=("log_probs",), temperature=0.7)["log_probs"]

    assert 1e-4 > float((found - flat(real.log_probs)).abs().max())
