"""Part G: tokens a second of an update, and the part of the device's peak that it reaches.

Written to `RLFLOW_GPU_RESULTS`, not judged. Flop by `scheduler/models/flops.py`: three forwards of
what is trained, two of what is frozen below adapters, with causal attention.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.engines.hf.loading import load_model
from rlflow.engines.hf.train import TrainEngine
from rlflow.graph.model import LoRA
from rlflow.runtime.record.devices.rows import SIZED_BY, row_work
from rlflow.scheduler.devices.machine import machine_gpus
from rlflow.scheduler.models.flops import TRAINED_FORWARDS, ProductSizes
from tests.engines.examples import Spec
from tests.gpu.conftest import ONE_AND_A_HALF, SEVEN, TINY, Size
from tests.gpu.test_compute import batch_of

pytestmark = pytest.mark.torch

# A backward through frozen weights has gradients of what it reads alone.
FROZEN_FORWARDS = 2
ADAPTERS = LoRA(targets=("q_proj", "k_proj", "v_proj", "o_proj"), rank=32)
CASES = {"1.5B": (ONE_AND_A_HALF, None), "7B adapters": (SEVEN, ADAPTERS)}


def products(size: Size) -> ProductSizes:
    """What multiplies: layers and the head."""
    head = size.hidden // size.heads
    attention = size.hidden * head * (2 * size.heads + 2 * size.kv_heads)
    layer = attention + 3 * size.hidden * size.intermediate
    return ProductSizes(
        body=size.layers * layer,
        head=size.vocabulary * size.hidden,
        layers=size.layers,
        heads=size.heads,
        head_dim=head,
    )


def record(name: str, found: dict[str, Any]) -> None:
    """Add a result to the file that the environment names."""
    sys.stdout.write(f"{name}: {found}\n")
    if path := os.environ.get("RLFLOW_GPU_RESULTS"):
        file = Path(path)
        held = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**held, name: found}, indent=1, sort_keys=True) + "\n")


def wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@pytest.mark.rows(1)
@pytest.mark.parametrize("case", CASES)
def test_an_update(case: str, model_of: Any, device: Any, big: bool) -> None:
    size, adapters = CASES[case]
    size = size if big else TINY
    prompt, response = (512, 1536) if big else (8, 24)
    batch = batch_of(size.vocabulary, groups=4, n=8, prompt=prompt, response=response)
    model = load_model(
        model_of(size),
        dtype=torch.bfloat16,
        device=device,
        init="random",
        seed=3,
        recompute=big,
        lora=adapters,
    )
    engine = TrainEngine(model, Spec(lr=1e-5), micro_tokens=16384 if big else 128)

    def loss(outputs: Any, micro: Any) -> Any:
        return -outputs["log_probs"].mean(), {}

    seconds = []
    for _ in range(4):
        wait(device)
        began = time.perf_counter()
        done = engine.step(batch, loss, outputs=("log_probs",), temperature=1.0, max_grad_norm=1.0)
        wait(device)
        seconds.append(time.perf_counter() - began)
        assert done.applied
    took = statistics.median(seconds[1:])
    work = row_work({name: batch[name] for name in SIZED_BY})
    tokens = round(work["passed"])
    forwards = TRAINED_FORWARDS if adapters is None else FROZEN_FORWARDS
    flop = forwards * products(size).forward(work["passed"], work["predicted"], work["pairs"])
    found = {"seconds": round(took, 4), "tokens/s": round(tokens / took), "tokens": tokens}
    gpus = machine_gpus() if big else ()
    if gpus and gpus[0].kind is not None:
        found["MFU"] = round(flop / took / gpus[0].kind.flops, 4)
        found["peak GB"] = round(torch.cuda.max_memory_allocated(device) / 1e9, 2)
    record(f"update {case if big else 'tiny'} on {gpus[0].name if gpus else device.type}", found)
