"""Under which words measurements are kept: equal for equal work on equal hardware.

Plain text, stable in every process. Knows neither seconds nor where records lie.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.graph.callables import full_name_of
from rlflow.graph.fields import Field
from rlflow.graph.graph import Graph, Node
from rlflow.graph.model import Model, Muon
from rlflow.graph.op import param_text
from rlflow.graph.roles import LoopEnd, Oversampled, Portion
from rlflow.graph.rules.check import batch_of, most_rows, num_prompts
from rlflow.graph.rules.nesting import declared_name, nodes_within, path
from rlflow.scheduler.models.shapes import Shape
from rlflow.scheduler.plan.plan import Instance

if TYPE_CHECKING:
    from rlflow.graph.user.engine_options import EngineOptions

# Options that change numbers and not how long they take.
WEIGHTLESS = {"max_grad_norm", "temperature", "batched", "field", *Portion.words()}
# Options that change neither how long an engine's work takes nor what its process holds; the
# pool counts by the rows that it has room for.
BESIDE_TIME = {
    "python",
    "start_seconds",
    "memory_saver",
    "max_total_tokens",
    "mem_fraction_static",
}


def key_of_parts(*parts: str) -> str:
    """One key of its parts."""
    return " | ".join(parts)


@functools.cache
def cpu_name() -> str:
    """The model name of this machine's processor, and the cores that this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else name


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware(kind: str, threads: int) -> str:
    """A device: the kind of an accelerator, or the processor, its cores and a device's threads."""
    if kind != "cpu":
        return kind
    return f"cpu {cpu_name()}, {_cores()} cores, {threads} threads"


def work(node: Node) -> str:
    """What a node does, as far as that decides how long it takes."""
    options = {key: _option(value) for key, value in sorted(node.params) if key not in WEIGHTLESS}
    function = full_name_of(node.op.function) if node.op.function is not None else ""
    reads = ",".join(sorted(binding.name + _width(binding.field) for binding in node.inputs))
    made = ",".join(sorted(field.name + _width(field) for field in node.op.outputs))
    said = " ".join(f"{key}={value}" for key, value in options.items())
    return f"{node.op.name} {function} {said} reads {reads} makes {made}"


def _width(field: Field) -> str:
    """How many numbers a field has of one place, where that is several."""
    return f"*{field.width}" if field.width else ""


def _option(value: object) -> str:
    """An option as text; of a loss its kind, of a function its name."""
    if callable(value) and hasattr(value, "__qualname__"):
        return full_name_of(value)
    if hasattr(value, "needs"):
        return type(value).__name__
    return param_text(value)


def model(declared: Model | None, shape: Shape | None, instance: Instance | None) -> str:
    """A model by its widths, dtype and adapters, in an instance's layout."""
    if declared is None or shape is None or instance is None:
        return "no model"
    lora = f" {declared.lora.describe()}" if declared.lora is not None else ""
    trained = " trained" if instance.trained else ""
    if instance.trained and isinstance(declared.optimizer, Muon):
        trained += " by muon"
    if instance.trained and getattr(declared.optimizer, "moments", None) == "int8":
        trained += " in 8 bits"
    if instance.trained and declared.router is not None:
        trained += f" {declared.router.describe()}"
    if instance.trained and declared.freeze:
        trained += f" freeze={'+'.join(declared.freeze)}"
    layout = f"{instance.layout()} on {len(instance.devices)}"
    if instance.engine_plan.own_process:
        said = timed_options(instance.engine_plan.settings).items()
        layout += "".join(f" {name}={value}" for name, value in said)
    return f"{_digest(shape)} {declared.head} {declared.dtype}{lora}{trained} {layout}"


def drafter(graph: Graph, shapes: Mapping[str, Shape | None], name: str | None) -> str:
    """What drafts, by its widths and dtype; empty where there is none."""
    shape = None if name is None else shapes[name]
    if name is None or shape is None:
        return ""
    return f" drafts by {_digest(shape)} {graph.model(name).dtype}"


UNTIMED = (
    *("source", "family", "kind", "matrices", "routed", "windows", "tower", "sight"),
    *("carrying", "projector", "still"),
)
OF_SOME = (
    *("idle", "experts", "chosen", "latent"),
    *("without_attention", "convolved", "recurrent", "eyes"),
)


@functools.cache
def _digest(shape: Shape) -> str:
    """Widths as a few letters; what only some models have is left out of the others'."""
    said = asdict(shape).items()
    widths = {key: n for key, n in said if key not in UNTIMED and (n or key not in OF_SOME)}
    return hashlib.sha256(json.dumps(widths, sort_keys=True).encode()).hexdigest()[:12]


def timed_options(options: EngineOptions) -> Mapping[str, Any]:
    """What is said of an engine that changes how long its work takes."""
    return {name: value for name, value in options.said().items() if name not in BESIDE_TIME}


def waiting(rows: float, *, at_once: float) -> str:
    """How many rows an engine computes at once where others wait; empty if none do."""
    return "" if at_once >= rows else f" {at_once:g} at once"


def asleep(engine: str, *, on_cpu: bool) -> str:
    """What an engine keeps while it sleeps, by the words for its device and its model.

    On a CPU, where weights and pool stay, what its processes have beside them.
    """
    return key_of_parts(engine, "an engine's processes" if on_cpu else "an engine asleep")


def lengths_key(graph: Graph, origin: Node, longest: int) -> str:
    """The responses that a node makes: they depend on the weights, so on their path.

    And on which of those that it samples are left.
    """
    some, said = origin.role(Oversampled), f"at most {longest}"
    if some is not None:
        begun = num_prompts(graph, graph.node(origin.sources[0]))
        said += f", the first {some.first_groups} of {begun} groups"
    path = graph.model(origin.model).path if origin.model is not None else ""
    name = declared_name(origin.drawn_as)
    return key_of_parts("lengths", graph.name, name, path, said)


def accepted(graph: Graph, node: Node, instance: Instance, drafted: int) -> str:
    """How often drafted tokens are accepted: by which weights and drafter, of how many a turn."""
    drafter, options = instance.engine_plan.drafter_of(node), instance.engine_plan.speculative
    by = "" if drafter is None else graph.model(drafter).path
    by += "" if options is None else f"{options.algorithm} {options.draft_model or ''}"
    path = graph.model(instance.model).path
    name = declared_name(node.name)
    return key_of_parts("acceptance", graph.name, name, path, f"{drafted} by {by}")


def trips(graph: Graph, end: Node) -> str:
    """The trips through a loop, by the node that ends it: what they draw, and what they end by."""
    depth = len(path(graph, end))
    first = [n for n in nodes_within(graph, end.name) if not any(path(graph, n)[depth:])]
    drawn = [str(batch_of(node)) for node in first if node.op.rows == "new"]
    sampling = (n.model for n in first if n.op.use == "rollout" and n.model is not None)
    paths = dict.fromkeys(graph.model(name).path for name in sampling)
    loop = end.as_a(LoopEnd)
    goal = f"until {loop.when} of {most_rows(graph, end)} rows"
    limits = f"at most {loop.at_most} of {'+'.join(drawn) or 'no'} prompts"
    name = declared_name(end.name)
    return key_of_parts("trips", graph.name, name, ",".join(paths), goal, limits)
