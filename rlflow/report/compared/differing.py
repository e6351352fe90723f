"""Where two runs part: the first action whose recorded rows differ, in a bit or in their number.

Rows, nodes and iterations that only one of them has recorded are not compared. The figures of
metrics.jsonl are of all rows, so they tell what a record of some rows cannot.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import Finding, UsageError
from rlflow.report.compared.bits import first_place, row_bits, shown_value
from rlflow.runtime.record.edges.names import DTYPES, SHAPES, TEXT
from rlflow.runtime.record.edges.reading import about, read_edge, recorded
from rlflow.runtime.record.identity.documents import read_document
from rlflow.runtime.record.metrics import read_metrics

ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDifference:
    """The first action whose rows differ: the first such row, its first such field, both values.

    `field` is None where all rows that both have are equal, and one has more of them; `values`
    are how many. `place` counts tokens, characters of text, or entries of a row, from 0, as
    `places` says; it is None of one number. `fields` are all that differ in that row, `rows`
    the rows that differ, of `compared` ones.
    """

    iteration: int
    node: str
    row: int
    group: int | None
    field: str | None
    place: int | None
    places: str
    values: tuple[str, str]
    fields: tuple[str, ...]
    rows: int
    compared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDifference:
    """The first figure of metrics.jsonl that differs, by iteration, then in plan order."""

    iteration: int
    name: str
    values: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """What two runs have in common, and where they first differ.

    `edges` are the nodes whose rows were compared, with the iterations; `iterations` those whose
    figures were. `notes` say what could not be compared. `config` has what the configs differ in.
    """

    edges: Mapping[str, Sequence[int]]
    iterations: Sequence[int]
    difference: RowDifference | None
    metric: MetricDifference | None
    config: Mapping[str, tuple[object, object]]
    notes: Sequence[str]

    @property
    def same(self) -> bool:
        """Whether nothing that both have left differs."""
        return self.difference is None and self.metric is None

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"same": self.same, **asdict(self)}


def compare_runs(one: Path, other: Path) -> Parting:
    """Compare what two runs have left: by iteration, then in plan order, row, and field.

    Raises UsageError E338 where their graphs are of other nodes, E337 where neither rows nor
    figures of one iteration are in both.
    """
    _check_graphs(one, other)
    first, second = recorded(one), recorded(other)
    order = plan_order(one)
    shared = sorted(set(first) & set(second), key=lambda node: (_rank(order, node), node))
    both = {node: sorted(set(first[node]) & set(second[node])) for node in shared}
    both = {node: numbers for node, numbers in both.items() if numbers}
    figures = [_figures(run) for run in (one, other)]
    iterations = sorted(set(figures[0]) & set(figures[1]))
    if not both and not iterations:
        raise UsageError(_nothing_shared((one, other), (first, second), figures))
    configs = [_json(run / "config.json") for run in (one, other)]
    return Parting(
        edges=both,
        iterations=iterations,
        difference=next(_row_differences((one, other), both, field_order(one)), None),
        metric=next(_metric_differences(figures, iterations, order), None),
        config=_differing(*configs),
        notes=_notes((one, other), (first, second), both),
    )


def plan_order(run: Path) -> list[str]:
    """The nodes of a run in the order in which its plan has their actions; empty without a plan."""
    actions = _json(run / "plan.json").get("actions", [])
    return list(dict.fromkeys(each["node"] for each in actions if each.get("node")))


def field_order(run: Path) -> dict[str, list[str]]:
    """The fields that each node of a run makes, as its op declares them; empty without a graph."""
    nodes = _json(run / "graph.json").get("nodes", [])
    return {node["name"]: [each.partition(":")[0] for each in node["outputs"]] for node in nodes}


def _row_differences(
    runs: tuple[Path, Path],
    both: Mapping[str, Sequence[int]],
    fields: Mapping[str, Sequence[str]],
) -> Iterator[RowDifference]:
    """The differences of edges, the first one of each, in order."""
    for iteration in sorted({number for numbers in both.values() for number in numbers}):
        for node, numbers in both.items():
            if iteration in numbers:
                found = edge_difference(*runs, node, iteration, fields.get(node, ()))
                if found is not None:
                    yield found


def edge_difference(
    one: Path, other: Path, node: str, iteration: int, fields: Sequence[str] = ()
) -> RowDifference | None:
    """The first difference of a node's rows in an iteration: by row, then by `fields` in order."""
    tables = [read_edge(run, node, iteration) for run in (one, other)]
    numbers = [table.column("row").to_pylist() for table in tables]
    common = sorted(set(numbers[0]) & set(numbers[1]))
    places = [{row: place for place, row in enumerate(rows)} for rows in numbers]
    pairs = zip(tables, places, strict=True)
    left, right = (table.take([place[row] for row in common]) for table, place in pairs)
    shared = [name for name in left.column_names if name in right.column_names and name != "row"]
    names = sorted(shared, key=lambda name: _rank(fields, name))
    differ = {name: _rows_that_differ(left, right, name) for name in names}
    rows = sorted({at for found in differ.values() for at in found})
    if rows:
        at = rows[0]
        wrong = tuple(name for name in names if at in differ[name])
        found = _difference(left, right, at, wrong)
        group = left.column("group")[at].as_py() if "group" in names else None
    else:
        totals = [about(table).total for table in tables]
        if totals[0] == totals[1]:
            return None
        at, wrong, group = min(totals), (), None
        found = {"field": None, "place": None, "places": "", "values": tuple(map(str, totals))}
    return RowDifference(
        iteration=iteration,
        node=node,
        row=common[at] if rows else at,
        group=group,
        fields=wrong,
        rows=len(rows),
        compared=len(common),
        **found,
    )


