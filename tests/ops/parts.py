"""Bodies on parts of a batch, by ranks that are threads and really meet; and rows for them."""

from __future__ import annotations

import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings

from rlflow.batch import (
    concat_rows,
    flat,
    is_ragged,
    lengths,
    make_batch,
    pad,
    ragged,
    ragged_rows,
    select_rows,
    text,
)
from rlflow.runtime.execute.rows import generated
from rlflow.runtime.execute.stats import join_metrics
from tests.budget import examples
from tests.ops import calls

FEW = settings(max_examples=examples(12))
PATIENCE = 60
call_of = partial(calls.call_of, iteration=3)


class Meeting:
    """Where the parts of a call meet: all say something, and all hear what was said."""

    def __init__(self, count):
        self.count = count
        self.said = [None] * count
        self.barrier = threading.Barrier(count, timeout=PATIENCE)

    def all_of(self, part, value):
        self.said[part] = value
        self.barrier.wait()
        heard = list(self.said)
        self.barrier.wait()
        return heard


class Peer:
    """One part's side of a meeting."""

    def __init__(self, meeting, part):
        self.meeting, self.part = meeting, part

    def sum(self, values):
        heard = self.meeting.all_of(self.part, list(values))
        return [math.fsum(column) for column in zip(*heard, strict=True)]

    def union(self, ids):
        return self.gather(ids).unique()

    def gather(self, values):
        return torch.cat(self.meeting.all_of(self.part, values))

    def share(self, n):
        return range(self.part * n // self.meeting.count, (self.part + 1) * n // self.meeting.count)


def in_parts(body, whole, parts, models=None):
    """What each part's call of a body makes; parts run at once, and may not change their inputs."""
    meeting = Meeting(len(parts))
    calls = []
    for number, rows in enumerate(parts):
        given_rows = torch.tensor(rows, dtype=torch.int64)
        had = whole.inputs is not None
        calls.append(
            dataclasses.replace(
                whole,
                inputs=select_rows(whole.inputs, given_rows) if had else None,
                rows=given_rows if had else None,
                total=len(whole.inputs) if had else 0,
                peers=Peer(meeting, number),
                model=models[number] if models else whole.model,
            )
        )

    def one(call):
        before = copied(call.inputs)
        try:
            made = body(call)
        except BaseException:
            meeting.barrier.abort()
            raise
        assert same_fields(before, copied(call.inputs))
        return made

    with ThreadPoolExecutor(len(parts)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(one, call) for call in calls]]


def copied(batch):
    return None if batch is None else {name: parts_of(batch[name]) for name in batch.keys()}  # noqa: SIM118


def parts_of(field):
    """A field as its plain tensors, copied."""
    tensors = (flat(field), lengths(field)) if is_ragged(field) else (field,)
    return [tensor.clone() for tensor in tensors]


def same_fields(one, two, close=torch.equal):
    if one is None or two is None:
        return one is two
    return list(one) == list(two) and all(
        len(one[name]) == len(two[name]) and all(map(close, one[name], two[name])) for name in one
    )


def put_back(outputs, rows):
    """The fields of all parts, in the order of the batch."""
    made = [make_batch(output.fields, output.rows) for output in outputs]
    joined = concat_rows(made)
    return copied(select_rows(joined, torch.argsort(torch.cat(rows))))


def require_equal(body, whole, parts, factor=1, close=torch.equal):
    """The parts' fields and metrics are those of one call that has everything."""
    expected = body(whole)

    made = in_parts(body, whole, parts)

    rows = [
        torch.from_numpy(part)
        for part in generated([np.array(part, dtype=np.int64) for part in parts], factor)
    ]
    assert {factor} == {output.factor for output in (expected, *made)}
    if expected.fields:
        assert [len(part) for part in rows] == [output.rows for output in made]
        assert same_fields(copied(expected.fields), put_back(made, rows), close)
    assert join_metrics([out.metrics for out in made]) == pytest.approx(
        join_metrics([expected.metrics]), rel=1e-12, abs=1e-12
    )


def nearly(one, two):
    return torch.allclose(one.double(), two.double(), rtol=1e-6, atol=1e-6)


@st.composite
def split_batches(draw, whole_groups=True):
    """A batch of samples and the rows of two or three parts, some of them perhaps empty."""
    groups = draw(st.lists(st.integers(0, 5), min_size=1, max_size=14))
    count = draw(st.integers(2, 3))
    part = st.integers(0, count - 1)
    home = {group: draw(part) for group in set(groups)}
    homes = [home[group] if whole_groups else draw(part) for group in groups]
    parts = [[i for i, at in enumerate(homes) if at == number] for number in range(count)]
    return samples(groups, draw(st.integers(0, 99))), parts


def samples(groups, seed=0):
    """Rows with every field that a body reads, random but for the seed."""
    random = np.random.default_rng(seed)
    rows = len(groups)
    sizes = torch.from_numpy(random.integers(1, 6, rows))
    total = int(sizes.sum())

    def numbers():
        return torch.from_numpy(random.normal(size=total).astype(np.float32))

    fields = {
        "prompt": text(f"{group}+{group}=" for group in groups),
        "prompt_tokens": ragged_rows([[5 + group, 3] for group in groups], torch.int64),
        "response": text("x" * int(size) for size in sizes),
        "response_tokens": ragged(torch.from_numpy(random.integers(3, 13, total)), sizes),
        "response_mask": ragged(torch.from_numpy(random.random(total) < 0.7), sizes),
        "reward": torch.from_numpy(random.integers(-2, 3, rows).astype(np.float32)),
        "group": torch.tensor(groups) * 10,
        "row": torch.arange(rows),
    }
    named = ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_probs")
    for name in (*named, "values", "returns"):
        fields[name] = ragged(numbers(), sizes)
    return make_batch(fields, rows)


class Trainee:
    """Computes each step's loss and gradient of rows from their numbers, and notes them."""

    learning_rate = 0.5

    def __init__(self):
        self.steps = []

    def forward(self, mini, *, outputs, temperature):
        found = flat(mini["response_tokens"]).double()
        made = {"log_probs": found / -7, "entropy": (found * 5) % 7}
        return {name: made[name] for name in outputs}

    def step(self, mini, loss, *, outputs, temperature, max_grad_norm):
        made = {
            name: (flat(mini["response_tokens"]).double() / -7).requires_grad_() for name in outputs
        }
        value, found = loss(made, mini)
        value.backward()
        grads = {name: pad(x.grad, lengths(mini["response_tokens"])) for name, x in made.items()}
        each = [
            {name: grad[i, : int(size)].tolist() for name, grad in grads.items()}
            for i, size in enumerate(lengths(mini["response_tokens"]))
        ]
        rows = mini["row"].tolist()
        self.steps.append(
            (rows, dict(zip(rows, each, strict=True)), {"loss": value.detach(), **found})
        )
        return SimpleNamespace(metrics={"loss": 1.0}, grad_norm=1.0, applied=True)
