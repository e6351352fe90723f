"""A batch through a chain of three ops on one pool: what `vs_verl_dispatch.py` times.

The batch is made on the host from the numbers of its rows. Each op reads all of it, and the
column that the op before it made. `verl_side.py` has the same rows and the same arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import rlflow as rf
from rlflow import ops

if TYPE_CHECKING:
    from torch import Tensor


class Config(rf.Config):
    """What `--set` may change."""

    rows: int = 1024
    prompt: int = 512
    response: int = 1024


class Batch(TypedDict):
    """36,864 bytes a row: the tokens of a prompt and a response, their mask, three columns."""

    prompt_tokens: rf.Token[int]
    response_tokens: rf.Token[int]
    mask: rf.Token[int]
    log_probs: rf.Token[float]
    values: rf.Token[float]
    rewards: rf.Token[float]


def row(index: int) -> dict[str, str]:
    return {"prompt": str(index)}


@rf.op(per="batch")
def batch(row_id: rf.Row[int], *, prompt: int, response: int) -> Batch:
    import torch

    def ragged(values: torch.Tensor) -> torch.Tensor:
        rows, length = values.shape
        bounds = torch.arange(rows + 1) * length
        return torch.nested.nested_tensor_from_jagged(values.flatten(), bounds)

    rows = row_id.numel()
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50_000, (rows, prompt + response), generator=drawn)
    columns = torch.rand(3, rows, response, generator=drawn)
    return {
        "prompt_tokens": ragged(tokens[:, :prompt]),
        "response_tokens": ragged(tokens[:, prompt:]),
        "mask": ragged(torch.ones_like(tokens)),
        "log_probs": ragged(columns[0]),
        "values": ragged(columns[1]),
        "rewards": ragged(columns[2]),
    }


def mean(left: Tensor, right: Tensor) -> Tensor:
    import torch

    return torch.nested.nested_tensor_from_jagged(
        (left.values() + right.values()) / 2, left.offsets()
    )


@rf.op(per="row")
def first(
    prompt_tokens: rf.Token[int],
    response_tokens: rf.Token[int],
    mask: rf.Token[int],
    log_probs: rf.Token[float],
    values: rf.Token[float],
    rewards: rf.Token[float],
) -> rf.Token[float]:
    return mean(log_probs, values)


@rf.op(per="row")
def second(
    prompt_tokens: rf.Token[int],
    response_tokens: rf.Token[int],
    mask: rf.Token[int],
    log_probs: rf.Token[float],
    values: rf.Token[float],
    rewards: rf.Token[float],
    first: rf.Token[float],
) -> rf.Token[float]:
    return mean(first, rewards)


@rf.op(per="row")
def third(
    prompt_tokens: rf.Token[int],
    response_tokens: rf.Token[int],
    mask: rf.Token[int],
    log_probs: rf.Token[float],
    values: rf.Token[float],
    rewards: rf.Token[float],
    second: rf.Token[float],
) -> rf.Token[float]:
    return mean(second, log_probs)


@rf.pipeline(
    placements={
        "two": rf.Placement(
            pools={"all": 2},
            assign={"first": rf.on("all"), "second": rf.on("all"), "third": rf.on("all")},
        ),
        "one": rf.Placement(
            pools={"all": 1},
            assign={"first": rf.on("all"), "second": rf.on("all"), "third": rf.on("all")},
        ),
    }
)
def dispatch(cfg: Config) -> None:
    rows = ops.prompts(rf.data.generator(row, size=cfg.rows, columns=("prompt",)), batch=cfg.rows)
    whole = batch(rows, prompt=cfg.prompt, response=cfg.response)
    one = first(whole)
    two = second(whole, one)
    three = third(whole, two)
    ops.metrics(three)