def _rows_that_differ(left: Any, right: Any, name: str) -> set[int]:
    """The places of rows whose field has other bits, or is of another dtype."""
    if _said(left, DTYPES, name) != _said(right, DTYPES, name):
        return set(range(len(left)))
    pairs = zip(row_bits(left.column(name)), row_bits(right.column(name)), strict=True)
    return {at for at, (a, b) in enumerate(pairs) if a != b}


def _difference(left: Any, right: Any, at: int, fields: Sequence[str]) -> dict[str, Any]:
    """Field, place and values of a row that differs."""
    name = fields[0]
    dtypes = [_said(table, DTYPES, name) for table in (left, right)]
    held = [row_bits(table.column(name))[at] for table in (left, right)]
    if dtypes[0] != dtypes[1]:
        return {"field": name, "place": None, "places": "", "values": tuple(map(str, dtypes))}
    place = first_place(*held)
    shape = _said(left, SHAPES, name)
    kind = "character" if dtypes[0] == TEXT else "token" if shape == [None] else "entry"
    values = tuple(shown_value(each, place, str(dtypes[0])) for each in held)
    return {"field": name, "place": place, "places": kind, "values": values}


def _said(table: Any, key: bytes, name: str) -> Any:
    """What the metadata of a table say of a field."""
    return json.loads(table.schema.metadata[key]).get(name)


def _metric_differences(
    figures: Sequence[Mapping[int, Mapping[str, float]]],
    iterations: Sequence[int],
    order: Sequence[str],
) -> Iterator[MetricDifference]:
    """The figures that differ, in order; of those that both runs have."""
    for iteration in iterations:
        left, right = (lines[iteration] for lines in figures)
        names = set(left) & set(right)
        for name in sorted(names, key=lambda name: (_rank(order, _node_of(name)), name)):
            values = repr(left[name]), repr(right[name])
            if values[0] != values[1]:
                yield MetricDifference(iteration=iteration, name=name, values=values)


def _node_of(metric: str) -> str:
    return metric.rpartition("/")[0]


def _rank(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _figures(run: Path) -> dict[int, Mapping[str, float]]:
    """The figures of a run by iteration; none of one that has not ended an iteration."""
    path = run / "metrics.jsonl"
    return {line.iteration: line.metrics for line in read_metrics(path)} if path.is_file() else {}


def _json(path: Path) -> dict[str, Any]:
    """A file of a run directory; empty where it is not there."""
    return read_document(path) or {}


def _differing(
    one: Mapping[str, object], other: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """What two mappings differ in, with both values."""
    names = sorted(set(one) | set(other))
    pairs = {name: (one.get(name, ABSENT), other.get(name, ABSENT)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _notes(
    runs: Sequence[Path],
    known: Sequence[Mapping[str, Sequence[int]]],
    both: Mapping[str, Sequence[int]],
) -> list[str]:
    """What could not be compared by rows, and what to type to have it."""
    empty = [str(run) for run, found in zip(runs, known, strict=True) if not found]
    if empty:
        verb = "have" if len(empty) > 1 else "has"
        return [f"{' and '.join(empty)} {verb} no recorded rows: compared by metrics alone"]
    if not both:
        ranges = [f"{run}: {_spans(found)}" for run, found in zip(runs, known, strict=True)]
        what = f"no node is recorded in one iteration of both ({'; '.join(ranges)})"
        return [f"{what}: compared by metrics alone"]
    first = min(number for numbers in both.values() for number in numbers)
    if first > 0:
        return [f"rows before iteration {first} are not recorded in both"]
    return []


def _spans(known: Mapping[str, Sequence[int]]) -> str:
    """Which iterations of which nodes are there."""
    parts = (f"{node} {numbers[0]} to {numbers[-1]}" for node, numbers in known.items())
    return ", ".join(parts) or "no recorded rows"


def _check_graphs(one: Path, other: Path) -> None:
    """Raise UsageError E338 where two runs have other nodes, or nodes that read others."""
    nodes = [
        {node["name"]: [node["op"], node["inputs"]] for node in _json(run / "graph.json")["nodes"]}
        for run in (one, other)
        if (run / "graph.json").is_file()
    ]
    if len(nodes) < 2 or nodes[0] == nodes[1]:
        return
    lines = [f"{run}: {_alone(*pair)}" for run, pair in ((one, nodes), (other, nodes[::-1]))]
    changed = [name for name in nodes[0] if name in nodes[1] and nodes[0][name] != nodes[1][name]]
    lines += [f"read something else: {', '.join(changed)}"] if changed else []
    raise UsageError(
        Finding(
            code="E338",
            what=f"{one} and {other} are runs of different graphs",
            got="\n".join(lines),
            expected="two runs of the same nodes; config, placement and seed may differ",
        )
    )


def _alone(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    names = [name for name in mine if name not in theirs]
    return f"{', '.join(names)} in it alone" if names else "no node in it alone"


def _nothing_shared(
    runs: Sequence[Path],
    known: Sequence[Mapping[str, Sequence[int]]],
    figures: Sequence[Mapping[int, Any]],
) -> Finding:
    """E337, with what each run has."""
    got = []
    for run, found, lines in zip(runs, known, figures, strict=True):
        ended = f"metrics of {min(lines)} to {max(lines)}" if lines else "no metrics"
        got.append(f"{run}: rows of {_spans(found)}; {ended}" if found else f"{run}: {ended}")
    return Finding(
        code="E337",
        what=f"{runs[0]} and {runs[1]} have no iteration in common",
        got="\n".join(got),
        expected="recorded rows of one node, or metrics, of one iteration of both",
        fix="rlflow run PIPELINE --record NODE=every:1   for both",
    )
