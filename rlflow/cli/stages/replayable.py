"""What has to be there of an iteration to compute it again: its checkpoint, and what was sampled.

All that is missing is said at once, with the options of a run that has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlflow.cli.commands import NOTHING, Planned
from rlflow.errors import Finding, UsageError
from rlflow.graph.cut.names import no_node
from rlflow.graph.graph import Graph, Node
from rlflow.runtime.record.changes import drains
from rlflow.runtime.record.checkpoint import list_iterations
from rlflow.runtime.record.edges.reading import read_edge, recorded
from rlflow.runtime.record.manifest import checkpoint_name
from rlflow.runtime.record.metrics import read_metrics
from rlflow.runtime.record.replaying.present import partly, said_iterations, unrecorded, whole_edges
from rlflow.runtime.record.rundir import RunDir
from rlflow.scheduler.plan.plan import Plan

VERSION = "version"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedEdges:
    """The nodes that write weights, edges that a record brings with its run, and what is made.

    `again` are the nodes whose rows are made anew, those that are recorded.
    """

    updates: tuple[str, ...]
    read: Mapping[str, str]
    again: tuple[str, ...]
    notes: tuple[str, ...]


def require_done(directory: RunDir, graph: Graph, iteration: int) -> None:
    """Raise UsageError E346 for an iteration that a run has not done, or that trains nothing."""
    updates = [node for node in graph.nodes if node.op.use == "train"]
    done = trained_iterations(directory, graph)
    what = f"{directory.path} has not done iteration {iteration}"
    got = f"iterations {done[0]} to {done[-1]}" if done else "no iteration"
    if not any(node.due(iteration) for node in updates):
        what = f"nothing is trained in iteration {iteration} of {directory.path}"
        got = ", ".join(f"{node.name} every {node.every}" for node in updates) or "no update"
    elif iteration in done:
        return
    raise UsageError(Finding(code="E346", what=what, got=got), summary=NOTHING)


def trained_iterations(directory: RunDir, graph: Graph) -> list[int]:
    """The iterations in which a run has trained something, ascending.

    What closes a run, as a last evaluation, has a line of figures in the iteration past its end.
    """
    lines = read_metrics(directory.metrics) if directory.metrics.is_file() else []
    updates = tuple(f"{node.name}/" for node in graph.nodes if node.op.use == "train")
    return [line.iteration for line in lines if any(n.startswith(updates) for n in line.metrics)]


def checkpoint_before(directory: RunDir, plan: Plan, iteration: int) -> Path | Finding | None:
    """The checkpoint that an iteration begins with, or what to say where it is not kept.

    None for the first iteration, which begins with none.
    """
    path = directory.checkpoints / checkpoint_name(iteration)
    if iteration == 0 or path.is_dir():
        return path if iteration else None
    done = trained_iterations(directory, plan.graph)
    may = [number for number in (0, *list_iterations(directory.checkpoints)) if number in done]
    nearest = min(may, key=lambda number: (abs(number - iteration), number))
    expected = "one of every iteration; by default a run saves every 50th and keeps two"
    if drains(plan):
        expected += "; rollouts that run ahead begin anew at each, which changes their weights"
    return Finding(
        code="E347",
        what=f"{directory.path} keeps no checkpoint from before iteration {iteration}",
        got=f"it can begin {said_iterations(may)}",
        expected=expected,
        near=(f"--iteration {nearest}",),
        fix=f"run it with --save-every 1 --keep {len(done) + 1}",
    )


def edges_read(
    planned: Planned,
    directory: RunDir,
    iteration: int,
    starts: Sequence[str],
    begin: Path | Finding | None,
) -> ReplayedEdges:
    """The edges that a record brings: those nearest above what is computed again.

    That is `starts` and all that read them; the updates alone where nothing is said. What is not
    recorded, and not sampled, is computed again too. Raises UsageError with every finding, also
    that of `begin`.
    """
    whole, run = planned.declared.whole, directory.path.resolve()
    unknown = [no_node(whole, f"--from {s}", s) for s in starts if not whole.has_node(s)]
    if unknown:
        raise UsageError(*unknown, summary=NOTHING)
    updates = [node.name for node in whole.nodes if node.op.use == "train"]
    again = _from_here_on(whole, starts or updates)
    there = {name: str(run) for name in whole_edges(run, iteration) if whole.has_node(name)}
    there |= {edge: record for record, edge in map(_split, planned.target.from_)}
    there = {name: record for name, record in there.items() if name not in again}
    there = {name: record for name, record in there.items() if whole.node(name).loop is None}
    above = _above(whole, updates, there)
    findings = [begin] if isinstance(begin, Finding) else []
    made = [whole.node(name) for name in above if name not in there]
    for node in made:
        if node.op.use == "rollout" and not _begins_at(whole, node, again):
            edge = whole.loops_of(node)[-1].name if node.loop else node.name
            findings.append(partly(directory.path, edge, unrecorded(run, edge, [iteration])))
        elif node.op.use == "rollout":
            findings += _other_weights(planned, directory, node, iteration)
    if findings:
        raise UsageError(*{each.what: each for each in findings}.values(), summary=NOTHING)
    read = {
        node.name: there[node.name] for node in whole.nodes if node.name in set(above) & set(there)
    }
    plan = planned.compiled.plan.graph
    new = [n.name for n in made if n.op.outputs and n.loop is None and plan.has_node(n.name)]
    return ReplayedEdges(
        updates=tuple(updates),
        read=read,
        again=tuple(sorted(new, key=[node.name for node in whole.nodes].index)),
        notes=tuple(_older(planned, read, iteration)),
    )


def _split(source: str) -> tuple[str, str]:
    record, _, edge = source.rpartition(":")
    return str(Path(record).resolve()), edge


def _begins_at(graph: Graph, node: Node, again: Collection[str]) -> bool:
    """Whether a node is to be computed again, or ends in a loop that is."""
    return bool({node.name, *(end.name for end in graph.loops_of(node))} & set(again))


def _from_here_on(graph: Graph, starts: Collection[str]) -> set[str]:
    """Nodes, and all that read what they make, directly or through others."""
    found, waiting = set(starts), list(starts)
    while waiting:
        name = waiting.pop()
        readers = [node.name for node in graph.nodes if name in node.sources]
        waiting += [reader for reader in readers if reader not in found]
        found.update(readers)
    return found


def _above(graph: Graph, updates: Sequence[str], there: Collection[str]) -> list[str]:
    """Updates and all that they come of, up to the edges that are there."""
    found: dict[str, None] = {}
    waiting = list(updates)
    while waiting:
        name = waiting.pop(0)
        if name in found:
            continue
        found[name] = None
        if name in there:
            continue
        node = graph.node(name)
        inside = [each.name for each in graph.nodes if each.loop == name]
        waiting += [*node.sources, *inside]
    return list(found)


def _versions(run: Path, node: Node, iteration: int) -> tuple[int, int] | None:
    """The oldest and newest weights that recorded rows of a node were sampled with."""
    if node.op.output(VERSION) is None or iteration not in recorded(run).get(node.name, ()):
        return None
    table = read_edge(run, node.name, iteration, columns=[VERSION])
    if VERSION not in table.column_names:
        return None
    values = table.column(VERSION).combine_chunks()
    flat = values.flatten() if hasattr(values, "flatten") else values
    numbers = [number for number in flat.to_pylist() if number is not None]
    return (min(numbers), max(numbers)) if numbers else None


def _other_weights(
    planned: Planned, directory: RunDir, node: Node, iteration: int
) -> Iterator[Finding]:
    """E348 for a rollout that is to be computed again, on other weights than it was made with.

    What begins with a checkpoint has its weights, however far rollouts may run ahead; the record
    is asked all the same.
    """
    newest = planned.compiled.plan.graph.written(str(node.model), iteration)
    found = _versions(directory.path, node, iteration)
    if found is None or found[0] >= newest:
        return
    yield Finding(
        code="E348",
        what=f"iteration {iteration} was sampled with older weights than its checkpoint has",
        got=f"rows of {node.name} that weights of version {found[0]} have sampled",
        expected=f"weights of version {newest}, as after {iteration} iterations",
        fix=f"read its rows: --record {node.name} for the run, and no --from above them",
    )


def _older(planned: Planned, read: Mapping[str, str], iteration: int) -> Iterator[str]:
    """What to know of rows that weights have sampled which are not those that the update has."""
    graph = planned.declared.whole
    for name, record in read.items():
        node = graph.node(name)
        found = _versions(Path(record), node, iteration)
        if found is None or node.model is None:
            continue
        newest = graph.written(node.model, iteration)
        if found[0] < newest:
            yield (
                f"{name} was sampled with {node.model} of version {found[0]}, the update begins "
                f"with {newest}: its rows are read as they are"
            )
