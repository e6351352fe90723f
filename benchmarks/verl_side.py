"""verl's side of `vs_verl_dispatch.py`; runs in verl's environment and imports no rlflow.

    python verl_side.py SPEC.json RESULT.json

A RayWorkerGroup of CPU workers, three methods with the dispatch mode DP_COMPUTE_PROTO. The
driver holds the batch, as verl's trainer does. Two ways through the chain: `union` brings
every column to the driver and joins it to the batch, as the trainer does; `future` hands the
column's DataProtoFuture to the next call, so that it goes from worker to worker.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gauges
import ray
import torch
from gauges import Turn
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

called = register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)


def fields(rows: int, prompt: int, response: int) -> dict[str, torch.Tensor]:
    """The batch of benchmarks/pipelines/dispatch.py, without the raggedness."""
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50_000, (rows, prompt + response), generator=drawn)
    columns = torch.rand(3, rows, response, generator=drawn)
    return {
        "prompt_tokens": tokens[:, :prompt].contiguous(),
        "response_tokens": tokens[:, prompt:].contiguous(),
        "mask": torch.ones_like(tokens),
        "log_probs": columns[0].clone(),
        "values": columns[1].clone(),
        "rewards": columns[2].clone(),
    }


def column(name: str, left: torch.Tensor, right: torch.Tensor) -> DataProto:
    """The arithmetic of every op: the mean of two columns."""
    return DataProto.from_single_dict({name: (left + right) / 2})


class Ops(Worker):
    """The three ops; a column may come in the batch or beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)

    @called
    def first(self, batch: DataProto) -> DataProto:
        """A column of two of the batch's."""
        return column("first", batch.batch["log_probs"], batch.batch["values"])

    @called
    def second(self, batch: DataProto, before: DataProto | None = None) -> DataProto:
        """A column of the first op's and one of the batch's."""
        return column("second", (before or batch).batch["first"], batch.batch["rewards"])

    @called
    def third(self, batch: DataProto, before: DataProto | None = None) -> DataProto:
        """A column of the second op's and one of the batch's."""
        return column("third", (before or batch).batch["second"], batch.batch["log_probs"])


def union(group: Any, batch: DataProto, turn: Turn) -> DataProto:
    """Three calls, each column brought to the driver and joined to the batch."""
    for name in ("first", "second", "third"):
        with turn.submits():
            future = getattr(group, name)(batch)
        made = future.get()
        if name != "third":
            batch = batch.union(made)
    return made


def future(group: Any, batch: DataProto, turn: Turn) -> DataProto:
    """Three calls, each column left with the workers, but the last."""
    with turn.submits():
        one = group.first(batch)
    with turn.submits():
        two = group.second(batch, one)
    with turn.submits():
        three = group.third(batch, two)
    made: DataProto = three.get()
    return made


CHAINS: dict[str, Callable[[Any, DataProto, Turn], DataProto]] = {"union": union, "future": future}


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """All turns of one process; the batch's making is not timed."""
    pool = RayResourcePool([spec["workers"]], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Ops)), use_gpu=False)
    chain = CHAINS[spec["chain"]]
    small = DataProto.from_single_dict(fields(2 * spec["workers"], 2, 2))
    chain(group, small, Turn())
    ready = gauges.resident()
    gauges.forget_peak()
    turns = []
    for _ in range(spec["warmup"] + spec["turns"]):
        batch = DataProto.from_single_dict(fields(spec["rows"], spec["prompt"], spec["response"]))
        turn = Turn()
        with turn.running():
            made = chain(group, batch, turn)
        turns.append(turn)
        last = made.batch["third"]
        del batch, made
    return {
        "turns": [asdict(turn) for turn in turns[spec["warmup"] :]],
        "actions": 3,
        "ready_mb": ready,
        "peak_mb": gauges.peak(),
        "mean": last.double().mean().item(),
        "min": last.min().item(),
        "max": last.max().item(),
    }


def on_ray(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Read the spec, start a cluster with a CPU for each worker and the driver, measure, write."""
    given, made = (Path(word) for word in sys.argv[1:3])
    spec = json.loads(given.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    os.environ.update(
        {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_metrics_collection": "0",
            "RAY_task_events_report_interval_ms": "0",
            "VERL_DATAPROTO_SERIALIZATION_METHOD": spec["serialization"],
        }
    )
    ray.init(
        num_cpus=spec["workers"] + 1,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    try:
        made.write_text(json.dumps(measure(spec)), encoding="utf-8")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    on_ray(measure)
