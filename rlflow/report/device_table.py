"""The table of what devices did: seconds, memory, tokens and MFU of each action.

Of a run's files alone; a column in which nothing is known is left out. MFU is the part of the
device's peak that a model's products take by `scheduler/models/flops.py`: those of parameters, of
the head for predictions, and of causal attention by the lengths of the rows, forward and backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from rlflow.report.charts.look import references_of
from rlflow.report.runfiles import RunFiles
from rlflow.report.tables import UNKNOWN, Rows
from rlflow.runtime.record.devices.log import DEVICE_LOG, DeviceLine, read_device_lines
from rlflow.runtime.record.identity.documents import read_document
from rlflow.runtime.record.rundir import PEAKS_FILE
from rlflow.scheduler.devices.cluster import amount
from rlflow.scheduler.models.flops import TRAINED_FORWARDS, sizes_from_json
from rlflow.scheduler.plan.text import duration

WORK = ("tokens", "passed", "predicted", "pairs")
LOW = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """Medians of an action over the run; tokens are those of all its devices an iteration."""

    action: str
    devices: int
    seconds: float
    tokens: float | None
    flops: float | None
    figures: Mapping[str, float]

    @property
    def speed(self) -> float | None:
        """Tokens a second and device."""
        return None if self.tokens is None else self.tokens / self.seconds / self.devices


def device_rows(files: RunFiles) -> list[DeviceRow]:
    """The actions of the plan that a device ran, in its order."""
    lines = [line for line in read_device_lines(files.path / DEVICE_LOG) if line.device >= 0]
    if files.plan is None or files.graph is None or not lines:
        return []
    by_action: dict[str, list[DeviceLine]] = defaultdict(list)
    for line in lines:
        by_action[line.action].append(line)
    made = {
        action["node"]: _work(by_action[action["id"]])
        for action in files.plan["actions"]
        if action["kind"] == "run" and by_action[action["id"]]
    }
    peaks = _peaks(files)
    return [
        _row(files, action, by_action[action["id"]], made, peaks)
        for action in files.plan["actions"]
        if by_action[action["id"]]
    ]


def _row(
    files: RunFiles,
    action: Mapping[str, Any],
    lines: list[DeviceLine],
    made: Mapping[str, Mapping[str, float]],
    peaks: Mapping[str, Any],
) -> DeviceRow:
    """One action: what its devices took and held, and what its tokens cost."""
    node = next((n for n in _nodes(files) if n["name"] == action["node"]), None)
    work, forwards = ({}, 0) if node is None else _passed(node, made)
    names = {name for line in lines for name in line.figures}
    seconds = median(line.figures.get("device_seconds", line.seconds) for line in lines)
    products = peaks.get("products", {}).get(node["model"] if node else None)
    epochs = forwards // TRAINED_FORWARDS or 1
    return DeviceRow(
        action=action["id"],
        devices=len({line.device for line in lines}),
        seconds=max(seconds, 1e-9),
        tokens=work["tokens"] * epochs if work else None,
        flops=_flops(products, work, forwards),
        figures={
            name: median(line.figures[name] for line in lines if name in line.figures)
            for name in names
        },
    )


def _nodes(files: RunFiles) -> list[Mapping[str, Any]]:
    return [] if files.graph is None else files.graph["nodes"]


def _passed(
    node: Mapping[str, Any], made: Mapping[str, Mapping[str, float]]
) -> tuple[Mapping[str, float], int]:
    """What a node's model reads an iteration, and what that takes in forwards over it.

    A rollout's are the rows that it makes, prompts with responses; of what scores or trains on
    rows those that whoever made the rows has noted.
    """
    if node["model"] is None:
        return {}, 0
    if made.get(node["name"]):
        return made[node["name"]], 1
    read = references_of(node["inputs"].get("response_tokens", ""))
    source = read[0].rpartition(".")[0] if read else ""
    work = made.get(source)
    if not work:
        return {}, 0
    if node["use"] != "train":
        return work, 1
    return work, TRAINED_FORWARDS * int(node["params"].get("epochs", 1))


def _flops(
    products: Mapping[str, int] | None, work: Mapping[str, float], forwards: int
) -> float | None:
    """Operations of an iteration; None where the model's widths or the rows' are not known."""
    if products is None or not work or set(WORK) - set(work):
        return None
    once = sizes_from_json(products).forward(work["passed"], work["predicted"], work["pairs"])
    return forwards * once


def _work(lines: list[DeviceLine]) -> dict[str, float]:
    """Figures of the rows of an iteration, over devices, in the medians over iterations."""
    sums: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for line in lines:
        for name in set(WORK) & set(line.figures):
            sums[name][line.iteration] += line.figures[name]
    return {name: median(found.values()) for name, found in sums.items()}


def _peaks(files: RunFiles) -> Mapping[str, Any]:
    return read_document(files.path / PEAKS_FILE) or {}


COLUMNS = (
    ("peak memory", "peak", amount),
    ("reserved", "reserved", amount),
    ("process memory", "peak_rss", amount),
    ("power", "power", "{:.0f} W".format),
    ("clock", "clock", lambda clock: f"{clock / 1e6:.0f} MHz"),
    ("used", "utilisation", "{:.0f} %".format),
)


def device_table(files: RunFiles) -> tuple[tuple[str, ...], Rows]:
    """Headings and rows of text; empty where nothing was kept."""
    rows = device_rows(files)
    peaks = _peaks(files)
    models = {} if files.graph is None else {n["name"]: n["model"] for n in _nodes(files)}
    columns: list[tuple[str, list[str]]] = [
        ("action", [row.action for row in rows]),
        ("device time", [duration(row.seconds) for row in rows]),
        ("tokens/s/device", [_text(row.speed, "{:,.0f}".format) for row in rows]),
        ("MFU", [_text(_mfu(row, models, peaks), "{:.1%}".format) for row in rows]),
        ("freed", [_freed(row) for row in rows]),
    ]
    columns += [
        (head, [_text(row.figures.get(name), shown) for row in rows])
        for head, name, shown in COLUMNS
    ]
    shown = [(head, cells) for head, cells in columns if set(cells) - {UNKNOWN}]
    headings = tuple(head for head, _ in shown)
    return headings, [tuple(cells[n] for _, cells in shown) for n in range(len(rows))]


def _mfu(
    row: DeviceRow, models: Mapping[str, str | None], peaks: Mapping[str, Any]
) -> float | None:
    """Of a device's peak, by the dtype of the model; None on a CPU, which has no such peak."""
    dtype = peaks.get("dtypes", {}).get(models.get(row.action))
    peak = peaks.get("flops" if dtype in LOW else "flops32")
    if row.flops is None or peak is None:
        return None
    return float(row.flops / row.seconds / row.devices / peak)


def _freed(row: DeviceRow) -> str:
    """What the allocator had less of after an action, as after a part was put to sleep."""
    figures = row.figures
    if "allocated_before" not in figures:
        return UNKNOWN
    less = figures["allocated_before"] - figures["allocated"]
    return amount(less) if less >= 0 else f"-{amount(-less)}"


def _text(value: float | None, shown: Any) -> str:
    return UNKNOWN if value is None else str(shown(value))
