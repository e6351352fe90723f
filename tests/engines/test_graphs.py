"""Steps that are recorded and replayed: here the recording is of a step's operators.

A `Tape` keeps every operator of a step with the tensors that it read and wrote, and a replay does
them again on those tensors. So does a CUDA graph: what Python decided is decided once for all.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlflow.batch import flat, lengths, ragged_rows
from rlflow.contract.values import Reach, SampleKey, Sampling
from rlflow.engines.hf.generate.decoding import Responses
from rlflow.engines.hf.generate.graphs import Replays
from rlflow.engines.hf.generate.paged_decoding import PagedDecoding
from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.rollout import TorchRollout
from rlflow.modelfiles.paging import LOOK, bucket

pytestmark = pytest.mark.torch

KEY = SampleKey(seed=1, iteration=2, stream="rollout")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]
SAMPLED = Sampling(max_new_tokens=64, n=4, stop_tokens=(0, 1, 2))


class Tape(TorchDispatchMode):
    """The operators called while it is entered, each with its tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Recorder:
    """Records steps of a generation, which runs each once: what it changed is put back."""

    def __init__(self):
        self.made = None
        self.tapes = []

    def __call__(self, step):
        held = [value for value in vars(self.made.state).values() if torch.is_tensor(value)]
        held += [part for pair in self.made.cache.pools.values() for part in pair]
        held += [each for kept in self.made.cache.states.values() for each in kept.values()]
        before = [tensor.clone() for tensor in held]
        with Tape() as tape:
            step()
        for tensor, kept in zip(held, before, strict=True):
            tensor.copy_(kept)
        self.tapes.append(tape)
        return tape.replay


def recorded(model, sampling=SAMPLED):
    asked, record = ragged_rows(PROMPTS, torch.int64), Recorder()
    ids = torch.arange(len(PROMPTS) * sampling.n)
    responses = Responses(sampling, KEY, ids, Reach(), torch.device("cpu"))
    record.made = PagedDecoding(model, asked, lengths(asked), responses, lambda: False, record)
    return record


def load(path):
    return load_model(path, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2", {}),
        pytest.param("mistral", {"top_p": 0.9}, marks=pytest.mark.slow),
        pytest.param("gpt2", {}, marks=pytest.mark.slow),
    ],
)
def test_replayed_steps_draw_the_same_tokens(family, more, model_dir):
    model = load(model_dir(family))
    sampling = Sampling(max_new_tokens=4 * LOOK + 3, n=4, stop_tokens=(0,), **more)
    record = recorded(model, sampling)
    with torch.inference_mode():
        record.made.run()
    found = record.made.responses.result()
    asked = ragged_rows(PROMPTS, torch.int64)
    expected = TorchRollout(model).generate(asked, sampling, KEY, torch.arange(12))
    assert torch.equal(flat(expected.response_tokens), flat(found.response_tokens))
    torch.testing.assert_close(flat(expected.log_probs), flat(found.log_probs), atol=1e-5, rtol=0)
    assert record.tapes
    sizes = {size for size, _ in record.made.replays.recorded} or {16}
    assert sizes <= {1, 2, 4, 8, 16}


def test_a_replay_reads_weights_that_were_written_in_place(model_dir):
    """New weights before the fifth window: recorded or not, what follows is of those."""
    found = []
    for plain in (True, False):
        model = load(model_dir("qwen2"))
        record = recorded(model, Sampling(max_new_tokens=6 * LOOK))
        if plain:
            record.made.replays.record = None
        with torch.inference_mode():
            for _ in range(4):
                record.made.step()
            changed = {name: value + 0.3 for name, value in model.named_tensors().items()}
            model.load_tensors(changed, 1)
            record.made.run()
        found.append(record.made.responses.result().response_tokens)
        assert plain or record.tapes
    untouched = recorded(load(model_dir("qwen2")), Sampling(max_new_tokens=6 * LOOK))
    with torch.inference_mode():
        untouched.made.run()
    assert torch.equal(flat(found[0]), flat(found[1]))
    assert not torch.equal(flat(untouched.made.responses.result().response_tokens), flat(found[0]))


def test_weights_that_have_moved_are_noticed(model_dir):
    """A sleep frees memory; where what comes back lies elsewhere, addresses tell."""
    model = load(model_dir("qwen2"))
    made = recorded(model).made
    with torch.inference_mode():
        made.step()
    before = made.addresses()
    model.load_tensors({name: value * 2 for name, value in model.named_tensors().items()}, 1)
    assert before == made.addresses()
    model.sleep()
    assert before != made.addresses()
    between = [torch.zeros(buffer.shape) for buffer in model.buffers()]
    model.wake()
    assert before[len(between) :] == made.addresses()[len(between) :]


def counted_replays(addresses):
    log = []

    def record(step):
        log.append("recorded")
        return partial(log.append, "replayed")

    return log, Replays(record, lambda: tuple(addresses))


def test_a_shape_is_run_for_a_window_then_recorded_then_replayed():
    addresses = [1, 2]
    log, replays = counted_replays(addresses)
    step = partial(log.append, "run")
    for shape in ((4, 1), (4, 1), (4, 1), (2, 1), (4, 1)):
        replays.play(shape, step, 2)
    expected = ["run"] * 2 + ["recorded"] + ["replayed"] * 4 + ["run"] * 2 + ["replayed"] * 2
    assert expected == log
    addresses[0] = 7
    replays.play((4, 1), step, 1)
    assert [*expected, "recorded", "replayed"] == log


def test_a_step_that_waits_is_never_recorded():
    log, replays = counted_replays([1])
    value = torch.ones(3)

    def step():
        log.append(float(value.sum()))

    for _ in range(3):
        replays.play((4, 1), step, 1)
    assert [3.0] * 3 == log


def test_sizes_are_powers_of_two():
    assert [1, 1, 2, 4, 4, 8, 512] == [bucket(count) for count in (0, 1, 2, 3, 4, 5, 300)]
