"""The printed form of a sweep: a row a size, and where another family of placements wins."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.scheduler.plan.text import duration, idle_share, table
from rlflow.scheduler.search.sweep import Crossover, Sweep, SweepSize
from rlflow.scheduler.search.text import placed_text, rate

HARDLY = 1.005


def sweep_text(sweep: Sweep, name: str, price: float | None) -> str:
    """The whole answer: a table, and where the winner changes, in words."""
    money = "device hours / M tokens" if price is None else "cost / M tokens"
    headings = (
        "devices",
        "iteration",
        "samples/s",
        "tokens/s",
        money,
        "idle",
        "winner",
        "over the next",
        "placement",
    )
    rows = [_row(size, price) for size in sweep.sizes if size.tuned is not None]
    lines = [f"{name} on {sweep.kind}, by number of devices", "", *table([headings, *rows]), ""]
    lines += [f"  {size.devices} devices: {size.refused}" for size in sweep.sizes if size.refused]
    lines += [f"  {text}" for text in crossover_texts(sweep)]
    inputs = next((s.tuned.best.plan.inputs for s in sweep.sizes[::-1] if s.tuned), ())
    return "\n".join([*lines, *([f"  inputs: {', '.join(inputs)}"] if inputs else [])])


def _row(size: SweepSize, price: float | None) -> tuple[str, ...]:
    family = size.winner
    best = size.families[family]
    idle, idle_devices = idle_share(best.plan), size.idle(family)
    hours = size.hours_per_million(family)
    return (
        f"{size.devices}{' (between)' if size.between else ''}",
        duration(best.period),
        rate(size.samples_per_second(family)),
        rate(size.tokens_per_second(family)),
        rate(hours if price is None else hours * price),
        "?" if idle is None else f"{100 * idle:.0f} %",
        family,
        _over_next(size),
        placed_text(best.plan) + (f"; {idle_devices} idle" if idle_devices else ""),
    )


def _over_next(size: SweepSize) -> str:
    """How much faster the winner is than the best of another family."""
    others = list(size.families.items())[1:]
    if not others:
        return "-"
    name, second = others[0]
    times = second.period / size.families[size.winner].period
    return f"{times:.2f}x {name}"


def crossover_texts(sweep: Sweep) -> list[str]:
    """Where another family wins, a line each; one line where the same wins at every size.

    Sizes at which another one takes less, but by no more than what is uncertain, are a last line.
    """
    won = [size for size in sweep.sizes if size.winner]
    near = [size for size in won if size.winner != size.leading]
    lines = [_crossed(crossover, sweep) for crossover in sweep.crossovers]
    if not lines:
        first = won[0].winner
        told = _told(won) if not near else "; no other is faster by more than what is uncertain"
        lines = [f"{first} wins at every size{told}" if not near else f"{first} leads{told}"]
    return [*lines, *([_not_told_apart(near)] if near else [])]


def _crossed(found: Crossover, sweep: Sweep) -> str:
    text = f"{found.family} wins from {found.devices} {sweep.kind} on"
    if found.times > HARDLY:
        text += f", {found.times:.2f}x as fast as {found.over} there"
    if found.told:
        return f"{text}, by more than what is uncertain; not yet at {found.before}"
    return f"{text}; {found.over} wins at {found.before}"


def _not_told_apart(near: Sequence[SweepSize]) -> str:
    """Sizes at which another family takes less than the one that leads, but may not."""
    families: dict[str, list[str]] = {}
    for size in near:
        families.setdefault(size.winner, []).append(str(size.devices))
    found = [f"{name} at {', '.join(devices)}" for name, devices in families.items()]
    return f"shortest, but within what is uncertain: {'; '.join(found)}"


def _told(own: Sequence[SweepSize]) -> str:
    """From which size on the winner differs from the next family by more than what is uncertain.

    At all later sizes too; nothing on CPU devices, or where no other family was found.
    """
    contests = [(size.devices, size.contest.told) for size in own if size.contest is not None]
    if not contests:
        return ""
    unsure = [devices for devices, told in contests if not told]
    sure = [devices for devices, _ in contests if not unsure or devices > unsure[-1]]
    if not sure:
        return "; within what is uncertain"
    return f"; by more than what is uncertain from {sure[0]} on"
