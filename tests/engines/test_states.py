"""Layers that carry states: packed row by row, in the backward pass, and decoded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from rlflow.batch import lengths, make_batch, ragged_rows
from rlflow.contract.values import Reach, SampleKey, Sampling
from rlflow.engines.hf.forward.packed import pack
from rlflow.engines.hf.generate.decoding import Responses
from rlflow.engines.hf.generate.speculative import Draft
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.mixers.states import row_runs
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.errors import RunError
from rlflow.scheduler.costs.lengths import Load, ResponseLengths
from rlflow.scheduler.costs.roofline import Roofline
from rlflow.scheduler.devices.hardware import KINDS
from rlflow.scheduler.models.shapes import read_shape
from tests.engines import sharded_checks, sharded_rollouts, test_graphs, test_paged_decoding
from tests.engines.examples import engine, gradients, rows, weighted, worst
from tests.engines.hybrids import FAMILIES, save_hybrid
from tests.engines.test_latent import generated, theirs
from tests.engines.test_sequences import without_masks  # noqa: F401
from tests.engines.test_sharded_math import STEADY

pytestmark = pytest.mark.torch

KEY = SampleKey(seed=1, iteration=0, stream="rollout")


@pytest.fixture(scope="module")
def hybrid_dir(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            made[family] = save_hybrid(family, tmp_path_factory.mktemp("hybrids") / family)
        return made[family]

    return make


def load(path, **options):
    return load_model(path, dtype=torch.float32, device="cpu", **options)


def alike_rows():
    """Groups whose rows begin alike, a prompt of one token, responses of none, one and two."""
    prompts = [[5], [1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]
    responses = [
        [[4, 4, 4, 1], [4, 4, 2], [4, 4, 4, 1, 7, 7]],
        [[3], [], [3, 3]],
        [[6, 5, 4, 3, 2, 1, 0, 9, 8], [6, 5], [1, 1, 1]],
    ]
    asked = [prompt for prompt in prompts for _ in range(3)]
    fields = {
        "prompt_tokens": ragged_rows(asked, torch.int64),
        "response_tokens": ragged_rows([row for group in responses for row in group], torch.int64),
    }
    return make_batch(fields, len(asked))


def own_log_probs(path, batch):
    """What the model itself says of rows, one at a time, without any padding; and the model."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    pairs = zip(batch["prompt_tokens"].unbind(), batch["response_tokens"].unbind(), strict=True)
    for prompt, response in pairs:
        logits = plain(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0]
        scores = logits[len(prompt) - 1 : len(prompt) + len(response) - 1].log_softmax(-1)
        found.append(scores.gather(1, response[:, None])[:, 0])
    return torch.cat(found), plain


def require_own(path, batch, limit=1e-4):
    expected, plain = own_log_probs(path, batch)
    made = engine(path, 40, torch.float32)
    found = made.forward(batch, outputs=("log_probs",), temperature=1.0)["log_probs"]
    assert float((found - expected.detach()).abs().max()) < limit
    weighted(batch)({"log_probs": expected}, batch)[0].backward()
    own = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert worst(own, gradients(made, batch)) < 10 * limit


@pytest.mark.rows(1)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_rows_are_the_models_own(family, hybrid_dir):
    """Log-probs and gradients of all parameters, row by row without padding."""
    require_own(hybrid_dir(family), alike_rows())


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rows_without_masks_are_the_models_own(family, hybrid_dir, without_masks):  # noqa: F811
    """As an accelerator packs; interleaved groups of longer rows."""
    batch = rows(prompt_sizes=(5, 70, 7), response_sizes=(66, 0, 1, 4, 2))
    require_own(hybrid_dir(family), batch, limit=1e-3)


@pytest.mark.parametrize("dense", [True, False])
def test_every_token_is_called_in_its_row_behind_its_prompt(dense):
    """Runs of tokens spelt out, against the rows of the batch."""
    batch = alike_rows()
    given = batch["prompt_tokens"], batch["response_tokens"]
    layout = pack(*given, torch.device("cpu"), dense=dense)
    runs = row_runs(layout)
    asked = [prompt.tolist() for prompt in batch["prompt_tokens"].unbind()]
    in_order = [line.tolist() for group in runs.prompts for line in layout.tokens[group]]
    assert sorted(asked[::3]) == sorted(in_order)
    made = []
    for place, tokens in runs.rows:
        lines = layout.tokens[tokens].tolist()
        made += [(in_order[at], line) for at, line in zip(place, lines, strict=True)]
    for prompt, response in zip(*(field.unbind() for field in given), strict=True):
        inputs = response[:-1].tolist()
        if inputs:
            found = [line for before, line in made if before == prompt.tolist()]
            assert any(line[: len(inputs)] == inputs for line in found)
    # Each flat token's output is that of its own call.
    called = [layout.tokens[tokens].flatten() for tokens in runs.prompts]
    called += [layout.tokens[tokens].flatten() for _, tokens in runs.rows]
    assert torch.equal(torch.cat(called)[runs.slots][: layout.real], layout.tokens[: layout.real])


