"""Engines in processes of their own that are disturbed: what is here holds for every kind of them.

A test runs with the kinds whose markers are chosen, each beside the embedded engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from rlflow.graph.user.engine_options import EngineOptions
from rlflow.graph.user.engines import VLLM, SGLang
from tests.engines import test_vllm
from tests.engines.sglang import conftest as sglang
from tests.engines.sglang.conftest import TINY, afresh, paired


class Kind(NamedTuple):
    """A kind of engine: its options, and the interpreter that it is installed for."""

    options: type[EngineOptions]
    python: str

    @property
    def given(self):
        """The options that an engine is started with."""
        return {"python": self.python, "max_total_tokens": 8192}

    def start(self):
        options = self.options(**self.given)
        return options.load(TINY, name="gen", dtype=torch.float32, device="cpu")


KINDS = {
    "sglang": Kind(SGLang, sglang.PYTHON),
    "vllm": Kind(VLLM, test_vllm.PYTHON),
}


def for_each(*names):
    """The mark of tests that kinds of engines run, each of them with its own marker."""
    kinds = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in names]
    return pytest.mark.parametrize("kind", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def kind(request):
    """A kind of engine that is installed."""
    found = KINDS[request.param]
    if not Path(found.python).exists():
        pytest.skip(f"no environment with it: make test-{request.param} builds one")
    return found


@pytest.fixture(scope="module")
def _pair(kind):
    made = paired(*kind.start())
    yield made
    made.model.close()


@pytest.fixture
def pair(_pair):
    """An engine and the embedded one with the first weights, awake."""
    return afresh(_pair)
