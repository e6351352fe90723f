"""Resharding beside gathering: the bytes that move, and the time until the target is filled.

    python benchmarks/reshard.py

A Llama of the given size under FSDP2 (and tensor parallelism) is brought into another layout
twice, in turn, by the same processes: by rlflow's planned moves, and by all-gathering every
parameter (`DTensor.full_tensor`) and copying out the target's part. Every rank is a process of
one thread, connected by gloo on this host. Seconds are those of the slowest rank. Writes
benchmarks/results/reshard.json and .md after every case.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import (
    CACHE,
    RESULTS,
    machine,
    markdown_report,
    markdown_table,
    say,
    text_table,
    write_results,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlflow.contract.values import Shard
    from rlflow.engines.reshard.boxes import Entry
    from rlflow.engines.reshard.resharder import Resharder

TARGET = 1.0
# The dimension that tensor parallelism cuts the weight of a layer along; others are whole.
CUT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("embed_tokens", "lm_head"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}
HEADER = (
    "case", "transport", "model MB", "received MB", "of minimum", "rlflow ms", "gather ms",
    "ratio", "of pairs", "met", "plan ms", "staging MB", "gathered MB",
)  # fmt: skip
NOTES = (
    "received: bytes that all ranks took from others, counted as they arrived; of minimum: over "
    "the bytes of their targets that they did not hold (1.0 is the target).",
    "ratio: median over the pairs of (rlflow / gather), with the lowest and the highest; met where "
    "the bytes are the minimum and rlflow is not slower.",
    "plan: making the resharder, once for all runs. staging: memory of a rank beside the weights; "
    "gathered: the largest parameter, which the other side holds whole beside them.",
    "The other side takes fresh memory for every whole parameter, as `full_tensor` does; touching "
    "it for the first time is a good part of its time on a host.",
    "The targets of both sides are compared, bit for bit, and rlflow's own check is run.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trained layout, fsdp ranks x tp ranks, and what the same ranks are to hold then."""

    name: str
    fsdp: int
    tp: int
    target_tp: int

    @property
    def ranks(self) -> int:
        """How many processes."""
        return self.fsdp * self.tp


CASES = (
    Case(name="FSDP 2 -> TP 2", fsdp=2, tp=1, target_tp=2),
    Case(name="FSDP 4 -> replicated on 4", fsdp=4, tp=1, target_tp=1),
    Case(name="FSDP 2 x TP 2 -> DP 4", fsdp=2, tp=2, target_tp=1),
)
TRANSPORTS = ("collective", "shared memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A Llama, float32."""

    hidden: int = 512
    intermediate: int = 1408
    layers: int = 8
    vocabulary: int = 32000


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One case by one transport; seconds by pair, bytes over all ranks."""

    case: str
    transport: str
    model: int
    received: int
    minimum: int
    ours: tuple[float, ...]
    gathering: tuple[float, ...]
    plan: float
    staging: int
    gathered: int

    @property
    def ratios(self) -> tuple[float, ...]:
        """Our seconds over those of gathering, by pair."""
        return tuple(a / b for a, b in zip(self.ours, self.gathering, strict=True))

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(self.ratios)

    @property
    def passed(self) -> bool:
        """Whether the bytes are the minimum and the time is not longer."""
        return self.received == self.minimum and self.ratio <= TARGET

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        return (
            self.case,
            self.transport,
            f"{self.model / 1e6:.0f}",
            f"{self.received / 1e6:.0f}",
            f"{self.received / self.minimum:.3f}",
            f"{statistics.median(self.ours) * 1e3:.0f}",
            f"{statistics.median(self.gathering) * 1e3:.0f}",
            f"{self.ratio:.2f}",
            f"{min(self.ratios):.2f}..{max(self.ratios):.2f}",
            "yes" if self.passed else "NO",
            f"{self.plan * 1e3:.0f}",
            f"{self.staging / 1e6:.1f}",
            f"{self.gathered / 1e6:.1f}",
        )

    def as_json(self) -> dict[str, Any]:
        """Everything measured, and the figures of the table."""
        figures = {"ratio": self.ratio, "ratios": self.ratios, "passed": self.passed}
        return {**asdict(self), **figures}


def main() -> None:
    """Measure every case, print the table, write the results."""
    parser = argparse.ArgumentParser(description="Resharding beside all-gathering and copying.")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="a small model, nothing written")
    options = parser.parse_args()
    size = Size(hidden=64, intermediate=128, layers=2, vocabulary=256) if options.quick else Size()
    pairs = 3 if options.quick else options.pairs
    facts = machine()
    folder = CACHE / "quick" if options.quick else RESULTS
    found: list[Found] = []
    for case in CASES:
        if options.only not in case.name:
            continue
        say(f"{case.name}: {pairs} pairs")
        found += measured(case, size, pairs, options.warmup)
        rows = [result.row() for result in found]
        title = f"Resharding a Llama of {found[0].model / 4e6:.0f} M parameters, float32, on CPU"
        page = markdown_report(title, facts, [markdown_table(HEADER, rows)], NOTES)
        data = {"machine": facts, "size": asdict(size), "cases": [f.as_json() for f in found]}
        write_results(folder, "reshard", data, page)
    print(text_table(HEADER, [result.row() for result in found]))


def measured(case: Case, size: Size, pairs: int, warmup: int) -> list[Found]:
    """Run a case in processes of its own.

    Raises SystemExit where one of them fails.
    """
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        processes = [
            context.Process(
                target=rank_main,
                args=(rank, case, size, pairs, warmup, str(Path(folder) / "store"), answers),
            )
            for rank in range(case.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise SystemExit(f"{case.name}: a rank failed")
        result: list[Found] = answers.get()
        return result


def rank_main(
    rank: int, case: Case, size: Size, pairs: int, warmup: int, store: str, answers: Any
) -> None:
    """The life of one rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.ranks)
    module = trained(case, size)
    found = [one_transport(case, module, each, pairs, warmup) for each in TRANSPORTS]
    if rank == 0:
        answers.put(found)
    dist.barrier()
    # All is said; taking the group apart at the end may still end a process by SIGABRT.
    os._exit(0)


