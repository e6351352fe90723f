"""How long compiling and tuning take, and how they grow with graphs and clusters.

    python benchmarks/compile_time.py

Compiles PPO for 8 devices, graphs of 10 to 1,000 nodes for 8 to 1,024 devices, every pass
verified, and tunes PPO of a 7B model for 64 devices. One process, one thread. Writes
benchmarks/results/compile_time.json and .md.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from common import (
    CACHE,
    RESULTS,
    ROOT,
    machine,
    markdown_report,
    markdown_table,
    say,
    text_table,
    write_results,
)

if TYPE_CHECKING:
    from rlflow.graph.graph import Graph
    from rlflow.graph.placement import Placement

PPO_TARGET, LARGE_TARGET, TUNE_TARGET = 0.030, 2.0, 10.0
NODES = (10, 32, 100, 316, 1000)
DEVICES = (8, 64, 256, 1024)
SHAPE = "qwen2.5-0.5b"
MODELS_EVERY = 20
JUDGES = 4
HEADER = ("case", "nodes", "actions", "devices", "seconds", "us a node", "target", "met")
NOTES = (
    "Seconds are the least of several runs in a process that is warm, every pass verified; "
    "of `tune`, of one run.",
    "`apart`: a graph of n nodes is GRPO with n / 20 frozen models that look at its samples, and "
    "reward functions with metrics for the rest; half of the devices train, a quarter sample, the "
    "rest are four pools of frozen models.",
    "`together`: n / 4 frozen models, all on the same devices; with 12 GB each they take turns.",
    "`growth` is the exponent e of seconds ~ size^e from the row above, along one axis.",
)


def main() -> None:
    """Measure every case, print the table, write the results."""
    parser = argparse.ArgumentParser(description="Time to compile and to tune.")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    options = parser.parse_args()
    facts, repeats = machine(), 2 if options.quick else 5
    nodes = NODES[:3] if options.quick else NODES
    devices = DEVICES[:2] if options.quick else DEVICES
    found = [ppo_case(name, repeats) for name in ("colocate x8", "split x4")]
    along_nodes = [synthetic(count, devices[1], repeats) for count in nodes]
    along_devices = [synthetic(nodes[2], count, repeats) for count in devices]
    largest = synthetic(nodes[-1], devices[-1], repeats, target=LARGE_TARGET)
    few, many = devices[1], devices[-1]
    together = [crowded(nodes[-1], many, ""), crowded(nodes[-1], few, "@12GB")]
    found += [*along_nodes, *along_devices, largest, *together, tuned_case(quick=options.quick)]
    growth = {
        "nodes": exponents(along_nodes, "nodes"),
        "devices": exponents(along_devices, "devices"),
    }
    rows = [row(case) for case in found]
    print(text_table(HEADER, rows))
    lines = [
        f"growth with {axis}: {', '.join(f'{e:.2f}' for e in es)}" for axis, es in growth.items()
    ]
    print("\n".join(lines))
    page = markdown_report(
        "Compiling and tuning", facts, [markdown_table(HEADER, rows), "\n".join(lines)], NOTES
    )
    folder = CACHE / "quick" if options.quick else RESULTS
    write_results(
        folder, "compile_time", {"machine": facts, "cases": found, "growth": growth}, page
    )


def ppo_case(name: str, repeats: int) -> dict[str, Any]:
    """PPO of a 7B model on 8 devices under a placement of its pipeline."""
    from rlflow.cli.commands import Target, declare
    from rlflow.scheduler.search.space import hand_written

    target = Target(pipeline=str(ROOT / "pipelines" / "ppo_arithmetic.py"), model_shape=SHAPE)
    declared = declare(target)
    placement = hand_written(declared.pipeline.placements, 8)[name]
    return compiled(f"ppo, {name}", declared.graph, placement, 8, repeats, PPO_TARGET)


def synthetic(
    count: int, devices: int, repeats: int, target: float | None = None
) -> dict[str, Any]:
    """A graph of so many nodes on so many devices."""
    say(f"{count} nodes on {devices} devices")
    graph = graph_of(count)
    few = 2 if count * devices > 50_000 else repeats
    return compiled("apart", graph, pools_of(graph, devices), devices, few, target)


def crowded(count: int, devices: int, memory: str) -> dict[str, Any]:
    """As many nodes, a quarter of them of models, all on the same devices."""
    import rlflow as rf

    say(f"{count} nodes together on {devices}{memory} devices")
    graph = graph_of(count, models_every=4)
    placement = rf.Placement(pools={"all": devices}, assign={"*": rf.on("all", fsdp=8)})
    return compiled(f"together{memory}", graph, placement, devices, 2, None, memory)


def graph_of(count: int, models_every: int = MODELS_EVERY) -> Graph:
    """GRPO, frozen models that look at its samples, and reward functions with their metrics."""
    import rlflow as rf
    from rlflow import ops

    path = f"shape:{SHAPE}"

    def score(response: str, weight: int) -> float:
        return float(len(response) * weight)

    def declare(cfg: rf.Config) -> None:
        actor = rf.Model("actor", path, dtype="bfloat16", optimizer=rf.AdamW(lr=1e-6))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=1024)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=32)
        reward = ops.reward(score, samples, weight=0)
        advantage = ops.advantage("grpo", samples, reward)
        ops.update(actor, samples, advantage, loss=rf.PolicyLoss("ppo_clip"))
        frozen = count // models_every
        for number in range(frozen):
            model = rf.Model(f"ref{number}", path, dtype="bfloat16")
            looked = ops.log_probs(model, samples, name=f"look{number}")
            ops.metrics(looked, name=f"looked{number}")
        for number in range(1, (count - 5) // 2 - frozen + 1):
            scored = ops.reward(score, samples, weight=number, name=f"score{number}")
            ops.metrics(scored, name=f"scored{number}")

    return rf.Pipeline(name="synthetic", function=declare, config=rf.Config, placements={}).trace()


def pools_of(graph: Graph, devices: int) -> Placement:
    """Half of the devices train, a quarter sample, the rest are pools of frozen models."""
    import rlflow as rf

    judges = min(JUDGES, devices // 4)
    pools = {"train": devices // 2, "gen": devices // 4}
    pools |= {f"judge{number}": devices // 4 // judges for number in range(judges)}
    assign = {"actor": rf.on("train"), "actor.rollout": rf.on("gen")}
    frozen = [model.name for model in graph.models if model.name != "actor"]
    assign |= {name: rf.on(f"judge{at % judges}") for at, name in enumerate(frozen)}
    return rf.Placement(pools=pools, assign=assign)


def compiled(
    name: str,
    graph: Graph,
    placement: Placement,
    devices: int,
    repeats: int,
    target: float | None,
    memory: str = "",
) -> dict[str, Any]:
    """The figures of compiling a graph, verified."""
    from rlflow.scheduler.compile import compile_plan
    from rlflow.scheduler.devices.cluster import parse_cluster

    cluster = parse_cluster(f"h100:{devices}{memory}", devices)
    seconds, made = fastest(lambda: compile_plan(graph, placement, cluster), repeats)
    return {
        "case": name,
        "nodes": len(graph.nodes),
        "actions": len(made.plan.actions),
        "devices": devices,
        "seconds": seconds,
        "target": target,
        "passed": target is None or seconds < target,
    }


def tuned_case(*, quick: bool) -> dict[str, Any]:
    """`tune` for PPO of a 7B model."""
    from rlflow.cli.commands import Target
    from rlflow.cli.tuning import tune_target

    count = 8 if quick else 64
    say(f"tuning PPO for {count} devices")
    target = Target(
        pipeline=str(ROOT / "pipelines" / "ppo_arithmetic.py"),
        devices=f"h100:{count}",
        model_shape="qwen2.5-7b",
    )
    seconds, found = fastest(lambda: tune_target(target), 1)
    return {
        "case": f"tune ppo 7B, {found.compiled} plans",
        "nodes": len(found.graph.nodes),
        "actions": len(found.best.plan.actions),
        "devices": count,
        "seconds": seconds,
        "target": TUNE_TARGET,
        "passed": seconds < TUNE_TARGET,
        "best_seconds": found.best.period,
        "hand_written_seconds": {tried.name: tried.period for _, tried in found.written},
    }


def fastest(action: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """The least seconds of several runs, and what the last one made."""
    times, made = [], None
    for _ in range(repeats):
        began = time.perf_counter()
        made = action()
        times.append(time.perf_counter() - began)
    return min(times), made


def exponents(cases: Sequence[dict[str, Any]], axis: str) -> list[float]:
    """How seconds grow along an axis, from each case to the next: 1 is linear."""
    return [
        math.log(after["seconds"] / before["seconds"]) / math.log(after[axis] / before[axis])
        for before, after in itertools.pairwise(cases)
    ]


def row(case: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    target = case["target"]
    return (
        case["case"],
        str(case["nodes"]),
        str(case["actions"]),
        str(case["devices"]),
        f"{case['seconds']:.3f}",
        f"{case['seconds'] * 1e6 / case['nodes']:.0f}",
        "-" if target is None else f"< {target:g} s",
        "-" if target is None else "yes" if case["passed"] else "NO",
    )


if __name__ == "__main__":
    main()
