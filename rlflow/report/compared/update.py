"""One update beside itself computed again: figures, rows, weights and the ratios of its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.report.compared.differing import RowDifference, edge_difference, field_order
from rlflow.runtime.record.edges.reading import recorded
from rlflow.runtime.record.metrics import read_metrics

if TYPE_CHECKING:
    from rlflow.runtime.record.replaying.ratios import TokenRatios
    from rlflow.runtime.record.replaying.weights import WeightsMoved

SHOWN_ALWAYS = ("loss", "grad_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """An update of a run, and the same computed again in the directory `replay`.

    `read` are the edges that came from a record, each with its run, `computed` the nodes that ran.
    `changed` is what of the graph, the placement or the devices is another than it was: name,
    before, now. `figures` have a metric of the run, None where it has none, and of the replay.
    `rows` are the first differences of what was computed again and had been recorded, None of an
    edge that is equal. `notes` say what could not be compared, and why.
    """

    run: str
    replay: str
    iteration: int
    begin: str
    read: Mapping[str, str]
    computed: Sequence[str]
    changed: Sequence[tuple[str, str, str]]
    figures: Mapping[str, tuple[float | None, float]]
    rows: Mapping[str, RowDifference | None]
    weights: Sequence[WeightsMoved]
    ratios: Sequence[TokenRatios]
    notes: Sequence[str]

    @property
    def differing(self) -> list[str]:
        """The figures of both whose bits differ."""
        pairs = self.figures.items()
        return [name for name, (was, now) in pairs if was is not None and repr(was) != repr(now)]

    @property
    def same(self) -> bool | None:
        """Whether no bit differs; None where all that both have left is equal, but not weights.

        Weights are not compared where the run keeps no checkpoint from after the iteration.
        """
        moved = any(each.same is False or each.same_state is False for each in self.weights)
        if self.differing or moved or any(self.rows.values()):
            return False
        return None if any(each.same is None for each in self.weights) else True

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        found = {
            name: getattr(self, name)
            for name in ("run", "replay", "iteration", "begin", "computed", "changed", "notes")
        }
        return found | {
            "same": self.same,
            "read": dict(self.read),
            "figures": {name: list(pair) for name, pair in self.figures.items()},
            "differing": self.differing,
            "rows": {node: each and asdict(each) for node, each in self.rows.items()},
            "weights": [each.as_json() for each in self.weights],
            "ratios": [each.as_json() for each in self.ratios],
        }


def figures_of(run: Path, iteration: int) -> dict[str, float]:
    """The metrics of an iteration of a run; none where it has not ended it."""
    path = run / "metrics.jsonl"
    lines = read_metrics(path) if path.is_file() else []
    return next((dict(line.metrics) for line in lines if line.iteration == iteration), {})


def figures_beside(
    run: Path, replay: Path, iteration: int
) -> dict[str, tuple[float | None, float]]:
    """The metrics of the replay, each with that of the run."""
    before, now = (figures_of(each, iteration) for each in (run, replay))
    return {name: (before.get(name), value) for name, value in now.items()}


def rows_beside(run: Path, replay: Path, iteration: int) -> dict[str, RowDifference | None]:
    """The first difference of each edge that both have recorded in an iteration."""
    first, second, fields = recorded(run), recorded(replay), field_order(run)
    return {
        node: edge_difference(run, replay, node, iteration, fields.get(node, ()))
        for node, there in second.items()
        if iteration in there and iteration in first.get(node, ())
    }


def apart(was: float, now: float) -> str:
    """How far two figures are apart, as it is printed: nothing where their bits are the same."""
    if repr(was) == repr(now):
        return ""
    gap = now - was
    share = f" ({100 * gap / abs(was):+.3g} %)" if was and math.isfinite(gap) else ""
    return f"{gap:+.3g}{share}"
