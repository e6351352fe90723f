"""What the devices of this machine do: products, copies, launches and collectives, timed by size.

Run as a program it is one rank of the collectives. Times are medians of runs after one that warms
up, by CUDA events on a GPU. Knows no kinds of devices and writes no files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

MIB = 1 << 20
PRODUCTS = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
# Tokens of a pass and widths of a layer, and lengths of rows: a curve goes through these.
PASSES = {"cpu": (1, 16, 128, 1024), "cuda": (1, 16, 128, 1024, 8192)}
WIDTHS = {"cpu": (256, 1024, 4096), "cuda": (1024, 4096, 16384)}
ATTENDED, HEADS, HEAD, AT_ONCE = (128, 512, 2048, 8192), 16, 128, 16384
COPIES = {"cpu": (16 * MIB, 256 * MIB), "cuda": (16 * MIB, 256 * MIB, 1024 * MIB)}
TRANSFERS = (MIB, 16 * MIB, 256 * MIB)
GATHERED = {"cpu": (1024, MIB, 16 * MIB), "cuda": (1024, MIB, 16 * MIB, 256 * MIB)}
READ_ROWS, READ_WIDTH = 1, 4096
LAUNCHES = 1000
LEAST_RUNS, MOST_RUNS = 3, 100
# Of one figure: it is run again until so much is spent, and not once more beyond the second.
ENOUGH, TOO_LONG = 0.2, 2.0
RANKS_SECONDS = 90.0

Call: TypeAlias = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTiming:
    """One thing timed: `rate` in flop/s, B/s or calls/s as `what` says; `size` in rows or bytes."""

    what: str
    size: int
    seconds: float
    rate: float

    def line(self) -> str:
        """The timing as it is printed."""
        counted = self.what.startswith(("product", "attention"))
        scale, unit = (1e9, "Gflop/s") if counted else (1e9, "GB/s")
        if self.what in ("launch", "replayed"):
            return f"{self.what:<28} {self.seconds * 1e6:>10.2f} us"
        took = f"{self.seconds * 1e3:.3f} ms"
        return f"{self.what:<28} {self.size:>10} {self.rate / scale:>12.2f} {unit:<8} {took}"


Timings: TypeAlias = Callable[[], Iterator[DeviceTiming]]


def measured(kind: str, count: int, threads: int, budget: float) -> Iterator[DeviceTiming]:
    """Everything about `count` devices `cpu` or `cuda`, the first standing for all of them.

    What would begin after `budget` seconds is left out, as are sizes that do not fit.
    """
    end = time.monotonic() + budget
    if kind == "cpu":
        torch.set_num_threads(threads)
    every: list[Timings] = [*_alone(kind), partial(collectives, kind, count)]
    for one in every:
        if time.monotonic() < end:
            yield from one()


def _alone(kind: str) -> Iterator[Timings]:
    """What one device does by itself, each to be called in turn."""
    device = torch.device("cuda:0" if kind == "cuda" else "cpu")
    late: set[str] = set()
    for size in PRODUCTS[kind]:
        yield partial(square_products, device, size, late)
    for width in WIDTHS[kind]:
        yield partial(row_products, device, width)
    if kind == "cpu":
        yield partial(reads, device)
    else:
        yield partial(attention, device)
    yield partial(copies, device)
    yield partial(launches, device)
    if kind == "cuda":
        yield partial(transfers, device)


def square_products(device: torch.device, size: int, late: set[str]) -> Iterator[DeviceTiming]:
    """Square products: bfloat16, float32, and float32 by TF32 on a GPU.

    Names in `late` are left out. One is added where a product of twice the size would take too
    long: a CPU without instructions for bfloat16 would spend minutes on one.
    """
    kinds = [("bfloat16", torch.bfloat16, "highest"), ("float32", torch.float32, "highest")]
    if device.type == "cuda":
        kinds.append(("tf32", torch.float32, "high"))
    before = torch.get_float32_matmul_precision()
    try:
        for name, dtype, precision in kinds:
            if name in late:
                continue
            torch.set_float32_matmul_precision(precision)
            one, two = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            out = torch.empty(size, size, device=device, dtype=dtype)
            took = median_seconds(partial(torch.mm, one, two, out=out), device)
            yield DeviceTiming(
                what=f"product {name}", size=size, seconds=took, rate=2.0 * size**3 / took
            )
            if 2**3 * took > TOO_LONG:
                late.add(name)
    finally:
        torch.set_float32_matmul_precision(before)


def row_products(device: torch.device, width: int) -> Iterator[DeviceTiming]:
    """Products of some rows with a square weight, as a layer's of so many tokens in a pass.

    More rows are left out where those of the next size would take too long.
    """
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        weight = torch.randn(width, width, device=device).to(dtype)
        for rows in PASSES[device.type]:
            one = torch.randn(rows, width, device=device).to(dtype)
            out = torch.empty(rows, width, device=device, dtype=dtype)
            took = median_seconds(partial(torch.mm, one, weight.T, out=out), device)
            rate = 2.0 * rows * width**2 / took
            what = f"product of rows {name} {width}"
            yield DeviceTiming(what=what, size=rows, seconds=took, rate=rate)
            if 8 * took > TOO_LONG:
                break


def attention(device: torch.device) -> Iterator[DeviceTiming]:
    """Causal attention of torch's flash kernel over rows of one length, forward, bfloat16.

    Rows are as many as have 16,384 tokens; half of all pairs are computed.
    """
    for length in ATTENDED:
        rows = max(1, AT_ONCE // length)
        q, k, v = torch.randn(3, rows, HEADS, length, HEAD, device=device).bfloat16()
        call = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
        took = median_seconds(call, device)
        rate = 4.0 * rows * HEADS * HEAD * length**2 / 2 / took
        what = "attention bfloat16"
        yield DeviceTiming(what=what, size=length, seconds=took, rate=rate)


def reads(device: torch.device) -> Iterator[DeviceTiming]:
    """Weights read by a product of a row, float32."""
    weights = torch.randn(READ_WIDTH, READ_WIDTH, device=device)
    row = torch.randn(READ_ROWS, READ_WIDTH, device=device)
    took = median_seconds(partial(torch.mm, row, weights.T), device)
    size = weights.numel() * weights.itemsize
    yield DeviceTiming(what="weights", size=size, seconds=took, rate=size / took)


def copies(device: torch.device) -> Iterator[DeviceTiming]:
    """Copies within the memory of a device; bytes are read and written."""
    for size in COPIES[device.type]:
        if not _fits(device, 2 * size):
            continue
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        took = median_seconds(partial(target.copy_, source), device)
        yield DeviceTiming(what="copy", size=size, seconds=took, rate=2 * size / took)


def launches(device: torch.device) -> Iterator[DeviceTiming]:
    """From one small kernel to the next, and so in a captured graph on a GPU."""
    one = torch.zeros(1, device=device)

    def many() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    took = median_seconds(many, device) / LAUNCHES
    yield DeviceTiming(what="launch", size=LAUNCHES, seconds=took, rate=1 / took)
    if device.type == "cuda":
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        took = median_seconds(graph.replay, device) / LAUNCHES
        yield DeviceTiming(what="replayed", size=LAUNCHES, seconds=took, rate=1 / took)


def transfers(device: torch.device) -> Iterator[DeviceTiming]:
    """Copies between a GPU and the host's memory, pinned and pageable, each way."""
    for size in TRANSFERS:
        there = torch.ones(size, dtype=torch.uint8, device=device)
        for pinned in (True, False):
            here = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
            name = "pinned" if pinned else "pageable"
            ways: tuple[tuple[str, Call], ...] = (
                ("h2d", partial(there.copy_, here, non_blocking=True)),
                ("d2h", partial(here.copy_, there, non_blocking=True)),
            )
            for way, call in ways:
                took = median_seconds(call, device)
                yield DeviceTiming(what=f"{way} {name}", size=size, seconds=took, rate=size / took)


