"""What a row's numbers depend on: on the row and the weights, not on the rows beside it.

Every chunk of a batch makes the numbers of the whole, to the bit, where a CPU computes in float32.
docs/placements.md says where that ends: with attention beyond 192 tokens of a group, for prompts
of several lengths, and with the log-probs of groups that are parted.
"""

from __future__ import annotations

import pytest
import torch

from rlflow.batch import flat, lengths, make_batch, ragged_rows, select_field
from rlflow.contract.values import SampleKey, Sampling
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.engines.hf.train import TrainEngine
from tests.engines.conftest import make_config

pytestmark = pytest.mark.torch

CHUNKS = (1, 2, 3, 5)
OUTPUTS = ("log_probs", "entropy")
KEY = SampleKey(seed=3, iteration=1, stream="rollout")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A function from a family's name to a tiny random model of it with a long context."""
    import transformers

    made = {}

    def make(family):
        if family not in made:
            path = tmp_path_factory.mktemp("independent") / family
            torch.manual_seed(len(family))
            config = make_config(family)
            config.max_position_embeddings = 400
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
            made[family] = load_model(str(path), dtype=torch.float32, device="cpu")
        return made[family]

    return make


def drawn_prompts(sizes):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 32, (size,), generator=generator).tolist() for size in sizes]


def generate(model, prompts, first, *, n, new, stops=()):
    """What rows `first` and on of a batch draw."""
    asked = Sampling(max_new_tokens=new, n=n, temperature=1.0, stop_tokens=stops)
    ids = torch.arange(first * n, (first + len(prompts)) * n)
    return TorchRollout(model).generate(ragged_rows(prompts, torch.int64), asked, KEY, ids)


def forward(model, prompts, responses):
    """Log-probs and entropies of rows in one pass."""
    fields = {"prompt_tokens": prompts, "response_tokens": responses}
    batch = make_batch(fields, len(lengths(responses)))
    engine = TrainEngine(model, None, micro_tokens=None)
    return engine.forward(batch, outputs=OUTPUTS, temperature=1.0)


def same(left, right):
    return flat(left).numpy().tobytes() == flat(right).numpy().tobytes()


@pytest.mark.slow
@pytest.mark.rows(2)
@pytest.mark.parametrize("stops", [(), (3, 4, 5)], ids=["equal", "ragged"])
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3", "gemma2"])
def test_a_row_is_drawn_as_it_is_alone(family, stops, model):
    """Prompts of 3 to 60 tokens, and twice as many new ones as a cache has room for at first."""
    prompts = drawn_prompts((4, 5, 60, 17, 3, 16, 5, 31))
    drawn_as_alone(model(family), prompts, new=140, stops=stops)


def test_a_row_of_a_long_prompt_is_drawn_as_it_is_alone(model):
    drawn_as_alone(model("qwen2"), drawn_prompts((250,) * 4), new=10, stops=())


def drawn_as_alone(model, prompts, **how):
    """Two samples of every prompt are drawn alike in chunks of any size."""
    whole = generate(model, prompts, 0, n=2, **how)
    for size in CHUNKS:
        for first in range(0, len(prompts), size):
            part = prompts[first : first + size]
            rows = torch.arange(first * 2, (first + len(part)) * 2)
            made = generate(model, part, first, n=2, **how)
            for name in ("response_tokens", "log_probs"):
                expected = select_field(getattr(whole, name), rows)
                assert same(expected, getattr(made, name)), (size, first, name)


@pytest.mark.rows(2)
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(
    ("prompt_sizes", "response_sizes"),
    [
        ((4, 5, 4, 17, 3, 16), (6,)),
        ((4, 40, 4, 17, 30, 16), (1, 30, 2, 7, 9)),
        ((40,) * 6, (80,)),
    ],
    ids=["short", "ragged", "beyond the widest square"],
)
def test_whole_groups_are_computed_as_they_are_alone(n, prompt_sizes, response_sizes, model):
    prompts = drawn_prompts(prompt_sizes)
    groups, rows = len(prompts), len(prompts) * n
    sizes = [response_sizes[row % len(response_sizes)] for row in range(rows)]
    repeated = ragged_rows([prompt for prompt in prompts for _ in range(n)], torch.int64)
    responses = ragged_rows(drawn_prompts(sizes), torch.int64)
    whole = forward(model("qwen2"), repeated, responses)
    ends = [0, *lengths(responses).cumsum(0).tolist()]
    for size in CHUNKS:
        for first in range(0, groups, size):
            own = torch.arange(first * n, min(first + size, groups) * n)
            made = forward(
                model("qwen2"), select_field(repeated, own), select_field(responses, own)
            )
            place = slice(ends[int(own[0])], ends[int(own[-1]) + 1])
            for name in OUTPUTS:
                assert torch.equal(whole[name][place], made[name]), (size, first, name)


def test_rows_of_parted_groups_are_computed_alike_within_rounding(model):
    """A row shares attention with the others of its prompt, so a part rounds in another way."""
    prompts = ragged_rows(drawn_prompts((7,)) * 6, torch.int64)
    responses = ragged_rows(drawn_prompts((9, 9, 3, 12, 1, 9)), torch.int64)
    whole = forward(model("qwen2"), prompts, responses)
    ends = [0, *lengths(responses).cumsum(0).tolist()]
    for row in range(6):
        own = torch.tensor([row])
        made = forward(model("qwen2"), select_field(prompts, own), select_field(responses, own))
        for name in OUTPUTS:
            expected = whole[name][ends[row] : ends[row + 1]]
            torch.testing.assert_close(made[name], expected, rtol=1e-5, atol=1e-5)
