"""Samples on a terminal: a table, one group side by side, tokens with a colour each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlflow.errors import printable
from rlflow.report.samples.colours import colour_scale
from rlflow.report.samples.joined import RESPONSE, RecordedSample, Samples

Decode = Callable[[Sequence[int]], list[str]]
LONG = 400
SHORT = 120


def overview(
    samples: Samples, found: int, shown: Sequence[RecordedSample], order: str
) -> RenderableType:
    """A line of what there is, and a table with a row a sample."""
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    numbers = [name for name in ("reward", "advantage", "gap") if _any(shown, name)]
    for name in ("iter", "row", "group", *numbers, "tokens", "end"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("prompt", ratio=2)
    table.add_column("response", ratio=3)
    for sample in shown:
        table.add_row(
            str(sample.iteration),
            str(sample.row),
            "" if sample.group is None else str(sample.group),
            *(_number(sample.number(name)) for name in numbers),
            "" if sample.length is None else str(sample.length),
            Text(sample.ended, style="red" if sample.ended == "cut" else ""),
            Text(_line(sample.value("prompt"), SHORT)),
            Text(_line(sample.value("response"), SHORT)),
        )
    return Group(Text(header(samples, found, len(shown), order), style="dim"), table)


def header(samples: Samples, found: int, shown: int, order: str) -> str:
    """What is shown of what is recorded of what there was."""
    taken = len(samples.samples)
    iterations = len(samples.totals)
    total = sum(samples.totals.values())
    recorded = f"{taken:,} of {total:,} rows recorded" if taken < total else f"{taken:,} rows"
    over = (
        f"{iterations} iterations" if iterations > 1 else f"iteration {next(iter(samples.totals))}"
    )
    which = f"{shown:,} of {found:,}" if shown < found else f"all {found:,}"
    by = f", by {order}" if order else ""
    return f"{samples.node}   {over}, {recorded}; {which} shown{by}"


def side_by_side(shown: Sequence[RecordedSample]) -> RenderableType:
    """The samples of one group, each in a panel, below their prompt."""
    first = shown[0]
    panels = [
        Panel(_words(each), title=_scores(each), subtitle=_size(each), width=38) for each in shown
    ]
    prompt = Text(printable(str(first.value("prompt") or "")))
    title = f"iteration {first.iteration}   group {first.group}   prompt"
    return Group(Panel(prompt, title=title, title_align="left"), Columns(panels))


def tokens(sample: RecordedSample, what: str, decode: Decode | None) -> RenderableType:
    """A sample's response token by token, each with its number as colour; the legend below."""
    ids = sample.value(RESPONSE)
    if not ids:
        return Panel(_words(sample), title=_title(sample), title_align="left")
    words = decode(ids) if decode is not None else [f"{each} " for each in ids]
    values = sample.per_token(what)
    shown = Text()
    scale = [0.0] * len(ids) if values is None else colour_scale(what, values)
    for word, number in zip(words, scale, strict=True):
        shown.append(printable(word), style=_style(number))
    missing = f"no {what} is recorded of these rows" if values is None else legend(what)
    title = f"iteration {sample.iteration}   row {sample.row}   {_title(sample)}"
    prompt = Text(_line(sample.value("prompt"), LONG), style="dim")
    return Panel(Group(prompt, shown, Text(missing, style="dim")), title=title, title_align="left")


def legend(what: str) -> str:
    """What the colours of a view mean."""
    return {
        "advantage": "green: advantage above 0; red: below; the largest has the whole colour",
        "log-prob": "red: the sampler thought the token unlikely, 5 nats the whole colour",
        "ratio": "green: the trainer's policy likes the token more, red: less; twice is the whole",
        "entropy": "green: entropy of the distribution, 5 nats the whole colour",
    }[what]


def _style(number: float) -> str:
    """A background for a number from -1 to 1, none near zero."""
    strength = round(abs(number) * 150)
    if strength < 8:
        return ""
    back = f"rgb({20},{40 + strength},{30})" if number > 0 else f"rgb({50 + strength},{25},{30})"
    return f"bright_white on {back}"


def _title(sample: RecordedSample) -> str:
    return "   ".join(text for text in (_scores(sample), _size(sample)) if text)


def _scores(sample: RecordedSample) -> str:
    """Reward and advantage, where they are recorded."""
    names = ("reward", "advantage")
    known = [name for name in names if sample.number(name) is not None]
    return "   ".join(f"{name} {_number(sample.number(name))}" for name in known)


def _size(sample: RecordedSample) -> str:
    """How long the response is, and how it ended."""
    size = "" if sample.length is None else f"{sample.length} tokens"
    return "   ".join(text for text in (size, sample.ended) if text)


def _words(sample: RecordedSample) -> Text:
    response = sample.value("response")
    return Text(printable(response) if isinstance(response, str) else "(no text is recorded)")


def _any(shown: Sequence[RecordedSample], name: str) -> bool:
    return any(sample.number(name) is not None for sample in shown)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _line(text: object, most: int) -> str:
    """Text on one line, cut where it is long."""
    if not isinstance(text, str):
        return ""
    line = printable(text.replace("\n", "⏎"))
    return line if len(line) <= most else f"{line[: most - 1]}…"
