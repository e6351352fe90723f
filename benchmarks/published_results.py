"""What others have published beside what plans predict: seconds, memory, order of placements.

Every setting of `published/results.toml` that can be encoded is compiled for its devices, also
where it is not counted. No device is needed, and no figure depends on this machine.

python benchmarks/published_results.py            prints, and writes results/published.md
python benchmarks/published_results.py --only 8b  those whose name contains the text; writes nothing
python benchmarks/published_results.py --tune     placements of iterations that count beside those
    that `tune` finds on their devices, no more stale; writes results/published_tuned.md
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import RESULTS, markdown_table, say, text_table
from published.encode import PLANS, PUBLISHED, Prediction, devices_of, predicted, tuned
from published.rows import Published, Row, Setting, load

from rlflow.scheduler.search.text import placed_text

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
HEADER = ("setting", "quantity", "measured", "predicted", "predicted / measured")
BARS = {"median": 0.4, "worst": 1.0, "spearman": 0.9, "pairs": 0.9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A row beside its prediction; `predicted` is None where the plan has none, or was refused.

    `span` is the plan's range of an iteration.
    """

    setting: Setting
    row: Row
    predicted: float | None
    span: tuple[float, float] | None = None
    refused: str = ""

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; None for what is no time or not predicted."""
        if self.predicted is None or self.row.unit != "s":
            return None
        return self.predicted / self.row.value

    @property
    def cells(self) -> tuple[str, ...]:
        """The line of a table."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return (self.setting.name, self.row.what, *self._values, ratio)

    @property
    def _values(self) -> tuple[str, str]:
        if self.row.what == "memory":
            verdicts = {None: "none", 0.0: "does not fit", 1.0: "fits"}
            return "fits", verdicts[self.predicted]
        said = "none" if self.predicted is None else f"{self.predicted:.1f}"
        measured = f"{self.row.value:.4g}"
        if self.row.low < self.row.high:
            measured = f"{self.row.low:.4g} to {self.row.high:.4g}"
        return f"{measured} s", f"{said} s" if self.predicted is not None else said


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two placements of the same work; ratios are of seconds times devices, dearer over cheaper.

    On the same devices that is the ratio of their seconds.
    """

    group: str
    measured: float
    predicted: float

    @property
    def right(self) -> bool:
        """Whether the plan finds the same one cheaper."""
        return self.predicted > 1


def compare(settings: Iterable[Setting]) -> list[Compared]:
    """All rows of those settings that can be encoded."""
    found = []
    for setting in settings:
        say(setting.name)
        prediction = predicted(setting)
        found += [_compared(setting, row, prediction) for row in setting.rows]
    return found


def _compared(setting: Setting, row: Row, prediction: Prediction) -> Compared:
    said = prediction.of(row.what)
    span = prediction.span if row.what == "iteration" else None
    refused = prediction.refused
    return Compared(setting=setting, row=row, predicted=said, span=span, refused=refused)


def counted(found: Sequence[Compared]) -> list[Compared]:
    """Those that count."""
    return [one for one in found if not one.setting.why_not]


def errors(found: Iterable[Compared]) -> list[float]:
    """log2 of predicted over measured."""
    return [math.log2(one.ratio) for one in found if one.ratio is not None]


def pairs(found: Sequence[Compared]) -> list[Pair]:
    """Every two placements of a group, by their iterations."""
    iterations = [one for one in found if one.row.what == "iteration" and one.predicted]
    groups: dict[str, list[Compared]] = {}
    for one in iterations:
        if group := one.setting.said.get("group"):
            groups.setdefault(group, []).append(one)
    return [
        _pair(name, *two) for name, of in groups.items() for two in itertools.combinations(of, 2)
    ]


def _pair(group: str, one: Compared, other: Compared) -> Pair:
    cheap, dear = sorted((one, other), key=lambda each: each.row.value * devices_of(each.setting))
    assert cheap.predicted
    assert dear.predicted
    devices = devices_of(dear.setting) / devices_of(cheap.setting)
    return Pair(
        group=group,
        measured=devices * dear.row.value / cheap.row.value,
        predicted=devices * dear.predicted / cheap.predicted,
    )


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, equal ones sharing theirs."""
    return [
        sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values
    ]


def spearman(found: Sequence[Compared]) -> float:
    """Spearman's correlation of predicted with measured iterations."""
    of = [one for one in found if one.row.what == "iteration" and one.predicted]
    measured = [one.row.value for one in of]
    said = [one.predicted for one in of if one.predicted]
    return statistics.correlation(ranks(measured), ranks(said)) if len(of) > 1 else math.nan


def by_quantity(found: Sequence[Compared]) -> list[tuple[str, ...]]:
    """For each quantity: rows, the median ratio, the lowest and the highest."""
    lines = []
    for what in sorted({one.row.what for one in found if one.ratio is not None}):
        ratios = [one.ratio for one in found if one.row.what == what and one.ratio is not None]
        middle = statistics.median(ratios)
        span = (f"{middle:.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}")
        lines.append((what, str(len(ratios)), *span))
    return lines


