"""Kinds of devices: what their data sheets say they compute, read and send.

Peaks as printed by the maker; how much of them is reached is said where they are used. A
CPU device is made of this machine's figures elsewhere. Knows no models and no plans.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

GB = 1e9
GPUS_PER_HOST = 8
CPU_FLOPS_PER_THREAD = 98e9
CPU_BANDWIDTH = 20e9
# Products of few rows read float32 and bfloat16 weights at this rate, of oneDNN as of MKL.
CPU_WEIGHTS_PER_THREAD = 8e9
# bfloat16 products by the instructions that there are, oneDNN kept to them; the last has none.
CPU_LOW_FLOPS = (("avx512_bf16", 170e9), ("avx512f", 35e9), ("", 18e9))
# Of each number of a distribution: to draw a token, to take a log-prob, and to train on it.
CPU_DRAWN, CPU_SCORED, CPU_LEARNED = 5e-9, 2e-9, 4e-9
# Interpreter, torch and the libraries of a process, beside what a plan counts.
CPU_PROCESS = 0.5e9
CPU_COLLECTIVES = 1.5e9
# Numpy arrays through Ray's object store, from one process to another: measured on one host.
OBJECT_STORE = 5e9
STORE_SECONDS = 2e-3
# What an engine's process keeps of an accelerator beside graphs, weights and pool: assumed.
ENGINE_ASLEEP = 1.5e9
CPU_SOURCE = (
    "matrix product, copy, softmax and gloo all-reduce measured on cores of an AMD EPYC 9004"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of device; bandwidths in B/s in one direction, rates in flop/s, times in seconds.

    `memory` in bytes; `flops` of dense bf16 products and `flops32` of float32 ones without
    TF32, as PyTorch computes them; `bandwidth` of its memory. `link` joins the devices of a
    host, `bus` is what collectives get of it; `nic` is its share of the host's network and
    `host_link` its way to the host's memory, of which a host has `host_memory` bytes. `launch`
    is the least time from one kernel to the next, `replayed` the same in a captured graph;
    `latency` that before a collective's first byte, `hop` and `far_hop` that of each rank it
    passes, in one host and between hosts. `reached` is the part of the bandwidths that large
    copies get, `sustained` the part of the rates that whole layers get. An engine's process
    keeps `engine` bytes while its weights and its pool sleep: context and workspaces.

    Where the threads that read weights are those that multiply, as on a CPU, a product takes both
    times: `weights` is then the bandwidth at which it reads them, 0 where it reads beside. There a
    number of a distribution over the vocabulary takes `drawn` seconds to draw a token of it,
    `scored` to take a log-prob, `learned` to take one and its gradient; 0 is not counted.
    """

    name: str
    memory: float
    flops: float
    flops32: float
    bandwidth: float
    link: float
    bus: float
    nic: float
    host_link: float
    host_memory: float
    launch: float
    latency: float
    hop: float
    far_hop: float
    reached: float
    sustained: float
    source: str
    engine: float = 0.0
    replayed: float = 0.0
    weights: float = 0.0
    drawn: float = 0.0
    scored: float = 0.0
    learned: float = 0.0

    def rate(self, itemsize: int) -> float:
        """Peak flop/s of products of numbers of so many bytes; doubles at half of floats."""
        if itemsize <= 2:
            return self.flops
        return self.flops32 if itemsize == 4 else self.flops32 / 2


def _gpu(
    name: str,
    *,
    memory: float,
    flops: float,
    flops32: float,
    bandwidth: float,
    link: float,
    nic: float,
    host_link: float,
    source: str,
) -> Kind:
    """An accelerator of a host of eight: 2 TB of host memory, latencies as NCCL has them.

    A kernel follows another after 4 us, in a captured graph after 1 us (assumed); a small
    all-reduce of eight devices takes about 20 us within a host (NCCL, 2 + 2 log2 8 steps), some
    40 us across hosts.
    """
    return Kind(
        name=name,
        memory=memory * GB,
        flops=flops,
        flops32=flops32,
        bandwidth=bandwidth,
        link=link,
        bus=link,
        nic=nic,
        host_link=host_link,
        host_memory=2e12,
        launch=4e-6,
        latency=1e-5,
        hop=1e-6,
        far_hop=5e-6,
        reached=0.8,
        sustained=0.4,
        source=source,
        engine=ENGINE_ASLEEP,
        replayed=1e-6,
    )


KINDS = {
    kind.name: kind
    for kind in (
        _gpu(
            "a100",
            memory=80,
            flops=312e12,
            flops32=19.5e12,
            bandwidth=2.04e12,
            link=3e11,
            nic=25e9,
            host_link=32e9,
            source="NVIDIA A100 80GB SXM and DGX A100 data sheets (NVLink 3, HDR 200 Gb/s, PCIe 4)",
        ),
        _gpu(
            "h100",
            memory=80,
            flops=989e12,
            flops32=67e12,
            bandwidth=3.35e12,
            link=4.5e11,
            nic=50e9,
            host_link=64e9,
            source="NVIDIA H100 SXM and DGX H100 data sheets (NVLink 4, NDR 400 Gb/s, PCIe 5)",
        ),
        _gpu(
            "h200",
            memory=141,
            flops=989e12,
            flops32=67e12,
            bandwidth=4.8e12,
            link=4.5e11,
            nic=50e9,
            host_link=64e9,
            source="NVIDIA H200 SXM and DGX H200 data sheets (NVLink 4, NDR 400 Gb/s, PCIe 5)",
        ),
        _gpu(
            "b200",
            memory=180,
            flops=2250e12,
            flops32=75e12,
            bandwidth=7.7e12,
            link=9e11,
            nic=50e9,
            host_link=64e9,
            source="NVIDIA HGX B200 and DGX B200 data sheets (NVLink 5, NDR 400 Gb/s, PCIe 5)",
        ),
    )
}


def cpu_kind(memory: float, threads: int, host_memory: float, flags: Collection[str]) -> Kind:
    """A CPU device of so many threads with its share of the memory; it copies as it reads.

    `flags` are the processor's instructions, by which it multiplies bfloat16.

    Collectives are those of gloo over the loopback device: 0.2 ms for a few bytes, 10 MB of an
    all-reduce in 7 ms.
    """
    low = next(rate for flag, rate in CPU_LOW_FLOPS if not flag or flag in flags)
    return Kind(
        name="cpu",
        memory=memory,
        flops=low * threads,
        flops32=CPU_FLOPS_PER_THREAD * threads,
        bandwidth=CPU_BANDWIDTH,
        link=CPU_BANDWIDTH,
        bus=CPU_COLLECTIVES,
        nic=1e9,
        host_link=CPU_BANDWIDTH,
        host_memory=host_memory,
        launch=1e-5,
        latency=1e-4,
        hop=5e-5,
        far_hop=2e-4,
        reached=1.0,
        sustained=1.0,
        source=CPU_SOURCE,
        weights=min(CPU_WEIGHTS_PER_THREAD * threads, CPU_BANDWIDTH),
        drawn=CPU_DRAWN / threads,
        scored=CPU_SCORED / threads,
        learned=CPU_LEARNED / threads,
    )
