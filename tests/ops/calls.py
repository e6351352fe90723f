"""Calls of made-up ops, and what a scripted model generates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from rlflow.batch import ragged_rows
from rlflow.engines.hf.generate.rng import permutation
from rlflow.engines.hf.loading import load_tokenizer
from rlflow.graph.op import Op
from rlflow.ops.body import Call
from tests.conftest import TINY


def call_of(
    inputs: Any = None,
    params: Any = None,
    model: Any = None,
    wanted: Any = (),
    *,
    iteration: int = 0,
    state: Any = None,
    **op: Any,
) -> Call:
    """A call that has the whole batch, of an op of this shape."""
    shape = {"name": "made", "body": "", "inputs": (), "outputs": (), "per": "row"} | op
    return Call(
        node="made",
        op=Op(**shape),
        iteration=iteration,
        seed=0,
        params=params or {},
        wanted=frozenset(wanted),
        permutation=lambda n, *salt: permutation(n, 0, iteration, "made", *salt),
        tokenizer=lambda path: load_tokenizer(str(TINY)),
        inputs=inputs,
        model=model,
        **({} if state is None else {"state": state}),
    )


def generated(
    rows: list[list[int]], log_probs: list[list[float]], finished: Any, chosen: Any = None
) -> SimpleNamespace:
    """What a model brings of some tokens; `chosen` are the rows that it brings, if not all."""
    return SimpleNamespace(
        response_tokens=ragged_rows(rows, torch.int64),
        log_probs=ragged_rows(log_probs, torch.float32),
        finished=torch.as_tensor(finished, dtype=torch.bool),
        rows=chosen,
        drafted=0.0,
        accepted=0.0,
    )
