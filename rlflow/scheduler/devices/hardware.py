"""Kinds of devices: what their data sheets say they compute, read and send.

Peaks as printed by the maker; how much of them is reached is said where they are used. A
CPU device is made of this machine's figures elsewhere. Knows no models and no plans.

Four traps of data sheets. Rates of tensor cores are printed with sparsity, which is twice the
dense ones that are here. NVLink, Infinity Fabric and NVLink-C2C are printed as the sum of both
directions, of which one is here. Memory is printed in GB that are neither 1e9 bytes nor GiB:
here is the driver's total, of which a plan leaves a share alone. A GeForce multiplies float16
twice as fast when it adds in float16, which PyTorch does not ask for: the rate with float32 sums
is here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from rlflow.scheduler.devices.curves import NO_CURVES, Curves
from rlflow.scheduler.devices.efficiency import sustained

GB = 1e9
MIB = 2**20
# Of an accelerator's memory, for what no plan counts: CUDA context, NCCL, segments not filled.
RESERVE = 0.08
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


# Chips whose torch is one for ROCm.
ROCM = ("mi300x",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of device; bandwidths in B/s in one direction, rates in flop/s, times in seconds.

    `memory` in bytes, as the driver says them, of which plans use all but the share `reserve`;
    `flops` of dense bf16 products, `flops32` of float32 ones without TF32,
    as PyTorch computes them, `flops_tf32` of those with it, `flops64` of float64 ones;
    `bandwidth` of its memory. `link` joins two devices of a host, `bus` is what collectives get
    of all links; `nic` is its share of the host's network and `host_link` its way to the host's
    memory, of which a host has `host_memory` bytes and `per_host` devices; `host_sharing` of them
    have one such way together. Where links leave the host, so many as `linked` devices are joined
    by them, 0 where they do not. `family` is the kind of the table that a declared one stands on,
    `gpu` where it stands alone. A thread of its host takes `host` times as long for the same
    Python as one of an x86 server. `launch` is the least time between kernels, `replayed`
    the same in a captured graph; `latency` that before a collective's first byte, `hop` and
    `far_hop` that of each rank it passes, in one host and between hosts. `reached` is the part of
    the bandwidths that large copies get, `sustained` the part of the rates that large products get.
    What was measured by size is in `curves`, which go before these. An engine's process keeps
    `engine` bytes while its weights and its pool sleep: context and
    workspaces.

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
    flops_tf32: float = 0.0
    flops64: float = 0.0
    per_host: int = GPUS_PER_HOST
    host_sharing: int = 1
    linked: int = 0
    host: float = 1.0
    family: str = ""
    reserve: float = 0.0
    curves: Curves = NO_CURVES

    @property
    def usable_memory(self) -> float:
        """Bytes of its memory that a plan may use."""
        return self.memory * (1 - self.reserve)

    @property
    def has_tf32(self) -> bool:
        """Whether torch multiplies float32 numbers by TF32 on it: as its figures say, not by ROCm.

        There torch 2.13 asks for an environment variable (`HIPBLASLT_ALLOW_TF32`).
        """
        return self.flops_tf32 > 0 and self.chip not in ROCM

    @property
    def chip(self) -> str:
        """The kind of the table that it is of, or its own name."""
        return self.family or self.name

    def rate(self, itemsize: int, *, tf32: bool = False) -> float:
        """Peak flop/s of products of numbers of so many bytes; doubles at half unless said.

        With `tf32` that of float32 ones by TensorFloat-32, where the kind has a figure for it.
        """
        if itemsize <= 2:
            return self.flops
        if tf32 and itemsize == 4 and self.has_tf32:
            return self.flops_tf32
        return self.flops32 if itemsize == 4 else self.flops64 or self.flops32 / 2


def _gpu(
    name: str,
    *,
    mib: float,
    flops: float,
    flops32: float,
    flops_tf32: float,
    flops64: float,
    bandwidth: float,
    link: float,
    nic: float,
    host_link: float,
    source: str,
    bus: float = 0.0,
    host_memory: float = 2e12,
    per_host: int = GPUS_PER_HOST,
    host_sharing: int = 1,
    linked: int = 0,
    host: float = 1.0,
) -> Kind:
    """An accelerator; `mib` of memory by its driver, rates in Tflop/s, bandwidths in GB/s.

    Its host is the maker's server with eight of them and 2 TB unless said. A kernel follows
    another after 4 us on x86, in a captured graph after 1 us (assumed); a small all-reduce of eight
    devices takes about 20 us within a host (NCCL, 2 + 2 log2 8 steps), some 40 us across hosts.
    """
    return Kind(
        name=name,
        memory=mib * MIB,
        reserve=RESERVE,
        flops=flops * 1e12,
        flops32=flops32 * 1e12,
        flops_tf32=flops_tf32 * 1e12,
        flops64=flops64 * 1e12,
        bandwidth=bandwidth * GB,
        link=link * GB,
        bus=(bus or link) * GB,
        nic=nic * GB,
        host_link=host_link * GB,
        host_memory=host_memory,
        launch=4e-6 * host,
        latency=1e-5,
        hop=1e-6,
        far_hop=5e-6,
        reached=0.8,
        sustained=sustained(name),
        source=source,
        engine=ENGINE_ASLEEP,
        replayed=1e-6,
        per_host=per_host,
        host_sharing=host_sharing,
        linked=linked,
        host=host,
    )


# A DGX A100 has four PCIe switches, each with one way of 16 lanes to a processor for two devices
# (its user guide): vLLM wakes 59 GB on each of four in 5.3 s and 61 GB on one alone in 2.9 s
# ("Zero-reload model switching with sleep mode", 2025).
KINDS = {
    kind.name: kind
    for kind in (
        _gpu(
            "a100",
            mib=81920,
            flops=312,
            flops32=19.5,
            flops_tf32=156,
            flops64=19.5,
            bandwidth=2040,
            link=300,
            nic=25,
            host_link=32,
            host_sharing=2,
            source="NVIDIA A100 80GB SXM and DGX A100 data sheets (NVLink 3, HDR 200 Gb/s, PCIe 4)",
        ),
        _gpu(
            "a800",
            mib=81920,
            flops=312,
            flops32=19.5,
            flops_tf32=156,
            flops64=19.5,
            bandwidth=2040,
            link=200,
            nic=25,
            host_link=32,
            host_sharing=2,
            source="NVIDIA A800 80GB SXM data sheet, 2022 (an A100 with NVLink of 400 GB/s)",
        ),
        _gpu(
            "h100",
            mib=81559,
            flops=989,
            flops32=67,
            flops_tf32=494,
            flops64=67,
            bandwidth=3350,
            link=450,
            nic=50,
            host_link=64,
            source="NVIDIA H100 SXM and DGX H100 data sheets (NVLink 4, NDR 400 Gb/s, PCIe 5)",
        ),
        _gpu(
            "h800",
            mib=81559,
            flops=989,
            flops32=67,
            flops_tf32=494,
            flops64=1,
            bandwidth=3350,
            link=200,
            nic=50,
            host_link=64,
            source="NVIDIA H800 SXM data sheet, 2023 (an H100 with NVLink of 400 GB/s)",
        ),
        _gpu(
            "h20",
            mib=97871,
            flops=148,
            flops32=44,
            flops_tf32=74,
            flops64=1,
            bandwidth=4000,
            link=450,
            nic=50,
            host_link=64,
            source="NVIDIA HGX H20 data sheet, 2023 (148 is dense; NVLink 4, PCIe 5, NIC as H100)",
        ),
        _gpu(
            "h200",
            mib=143771,
            flops=989,
            flops32=67,
            flops_tf32=494,
            flops64=67,
            bandwidth=4800,
            link=450,
            nic=50,
            host_link=64,
            source="NVIDIA H200 SXM and DGX H200 data sheets (NVLink 4, NDR 400 Gb/s, PCIe 5)",
        ),
        _gpu(
            "b200",
            mib=183359,
            flops=2250,
            flops32=75,
            flops_tf32=1125,
            flops64=37,
            bandwidth=7700,
            link=900,
            nic=50,
            host_link=64,
            source="NVIDIA HGX B200 and DGX B200 data sheets (NVLink 5, NDR 400 Gb/s, PCIe 5)",
        ),
        # A host is a tray: two superchips, each of a Grace with 480 GB and two GPUs that share its
        # NVLink-C2C of 450 GB/s in one direction. NVLink joins all trays of a rack. Its host is
        # at a product by torch for 37.08 us, in a DGX H100 13.48 (Transformer Engine, issue 2053).
        _gpu(
            "gb200",
            mib=189471,
            flops=2500,
            flops32=80,
            flops_tf32=1250,
            flops64=40,
            bandwidth=8000,
            link=900,
            nic=50,
            host_link=225,
            host_memory=960e9,
            per_host=4,
            linked=72,
            host=37.08 / 13.48,
            source="NVIDIA GB200 NVL72 data sheet, 2024, over 72 (NVLink 5, C2C, NDR 400 Gb/s)",
        ),
        # Of PCIe alone: 200 Gb/s for two devices and 128 GB a device, as in the maker's servers.
        _gpu(
            "l40s",
            mib=46068,
            flops=362,
            flops32=91.6,
            flops_tf32=183,
            flops64=1.4,
            bandwidth=864,
            link=32,
            nic=12.5,
            host_link=32,
            host_memory=1.024e12,
            source="NVIDIA L40S data sheet, 2023, and PCIe 2-8-5 reference configuration (PCIe 4)",
        ),
        # Without peer-to-peer, a copy goes over the host's memory, twice over PCIe: half of it
        # (assumed). NIC and host memory are no data sheet's: 25 Gb/s and 64 GB a device (assumed).
        _gpu(
            "rtx4090",
            mib=24564,
            flops=165.2,
            flops32=82.6,
            flops_tf32=82.6,
            flops64=1.3,
            bandwidth=1008,
            link=16,
            nic=3.125,
            host_link=32,
            host_memory=512e9,
            source="NVIDIA Ada white paper and data sheet, 2022 (float32 sums, PCIe 4, no P2P)",
        ),
        # Seven Infinity Fabric links of 64 GB/s in one direction: one of them between two devices.
        _gpu(
            "mi300x",
            mib=196592,
            flops=1307.4,
            flops32=163.4,
            flops_tf32=653.7,
            flops64=163.4,
            bandwidth=5300,
            link=64,
            bus=448,
            nic=50,
            host_link=64,
            source="AMD Instinct MI300X and its platform's data sheets, 2023 (PCIe 5, NIC as H100)",
        ),
    )
}


# What plans for a kind take for granted, beside its figures; they say so.
TAKEN_FOR_GRANTED = {
    "mi300x": "mi300x is planned as NVIDIA's GPUs are: that ROCm's kernels, its collectives and "
    "its handles of device memory do what theirs do. rlflow was not run on it"
}


def accelerator(name: str, source: str) -> Kind:
    """A kind with what accelerators have in common; all that tells them apart is one byte or flop.

    The sizes and rates are to be replaced.
    """
    one = 1 / GB
    return replace(
        _gpu(
            name,
            mib=1,
            flops=1,
            flops32=1,
            flops_tf32=0,
            flops64=0,
            bandwidth=one,
            link=one,
            nic=one,
            host_link=one,
            source=source,
        ),
        flops=1.0,
        flops32=1.0,
    )


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