def trained(case: Case, size: Size) -> nn.Module:
    """A Llama with random weights, the same on every rank, then sharded as in training."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    module: nn.Module = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (case.fsdp, case.tp), mesh_dim_names=("fsdp", "tp"))
    if case.tp > 1:
        columns = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        attention = {f"self_attn.{name}": style for name, style in columns.items()}
        mlp = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
        rows = {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        for layer in module.get_submodule("model.layers"):
            parallelize_module(layer, mesh["tp"], {**attention, **mlp, **rows})
    for layer in module.get_submodule("model.layers"):
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(module, mesh=mesh["fsdp"])
    return module


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """What this rank holds of the trained layout."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    from rlflow.contract.values import Shard

    found = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        sizes, starts = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        box = tuple((at, at + length) for at, length in zip(starts, sizes, strict=True))
        found[name] = Shard(shape=tuple(parameter.shape), box=box, tensor=parameter.to_local())
    return found


def tensor_parallel_table(module: nn.Module, rank: int, n: int) -> dict[str, Entry]:
    """What a rank of a tensor-parallel engine holds: equal parts along the dimension it cuts."""
    found: dict[str, Entry] = {}
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        box = [(0, length) for length in shape]
        dim = next((dim for layer, dim in CUT.items() if f".{layer}." in f".{name}"), None)
        if dim is not None:
            part = shape[dim] // n
            box[dim] = (rank * part, (rank + 1) * part)
        found[name] = (shape, "float32", tuple(box))
    return found


def empty(table: Mapping[str, Entry]) -> dict[str, Shard]:
    """A target's shards, of no sense yet, in memory that was touched."""
    import torch

    from rlflow.contract.values import Shard
    from rlflow.engines.reshard.boxes import sizes

    return {
        name: Shard(shape=shape, box=box, tensor=torch.full(sizes(box), -1.0))
        for name, (shape, _, box) in table.items()
    }


def one_transport(case: Case, module: nn.Module, transport: str, pairs: int, warmup: int) -> Found:
    """Both sides in turn, `pairs` times after `warmup`; every rank gives the same answer."""
    import torch.distributed as dist

    from rlflow.engines.reshard.ends import all_gather_values, entries
    from rlflow.engines.reshard.resharder import Resharder
    from rlflow.engines.reshard.slices import minimum_bytes

    group = dist.group.WORLD
    table = tensor_parallel_table(module, dist.get_rank() % case.target_tp, case.target_tp)
    source, mine, theirs = shards_of(module), empty(table), empty(table)
    made: list[Resharder] = []
    plan = slowest(lambda: made.append(Resharder(source, [mine], group, transport=transport)))
    received = 0
    seconds = []
    for _ in range(warmup + pairs):
        moved = []
        ours = slowest(lambda: moved.append(made[0].run()))  # noqa: B023
        seconds.append((ours, slowest(lambda: gather(module, theirs))))
        received = sum(all_gather_values(group, moved[0].received))
    require_equal(mine, theirs, made[0].check())
    by_rank = all_gather_values(group, (entries(source), dict(table)))
    least = minimum_bytes(
        {rank: held for rank, (held, _) in enumerate(by_rank)},
        {rank: wanted for rank, (_, wanted) in enumerate(by_rank)},
    )
    bytes_of = [parameter.numel() * 4 for parameter in module.parameters()]
    return Found(
        case=case.name,
        transport=transport,
        model=sum(bytes_of),
        received=received,
        minimum=sum(least.values()),
        ours=tuple(ours for ours, _ in seconds[warmup:]),
        gathering=tuple(gathering for _, gathering in seconds[warmup:]),
        plan=plan,
        staging=moved[0].staged,
        gathered=max(bytes_of),
    )


def gather(module: nn.Module, target: Mapping[str, Shard]) -> None:
    """The other side: every parameter whole on every rank, one at a time, then its part copied."""
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            shard = target[name]
            whole: Tensor = parameter.full_tensor()  # type: ignore[operator]
            shard.tensor.copy_(whole[tuple(slice(*edge) for edge in shard.box)])


def slowest(act: Callable[[], object]) -> float:
    """Seconds of the slowest rank, all starting together."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    act()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def require_equal(
    mine: Mapping[str, Shard], theirs: Mapping[str, Shard], differing: Mapping[str, Sequence[int]]
) -> None:
    """Raise SystemExit unless both sides made the same weights."""
    import torch

    wrong = [name for name in mine if not torch.equal(mine[name].tensor, theirs[name].tensor)]
    if wrong or differing:
        raise SystemExit(f"the sides differ: {wrong}, the check found {list(differing)}")


if __name__ == "__main__":
    main()
