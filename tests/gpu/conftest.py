"""Where the tests of this folder compute: `RLFLOW_TEST_DEVICE`, the CPU if it is not said.

The same tests run on a CPU as far as it goes, with small sizes; on a GPU by `make test-gpu`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlflow.runtime.record.metrics import read_metrics
from tests.conftest import ROOT


class Size(NamedTuple):
    """The shape of a Qwen2 model with random weights, and rows for it."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = True
    context: int = 4096


TINY = Size(2, 64, 128, 4, 2, 96, context=256)
HALF_BILLION = Size(24, 896, 4864, 14, 2, 151936)
ONE_AND_A_HALF = Size(28, 1536, 8960, 12, 2, 151936)
SEVEN = Size(28, 3584, 18944, 28, 4, 152064, tied=False)


@pytest.fixture(scope="session")
def device() -> Any:
    """The device; a GPU that was named and is not there is a failure, not a skip."""
    import torch

    named = torch.device(os.environ.get("RLFLOW_TEST_DEVICE", "cpu"))
    if named.type == "cuda":
        assert torch.cuda.is_available(), f"torch {torch.__version__} sees no GPU"
    return named


@pytest.fixture(scope="session")
def big(device: Any) -> bool:
    """Whether sizes are those of a GPU."""
    return bool(device.type == "cuda")


@pytest.fixture
def gpu(device: Any) -> Any:
    """The device, of tests that a CPU cannot run."""
    if device.type != "cuda":
        pytest.skip("of a GPU: make test-gpu")
    return device


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a size to a directory with config and, if asked, random weights."""

    def make(size: Size, *, weights: bool = False) -> str:
        import torch
        import transformers

        path = tmp_path_factory.getbasetemp() / f"qwen2-{size.layers}x{size.hidden}-{weights}"
        if path.exists():
            return str(path)
        config = transformers.Qwen2Config(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            max_position_embeddings=size.context,
            tie_word_embeddings=size.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            initializer_range=0.3 if size is TINY else 0.02,
        )
        if not weights:
            Path(path).mkdir()
            config.save_pretrained(path)
            return str(path)
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
        return str(path)

    return make


@pytest.fixture
def run(rlflow: Any, device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A function that runs a pipeline and returns its directory; a GPU is found, not named."""
    monkeypatch.chdir(ROOT)
    made: list[Path] = []

    def call(file: Path, *words: Any, resume: Path | None = None) -> Path:
        folder = resume or tmp_path / f"run{len(made)}"
        made.append(folder)
        where = ("--devices", "cpu:1") if device.type == "cpu" else ()
        target = ("--resume", folder) if resume else ("--run-dir", folder)
        result = rlflow("run", file, *where, *words, *target)
        assert 0 == result.code, result.err
        return folder

    return call


def learned(folder: Path) -> list[dict[str, float]]:
    """The metrics of every iteration of a run, without lines that are an evaluation's alone."""
    lines = [line.metrics for line in read_metrics(folder / "metrics.jsonl")]
    return [metrics for metrics in lines if "reward/mean" in metrics]