def summary(found: Sequence[Compared], published: Published) -> list[tuple[str, str, str]]:
    """What is asked of the whole, each figure beside its bar."""
    wrong, two = errors(found), pairs(found)
    right = sum(pair.right for pair in two)
    ranged = [(one.row.value, one.span) for one in found if one.span is not None]
    inside = sum(low <= value <= high for value, (low, high) in ranged)
    memory = [one for one in found if one.row.what == "memory"]
    every = [row for setting in published.settings for row in setting.rows]
    refused = sum(one.predicted is None for one in found)
    worst = max((abs(each) for each in wrong), default=math.nan)
    middle = statistics.median(abs(each) for each in wrong) if wrong else math.nan
    return [
        ("rows, of sources", f"{len(every)} of {len(published.sources)}", ""),
        ("rows counted", str(len(found)), ""),
        ("counted rows without a prediction", str(refused), "0"),
        ("median of abs log2(predicted / measured)", f"{middle:.2f}", f"{BARS['median']}"),
        ("worst", f"{worst:.2f}", f"{BARS['worst']}"),
        ("Spearman of iterations", f"{spearman(found):.2f}", f"{BARS['spearman']}"),
        ("iterations within the plan's 90 % range", f"{inside} of {len(ranged)}", "9 in 10"),
        ("pairs of placements with the cheaper one right", f"{right} of {len(two)}", "9 in 10"),
        ("memory verdicts right", f"{sum(bool(m.predicted) for m in memory)} of {len(memory)}", ""),
    ]


def refusals(found: Sequence[Compared]) -> list[tuple[str, str]]:
    """Settings for which there is no plan, and the error's first line."""
    return sorted({(one.setting.name, one.refused) for one in found if one.refused})


def not_counted(published: Published) -> list[tuple[str, str]]:
    """Reasons, and how many rows each leaves out; the most first."""
    reasons: Counter[str] = Counter()
    for setting in published.settings:
        if setting.why_not:
            reasons[setting.why_not] += len(setting.rows)
    return [(reason, str(rows)) for reason, rows in reasons.most_common()]


def parts(found: Sequence[Compared], published: Published) -> list[Table]:
    """The tables: title, header and lines of each."""
    count = counted(found)
    of_all = [one.cells for one in count]
    others = [one.cells for one in found if one.setting.why_not]
    two = [
        (pair.group, f"{pair.measured:.2f}", f"{pair.predicted:.2f}", "yes" if pair.right else "no")
        for pair in pairs(count)
    ]
    return [
        ("Summary", ("", "now", "bar"), summary(count, published)),
        (
            "By quantity",
            ("quantity", "rows", "median", "lowest", "highest"),
            by_quantity(count),
        ),
        ("Rows that count", HEADER, of_all),
        (
            "Placements of the same work, in seconds x devices",
            ("group", "measured", "predicted", "same cheaper"),
            two,
        ),
        ("Rows that are encoded and not counted", HEADER, others),
        ("Refused plans", ("setting", "why"), refusals(found)),
        ("Why rows are not counted", ("reason", "rows"), not_counted(published)),
    ]


def page(tables: Sequence[Table]) -> str:
    """The results page."""
    text = [
        f"## {title}\n\n{markdown_table(head, lines)}" for title, head, lines in tables if lines
    ]
    about = "Made by `python benchmarks/published_results.py`; ratios are predicted over measured."
    return "\n\n".join(("# Published results beside predictions", about, *text)) + "\n"


def with_iterations(published: Published) -> list[Setting]:
    """Settings that count, of whose placement an iteration was measured."""
    return [
        setting
        for setting in published.settings
        if not setting.why_not and any(row.what == "iteration" for row in setting.rows)
    ]


def beside_tune(settings: Sequence[Setting]) -> Table:
    """Each setting's placement beside the best that a search finds, by estimate."""
    lines, worst = [], math.inf
    for setting in settings:
        say(setting.name)
        found = tuned(setting)
        own = {tried.name: tried for _, tried in found.written}.get(PUBLISHED)
        if own is None:
            lines.append((setting.name, setting.said["devices"], found.misfits[PUBLISHED], "", ""))
            continue
        times = own.period / found.best.period
        worst = min(worst, times)
        seconds = f"{own.period:.1f} s", f"{found.best.period:.1f} s"
        lines.append((setting.name, *seconds, f"{times:.2f}", placed_text(found.best.plan)))
    say(f"never worse than what was published: the least is {worst:.2f}x as fast")
    return TUNED, ("setting", "published", "tune", "times as fast", "what it finds"), lines


TUNED = "Published placements beside what tune finds, by estimate"
ABOUT_TUNE = (
    "Made by `python benchmarks/published_results.py --tune`. Seconds of an iteration, both by "
    f"estimate; the search has the published placement to beat, compiles about {PLANS} plans, and "
    "allows no more staleness than that has. Rollouts may be by the engine that was used or by the "
    "embedded one. No row was measured with the placement that was found."
)


def keep_tuned(only: str) -> None:
    """Search for every setting, print, and keep the page unless only some were asked for."""
    chosen = [setting for setting in with_iterations(load()) if only in setting.name]
    title, header, lines = beside_tune(chosen)
    print(f"\n{title}\n{text_table(header, lines)}")
    if not only:
        path = RESULTS / "published_tuned.md"
        text = f"# {title}\n\n{ABOUT_TUNE}\n\n{markdown_table(header, lines)}\n"
        path.write_text(text, encoding="utf-8")
        say(f"wrote {path}")


def main() -> None:
    """Compare, print, and keep the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="settings whose name contains this text")
    parser.add_argument("--tune", action="store_true", help="search for better placements instead")
    parser.add_argument("--output", type=Path, default=RESULTS / "published.md")
    asked = parser.parse_args()
    if asked.tune:
        keep_tuned(asked.only)
        return
    published = load()
    chosen = [s for s in published.settings if s.can_be_encoded and asked.only in s.name]
    tables = parts(compare(chosen), published)
    for title, header, lines in tables:
        if lines:
            print(f"\n{title}\n{text_table(header, lines)}")
    if not asked.only:
        asked.output.write_text(page(tables), encoding="utf-8")
        say(f"wrote {asked.output}")


if __name__ == "__main__":
    main()
