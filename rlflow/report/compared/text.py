"""Where two runs part, as lines for a terminal."""

from __future__ import annotations

import shlex

from rlflow.report.compared.differing import MetricDifference, Parting, RowDifference


def parting_lines(found: Parting, one: str, other: str) -> list[str]:
    """The first difference, what the metrics and the configs add to it, what was compared."""
    names = (one, other)
    lines = [f"note: {note}" for note in found.notes]
    row, metric = found.difference, found.metric
    if row is not None:
        lines += _of_rows(row, names)
    elif metric is not None:
        lines.append(_first(metric))
        lines += _values(names, metric.values)
    else:
        lines.append("no difference in what both have left")
    if row is not None:
        lines += _beside(row, metric, names)
    elif metric is not None and found.edges:
        lines.append("no recorded row differs: the difference is in rows that are not recorded")
    lines += [f"config: {name} is {a} and {b}" for name, (a, b) in found.config.items()]
    lines.append(f"compared: {_compared(found)}")
    if row is not None and row.group is not None:
        tail = f"--iteration {row.iteration} --group {row.group} --tokens"
        lines.append(f"look: rlflow samples {shlex.quote(one)} {tail}")
    return lines


def _of_rows(row: RowDifference, names: tuple[str, str]) -> list[str]:
    """The action, then its first row and field."""
    lines = [f"first difference: iteration {row.iteration}, {row.node}"]
    if row.field is None:
        lines.append(f"  rows: all {row.compared} recorded by both are equal, their number is not")
        return lines + _values(names, row.values)
    group = "" if row.group is None else f", group {row.group}"
    place = "" if row.place is None else f", {row.places} {row.place}"
    lines.append(f"  row {row.row}{group}, {row.field}{place}")
    lines += _values(names, row.values)
    more = row.fields[1:]
    also = f"; in this one also {', '.join(more)}" if more else ""
    lines.append(f"  {row.rows} of {row.compared} rows differ{also}")
    return lines


def _beside(
    row: RowDifference, metric: MetricDifference | None, names: tuple[str, str]
) -> list[str]:
    """What the metrics say besides: they are of all rows, and of nodes that are not recorded."""
    if metric is None:
        return ["no metric differs in the iterations that both have ended"]
    if metric.iteration < row.iteration:
        lines = [f"before that, in the metrics: iteration {metric.iteration}, {metric.name}"]
    else:
        lines = [f"first metric that differs: iteration {metric.iteration}, {metric.name}"]
    return lines + _values(names, metric.values)


def _first(metric: MetricDifference) -> str:
    return f"first difference, by metrics: iteration {metric.iteration}, {metric.name}"


def _values(names: tuple[str, str], values: tuple[str, str]) -> list[str]:
    """Both values, below each other."""
    width = max(map(len, names))
    return [f"    {name:<{width}}  {value}" for name, value in zip(names, values, strict=True)]


def _compared(found: Parting) -> str:
    parts = [f"{node} in {len(numbers)} iterations" for node, numbers in found.edges.items()]
    return ", ".join([*parts, f"metrics of {len(found.iterations)}"])
