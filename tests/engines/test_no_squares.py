"""An accelerator holds nothing as large as tokens times vocabulary, or as tokens squared.

Whole updates, references and critics on the meta device, as they run on a GPU: attention by
torch's varlen kernel, or by FlexAttention for soft caps, and distributions in chunks. A dispatch
mode sees every tensor that operators make; what the two kernels hold inside is theirs.
"""

from __future__ import annotations

import pytest
import torch

from rlflow.batch import flat
from rlflow.engines.hf.forward import spans
from rlflow.engines.hf.forward.fused import replace_forwards, restore_forwards
from rlflow.engines.hf.forward.head import take_head_apart
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine
from rlflow.runtime.rehearse.device import attended_by_flex, attends_on_cuda
from tests.engines.conftest import SIZES, make_config
from tests.engines.examples import rows
from tests.engines.test_head_chunks import Largest, limit_of

pytestmark = pytest.mark.torch

VOCABULARY, AT_ONCE = 2048, 8
# What four experts compute of a token.
WIDEST = 4 * SIZES["intermediate_size"]
FAMILIES = {"qwen2": "varlen", "mistral": "varlen", "gemma2": "flex", "gptoss": "varlen"}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function from a family to a directory with its config, of a larger vocabulary."""

    def make(family):
        config = make_config(family)
        config.vocab_size, config.max_position_embeddings = VOCABULARY, 4096
        path = tmp_path_factory.getbasetemp() / f"wide-{family}"
        config.save_pretrained(path)
        return str(path)

    return make


def on_meta(path, head, dtype):
    """An engine whose tensors hold no data, in chunks and without masks."""
    model = load_model(path, dtype=dtype, device="cpu", head=head, init="random")
    restore_forwards(model.module)
    model.module.to("meta")
    replace_forwards(model.module)
    model.predictor = take_head_apart(model.module, model.config) if head == "lm" else None
    trained = TrainEngine(model, None, micro_tokens=None)
    trained.chunk_bytes = limit_of(AT_ONCE, VOCABULARY)
    return trained


def computed(trained, batch, outputs, *, backward):
    """The largest tensor that a micro-batch makes, in numbers."""
    with Largest() as counted:
        found = trained.compute(batch, outputs, 0.7)
        if backward:
            sum(each.sum() for each in found.values()).backward()
    return counted.numbers


@pytest.mark.rows(5)
@pytest.mark.parametrize("job", ["update", "reference", "critic", "value forward"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_as_large_as_tokens_squared_or_tokens_times_vocabulary(
    family, job, folder_of, monkeypatch
):
    chosen = []

    def by_cuda(*asked):
        chosen.append(attends_on_cuda(*asked))
        return chosen[-1]

    monkeypatch.setattr(spans, "attends_by", by_cuda)
    monkeypatch.setattr(spans, "attend_flex", attended_by_flex)
    batch = rows(prompt_sizes=(200, 90), n=3, response_sizes=(150, 80, 200))
    tokens = 200 + 90 + len(flat(batch["response_tokens"])) - len(batch)
    critic = job in ("critic", "value forward")
    trained = on_meta(folder_of(family), "value" if critic else "lm", torch.bfloat16)
    outputs = ("values",) if critic else ("log_probs", "entropy")
    backward = job in ("update", "critic")
    if not backward:
        trained.model.module.requires_grad_(False)
    largest = computed(trained, batch, outputs, backward=backward)
    assert tokens * WIDEST >= largest
    assert largest < min(tokens * tokens, tokens * VOCABULARY) / 4
    assert {FAMILIES[family]} == set(chosen)


def test_whole_distributions_are_seen(folder_of, monkeypatch):
    """So the count can fail."""
    monkeypatch.setattr(spans, "attends_by", attends_on_cuda)
    batch = rows(prompt_sizes=(20,), n=3, response_sizes=(15,))
    trained = on_meta(folder_of("qwen2"), "lm", torch.bfloat16)
    trained.chunk_bytes = None
    assert 45 * VOCABULARY <= computed(trained, batch, ("log_probs",), backward=True)
