"""One real engine for all tests, with the embedded one on the same weights beside it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from rlflow.batch import flat, lengths, ragged_rows
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.process.client.load import load_sglang
from rlflow.engines.process.client.model import EngineModel
from rlflow.engines.process.client.process_memory import members
from rlflow.engines.process.client.rollout import SGLangRollout
from rlflow.graph.user.engines import SGLang

ROOT = Path(__file__).resolve().parents[3]
TINY = str(ROOT / "pipelines" / "assets" / "arith-tiny")
PYTHON = os.environ.get("RLFLOW_SGLANG_PYTHON") or str(ROOT / ".venv-sglang" / "bin" / "python")
# Long enough that several prompts are in the cache after one call.
PROMPTS = [list(range(3, 33)), list(range(10, 45)), list(range(20, 50))]
GREEDY = Sampling(max_new_tokens=12, temperature=0.0, n=2)


class Pair(NamedTuple):
    """An engine and the embedded one."""

    model: EngineModel
    rollout: SGLangRollout
    plain: TorchRollout

    def generate(self, rows, sampling, key=None, **more):
        """Rows of both engines, the real one's first."""
        prompts = ragged_rows(rows, torch.int64)
        ids = torch.arange(len(rows) * sampling.n)
        key = key or SampleKey(seed=1, iteration=0, stream="gen")
        return tuple(
            engine.generate(prompts, sampling, key, ids, **more)
            for engine in (self.rollout, self.plain)
        )

    def update(self, version, seed):
        """Random weights near the first ones, in both; the first ones where `seed` is None."""
        found = dict(load_model(TINY, dtype=torch.float32, device="cpu").named_tensors())
        if seed is not None:
            source = torch.Generator().manual_seed(seed)
            found = {
                name: tensor + 0.05 * torch.randn(tensor.shape, generator=source)
                for name, tensor in found.items()
            }
        self.bring(found, version)
        self.plain.update_weights(found, version)

    def bring(self, weights, version):
        """Bring weights to the real one."""
        self.rollout.update_weights(weights, version)


def options(**more):
    return SGLang(python=PYTHON, max_total_tokens=8192, **more)


def same(real, plain):
    """Rows of an engine are those of the embedded one, its log-probs within what is promised."""
    assert lengths(plain.response_tokens).tolist() == lengths(real.response_tokens).tolist()
    assert flat(plain.response_tokens).tolist() == flat(real.response_tokens).tolist()
    assert plain.finished.tolist() == real.finished.tolist()
    assert 1e-4 > float((flat(real.log_probs) - flat(plain.log_probs)).abs().max())


def start(**more):
    made = {"name": "gen", "options": options(), "dtype": torch.float32, "device": "cpu"}
    return load_sglang(TINY, **{**made, **more})


def group(model):
    """The processes of an engine that are alive: number and state, the guardian's first."""
    return members(model.replica._process.pid)


def paired(model, rollout):
    """An engine with the embedded one of the same first weights beside it."""
    return Pair(model, rollout, TorchRollout(load_model(TINY, dtype=torch.float32, device="cpu")))


def afresh(pair):
    """Both engines with the first weights, awake."""
    pair.rollout.wake()
    if pair.model.version or pair.model.state != "ready":
        pair.update(0, None)
    return pair


def needs_sglang():
    if not Path(PYTHON).exists():
        pytest.skip("no environment with SGLang: make test-sglang builds it")


@pytest.fixture(scope="session")
def _pair():
    needs_sglang()
    made = paired(*start())
    yield made
    made.model.close()


@pytest.fixture
def pair(_pair):
    """Both engines with the first weights, awake."""
    return afresh(_pair)


@pytest.fixture(scope="module")
def kernels():
    """What stands for SGLang's kernels on a CPU, as it imports that, and gone again."""
    folder = ROOT / "scripts" / "sglang_cpu" / "sgl_kernel"
    spec = importlib.util.spec_from_file_location(
        "sgl_kernel", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["sgl_kernel"] = module
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
        del sys.modules[name]