def collectives(kind: str, count: int) -> Iterator[DeviceTiming]:
    """All-gathers and all-reduces of `count` devices, in processes of their own; none of one.

    The rate of an all-gather is what each rank receives a second; of an all-reduce, what it
    would send around a ring. Raises RuntimeError with what the ranks say where they fail.
    """
    if count < 2:
        return
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "rlflow.runtime.measuring", kind, str(count), folder]
        settings = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(  # noqa: S603  this interpreter, with words of our own
                [*words, str(rank)],
                env=settings,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        try:
            said = [rank.communicate(timeout=RANKS_SECONDS) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the ranks did not end within {RANKS_SECONDS:.0f} s") from None
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()
        if any(rank.returncode for rank in ranks):
            last = [text.strip().splitlines() for _, text in said]
            raise RuntimeError(next((lines[-1] for lines in last if lines), "a rank died"))
        yield from (DeviceTiming(**row) for row in json.loads(said[0][0]))


def median_seconds(call: Call, device: torch.device) -> float:
    """Median seconds of a call, after one that warms up."""
    call()
    took: list[float] = []
    while len(took) < MOST_RUNS and (len(took) < LEAST_RUNS or sum(took) < ENOUGH):
        took.append(_once(call, device))
        if sum(took) > TOO_LONG:
            break
    return max(median(took), 1e-9)


def _once(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        # Untyped in torch.
        event: Any = torch.cuda.Event
        first, last = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(device)
        first.record()
        call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _fits(device: torch.device, size: int) -> bool:
    """Whether half of what is free has so many bytes."""
    if device.type == "cuda":
        return size < torch.cuda.mem_get_info(device)[0] / 2
    return size < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2


def _rank(kind: str, count: int, folder: Path, rank: int) -> list[DeviceTiming]:
    """What one rank sees of the collectives of all of them."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    store = f"file://{folder / 'store'}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=count)
    try:
        return [*_collectives(device, count, GATHERED[kind])]
    finally:
        dist.destroy_process_group()


def _collectives(device: torch.device, count: int, sizes: Sequence[int]) -> Iterator[DeviceTiming]:
    """All ranks run each call as often as the others: a fixed number of times."""
    share = (count - 1) / count
    for size in sizes:
        whole = torch.zeros(size // 4 // count * count, device=device)
        part = torch.zeros(whole.numel() // count, device=device)
        ways: tuple[tuple[str, float, Call], ...] = (
            ("all_gather", share, partial(dist.all_gather_into_tensor, whole, part)),
            ("all_reduce", 2 * share, partial(dist.all_reduce, whole)),
        )
        for name, sent, call in ways:
            call()
            dist.barrier()
            took = max(median(_once(call, device) for _ in range(5)), 1e-9)
            moved = whole.numel() * whole.itemsize
            yield DeviceTiming(what=name, size=moved, seconds=took, rate=sent * moved / took)


if __name__ == "__main__":
    kind, count, folder, rank = sys.argv[1:]
    timings = _rank(kind, int(count), Path(folder), int(rank))
    sys.stdout.write(json.dumps([asdict(timing) for timing in timings]))