@pytest.mark.rows(1)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_are_those_of_transformers(family, hybrid_dir):
    path = hybrid_dir(family)
    model, expected = load(path), theirs(path)

    assert expected == generated(TorchRollout(model))
    assert expected == generated(TorchRollout(model, paged=True))


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", pytest.param("falcon_h1", marks=pytest.mark.slow)]
)
def test_samples_part_with_their_states(family, hybrid_dir):
    """Rows that branch, end and make room agree in columns and in blocks, also of few slots."""
    model = load(hybrid_dir(family))
    sampling = Sampling(max_new_tokens=20, n=4, stop_tokens=(0, 1, 2))
    expected = generated(TorchRollout(model), sampling)

    assert len({tuple(row) for row in expected}) > 6
    assert expected == generated(TorchRollout(model, paged=True), sampling)
    assert expected == generated(TorchRollout(model, paged=True, rows_at_once=4), sampling)


@pytest.mark.rows(1)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_plan_counts_pool_and_states_to_the_byte(family, hybrid_dir):
    path, asked = hybrid_dir(family), ragged_rows([[1, 2, 3, 4, 5]] * 3, torch.int64)
    sampling = Sampling(max_new_tokens=20, n=2)
    empty = Responses(sampling, KEY, torch.arange(6), Reach(), torch.device("cpu"))
    made = TorchRollout(load(path), paged=True).paged_decoding(asked, lengths(asked), empty)
    with torch.inference_mode():
        made.step()
    plan = Roofline(kind=KINDS["h100"], shape=read_shape(Path(path)), size=4, paged=True)
    load_of = Load(rows=6, prompts=3, prompt=5, lengths=ResponseLengths(20, 10.0))

    assert dict(plan.rollout_holds(load_of))["KV cache"] == made.cache.num_bytes()


FEW_FAST = [
    "qwen3_5_text",
    *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "qwen3_5_text"),
]


@pytest.mark.parametrize("family", FEW_FAST)
def test_recorded_steps_go_on_with_states(family, hybrid_dir):
    test_graphs.test_replayed_steps_draw_the_same_tokens(family, {}, hybrid_dir)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3_next"])
def test_a_step_asks_for_no_value(family, hybrid_dir, monkeypatch):
    """Nothing comes from the host, so that a step can be recorded; meta has no grouped products."""
    test_paged_decoding.test_a_step_has_no_values_to_ask_for(family, False, hybrid_dir, monkeypatch)


def test_a_drafter_is_refused(hybrid_dir):
    model = load(hybrid_dir("lfm2"))
    with pytest.raises(RunError, match="E598"):
        generated(TorchRollout(model), draft=Draft(model=model, tokens=2))


@pytest.mark.slow
def test_compiled_layers_keep_rows_apart(hybrid_dir):
    batch, path = alike_rows(), hybrid_dir("qwen3_5_text")
    expected, _ = own_log_probs(path, batch)
    made = engine(path, 40, torch.float32, options={"compiled": True})
    found = made.forward(batch, outputs=("log_probs",), temperature=1.0)["log_probs"]

    assert float((found - expected.detach()).abs().max()) < 1e-4


FSDP, TP = (1, 2, 1), (1, 1, 2)
SHARED = [
    *((family, FSDP) for family in ("qwen3_5_text", "lfm2", "nemotron_h")),
    *((family, TP) for family in ("qwen3_5_text", "qwen3_next")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "shape"), SHARED)
def test_two_ranks_compute_what_one_does(family, shape, hybrid_dir, world):
    """Along tp every rank has all states, and some heads of the layers with attention."""
    options = {"dtype": "float32", "limit": 1e-4, "spec": STEADY}

    assert all(world(2).run(sharded_checks.with_options, hybrid_dir(family), shape, options))


@pytest.mark.slow
def test_ranks_decode_with_whole_states_the_tokens_of_one(hybrid_dir, world):
    args = (hybrid_dir("qwen3_5_text"), TP, False)

    assert all(world(2).run(sharded_rollouts.same_tokens, *args))
