"""The printed form of a simulation: period, what devices wait for, a turn drawn in characters.

Knows what was played and no file; stable to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from string import ascii_lowercase, ascii_uppercase

from rlflow.scheduler.plan.plan import HOST, Plan
from rlflow.scheduler.plan.text import bound_text, counted, duration, sources_text, table
from rlflow.scheduler.simulate.play import Played
from rlflow.scheduler.simulate.simulate import Simulation, Use, device_groups, group_label

COLUMNS = 72
SMALLEST_SHARE = 0.005
MOST_CAUSES = 4
DIFFERENT = 0.005
LETTERS = ascii_lowercase + ascii_uppercase


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRow:
    """What one lane of devices with equal schedules runs, by start."""

    label: str
    spans: tuple[Played, ...]


def percent(share: float) -> str:
    """A share as it is printed: `31 %`, `0.4 %`."""
    return f"{100 * share:.1f} %" if 0 < share < 0.0095 else f"{100 * share:.0f} %"


def simulation_text(found: Simulation) -> str:
    """Everything about a simulation, for a terminal."""
    plan = found.plan
    lines = [
        f"{plan.graph.name}   placement {plan.placement} on {plan.cluster}   plan {plan.hash[:8]}"
        f"   {counted(found.iterations, 'iteration')} on a virtual clock",
        *table([(label, text) for label, text in _facts(found) if text]),
        "",
        *table([("device", "busy", "idle", "waiting for"), *map(_use_row, found.uses)]),
        "",
        *turn_text(found),
        "",
        f"  estimates from: {sources_text(plan)}",
        *([f"  inputs: {', '.join(plan.inputs)}"] if plan.inputs else []),
    ]
    return "\n".join(lines)


def _facts(found: Simulation) -> list[tuple[str, str]]:
    """The figures above the table: what each is, and the figure."""
    plan, timing = found.plan, found.plan.timing
    rare = sorted({action.every for action in plan.actions if action.every > 1})
    every = f", with what runs every {' and '.join(map(str, rare))} iterations" if rare else ""
    turns = found.steady[1] - found.steady[0]
    exact = "the same again and again" if found.exact else f"the mean of {counted(turns, 'turn')}"
    facts = [("iteration", f"{duration(found.period)}   {exact}{every}")]
    if timing is not None:
        if rare and found.period > timing.period * (1 + DIFFERENT):
            planned = f"{duration(timing.period)}, which counts rare actions by their share"
            facts.append(("planned", planned))
        facts.append(("bounds", bound_text(plan, timing)))
    facts += [
        ("latency", f"{duration(found.latency)} from an iteration's first action to its last"),
        ("in all", f"{duration(found.makespan)} for {counted(found.iterations, 'iteration')}"),
        ("idle", f"{percent(found.idle)} of device time"),
        ("samples", lags_text(found)),
    ]
    return facts


def lags_text(found: Simulation) -> str:
    """How old the weights were that made the samples, for every rollout."""
    told = []
    for node, lags in found.lags.items():
        total = sum(lags.values())
        if set(lags) == {0}:
            told.append(f"{node} reads the newest weights: on-policy")
            continue
        shares = [
            f"{counted(k, 'update')} old in {percent(count / total)}" for k, count in lags.items()
        ]
        told.append(f"{node} reads weights {', '.join(shares)}")
    return "; ".join(told)


def _use_row(use: Use) -> tuple[str, str, str, str]:
    copies = f" (+ {percent(use.copying)} copies)" if use.copying >= SMALLEST_SHARE else ""
    return use.label, percent(use.busy) + copies, percent(use.idle), waits_text(use)


def waits_text(use: Use) -> str:
    """What devices wait for: `22 % actor.update, 9 % reshard:...`; the small ones summed up."""
    large = [(n, share) for n, share in use.waits[:MOST_CAUSES] if share >= SMALLEST_SHARE]
    told = [f"{percent(share)} {name}" for name, share in large]
    rest = sum(share for _, share in use.waits[len(large) :])
    if rest >= SMALLEST_SHARE:
        told.append(f"{percent(rest)} others")
    return ", ".join(told) or "-"


def typical_turn(found: Simulation) -> tuple[int, float, float]:
    """A turn of median length among the steady ones: its number, start and end in seconds."""
    first, end = found.steady
    ends = dict.fromkeys(range(first - 1, end), 0.0)
    for span in found.spans:
        if span.turn in ends:
            ends[span.turn] = max(ends[span.turn], span.end)
    lengths = {turn: ends[turn] - ends[turn - 1] for turn in range(first, end)}
    middle = median_low(lengths.values())
    turn = next(turn for turn, length in lengths.items() if length == middle)
    return turn, ends[turn - 1], ends[turn]


def lane_rows(plan: Plan, spans: Sequence[Played]) -> list[LaneRow]:
    """A row for every set of devices with equal schedules, and one for its copies if it has any."""
    rows = []
    for devices, ids in device_groups(plan):
        label = group_label(plan, devices)
        for lane, suffix in (("compute", ""), ("copy", " copies")):
            own = [s for s in spans if s.action.id in ids and s.action.lane == lane]
            if own or (lane == "compute" and devices != (HOST,)):
                rows.append(LaneRow(label=label + suffix, spans=tuple(own)))
    return rows


def turn_text(found: Simulation) -> list[str]:
    """One turn drawn in characters: a row for devices with equal schedules, a bar an action."""
    turn, start, end = typical_turn(found)
    if end <= start:
        return []
    shown = [span for span in found.spans if span.start < end and span.end > start]
    canvas = _Canvas(start, end, turn)
    rows = lane_rows(found.plan, shown)
    width = max(len(row.label) for row in rows)
    lines = [f"  {row.label.ljust(width)} |{canvas.draw(row.spans)}|" for row in rows]
    column = (end - start) / COLUMNS
    title = (
        f"  turn {turn} of {found.iterations}: {duration(end - start)}, "
        f"a column is {duration(column)}"
    )
    return [title, *lines, *canvas.legend(" " * (width + 4))]


class _Canvas:
    """Bars in characters, and letters for the actions whose names do not fit into theirs."""

    def __init__(self, start: float, end: float, turn: int) -> None:
        self.start, self.end, self.turn = start, end, turn
        self.letters: dict[str, str] = {}
        self.short: set[str] = set()
        self.drawn: set[str] = set()

    def draw(self, spans: Sequence[Played]) -> str:
        """One row, `COLUMNS` wide."""
        cells = [" "] * COLUMNS
        for span in spans:
            left, right = self._column(span.start), self._column(span.end)
            if right == left:
                self.short.add(span.action.id)
                continue
            self.drawn.add(span.action.id)
            cells[left:right] = self._bar(span, right - left)
        return "".join(cells)

    def _column(self, seconds: float) -> int:
        share = (seconds - self.start) / (self.end - self.start)
        return round(min(1.0, max(0.0, share)) * COLUMNS)

    def _bar(self, span: Played, width: int) -> str:
        behind = span.iteration - self.turn
        suffix = f" i{behind:+d}" if behind and span.action.part is None else ""
        names = (span.action.id, span.action.id.rpartition(".")[2])
        for name in names:
            if len(name) + len(suffix) + 2 <= width:
                return f"[{(name + suffix).ljust(width - 2, '=')}]"
        letter = self.letters.setdefault(
            span.action.id, LETTERS[min(len(self.letters), len(LETTERS) - 1)]
        )
        return letter * width

    def legend(self, indent: str) -> list[str]:
        """What the letters stand for, and how many actions are shorter than a column."""
        told = [f"{letter} {name}" for name, letter in self.letters.items()]
        hidden = len(self.short - self.drawn)
        if hidden:
            told.append(f"not drawn: {counted(hidden, 'action')} shorter than half a column")
        return [indent + "   ".join(told)] if told else []
