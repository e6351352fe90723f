"""A replayed update beside the run's own, as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rlflow.report.compared.update import SHOWN_ALWAYS, Replayed, apart
from rlflow.scheduler.plan.text import counted, table

if TYPE_CHECKING:
    from rlflow.report.compared.differing import RowDifference
    from rlflow.runtime.record.replaying.ratios import RatiosOfOne, TokenRatios
    from rlflow.runtime.record.replaying.weights import WeightsMoved


def replayed_lines(found: Replayed, *, everything: bool = False) -> list[str]:
    """What was computed again, what was changed, and both updates side by side.

    Figures that are equal are counted, and listed where `everything` is asked for; those of loss
    and gradient always are.
    """
    lines = [f"iteration {found.iteration} of {found.run} again, from {found.begin}"]
    lines.append(f"  read      {', '.join(found.read) or 'nothing'}")
    lines.append(f"  computed  {', '.join(found.computed)}")
    lines += _changed(found.changed)
    lines.append("")
    lines += _figures(found, everything)
    for moved in found.weights:
        lines += _weights(moved)
    for ratios in found.ratios:
        lines += _ratios(ratios)
    lines += [_rows(node, each) for node, each in found.rows.items()]
    lines += [f"note: {note}" for note in found.notes]
    lines += [_verdict(found), f"left in: {found.replay}"]
    return lines


def _changed(changed: Sequence[tuple[str, str, str]]) -> list[str]:
    if not changed:
        return ["  changed   nothing"]
    said = [f"{name}: {before} -> {now}" for name, before, now in changed]
    return [f"  {'changed' if not at else '':<8}  {text}" for at, text in enumerate(said)]


def _figures(found: Replayed, everything: bool) -> Iterator[str]:
    differing = set(found.differing)
    shown = [
        (name, was, now)
        for name, (was, now) in found.figures.items()
        if everything or name in differing or name.rpartition("/")[2] in SHOWN_ALWAYS
    ]
    rows = [("", "run", "replay", "difference")]
    for name, was, now in shown:
        told = "" if was is None else apart(was, now)
        rows.append((name, "-" if was is None else f"{was:.7g}", f"{now:.7g}", told))
    yield from table(rows)
    both = [name for name, (was, _) in found.figures.items() if was is not None]
    equal = len(both) - len(differing)
    yield f"  {equal} of {counted(len(both), 'figure')} are equal in every bit"


def _weights(moved: WeightsMoved) -> Iterator[str]:
    """The norms of what an update has added to a model's weights."""
    yield ""
    norm = "" if moved.before is None else f", norm {moved.before:.6g} before the update"
    yield f"weights of {moved.model}{norm}"
    run, replay = moved.moved
    if moved.same is None:
        step = "" if replay is None else f"the replay moved them by {replay:.4g}: "
        yield f"  {step}not compared, the run keeps no checkpoint from after the update"
        return
    if moved.same:
        step = "" if replay is None else f"moved by {replay:.4g}: "
        state = "" if moved.same_state else ", though not of the optimizer's state"
        yield f"  {step}equal in every bit{state}"
        return
    rows = [("", "run", "replay", "apart")]
    gap = "-"
    if moved.apart is not None:
        gap = f"{moved.apart:.4g}" + (f" ({moved.apart / run:.3g} of the run's)" if run else "")
    norms = ["-" if norm is None else f"{norm:.4g}" for norm in (run, replay)]
    rows.append(("norm of the update", norms[0], norms[1], gap))
    yield from table(rows)
    if moved.cosine is not None:
        yield f"  cosine of both updates {moved.cosine:.6f}"


def _ratios(ratios: TokenRatios) -> Iterator[str]:
    """The ratios of tokens after both updates, over when they were sampled."""
    yield ""
    part = f" of {ratios.of_rows}" if ratios.rows < ratios.of_rows else ""
    told = f"{ratios.tokens:,} response tokens of {ratios.rows}{part} rows"
    yield f"ratio of {ratios.model}, after the update over when sampled: {told}"
    rows = [("", "run", "replay"), *_ratio_rows(ratios.run, ratios.replay, ratios.band)]
    yield from table(rows)
    mean, most = ratios.apart
    where = f"row {ratios.row}, token {ratios.token}"
    yield f"  logs of both apart: mean {mean:.3g}, at most {most:.3g} ({where})"


def _ratio_rows(
    run: RatiosOfOne, replay: RatiosOfOne, band: float
) -> Iterator[tuple[str, str, str]]:
    yield "mean", f"{run.mean:.6g}", f"{replay.mean:.6g}"
    yield "least", f"{run.least:.6g}", f"{replay.least:.6g}"
    yield "most", f"{run.most:.6g}", f"{replay.most:.6g}"
    yield f"beyond 1 +- {band:g}", f"{run.beyond:.2%}", f"{replay.beyond:.2%}"


def _rows(node: str, row: RowDifference | None) -> str:
    if row is None:
        return f"rows of {node}: all that the run has recorded are equal in every bit"
    place = "" if row.place is None else f", {row.places} {row.place}"
    first = f"first row {row.row}, {row.field}{place}: {row.values[0]} and {row.values[1]}"
    return f"rows of {node}: {row.rows} of {row.compared} differ; {first}"


def _verdict(found: Replayed) -> str:
    if found.same is False and found.changed:
        return "the replay differs from the run, as what was changed makes it"
    if found.same is False:
        return "the replay differs from the run, though nothing was said to be another"
    equal = "figures and rows" if found.rows else "figures"
    if found.same is None:
        return (
            f"{equal} that both have are equal, bit for bit; weights were not compared: the run "
            f"keeps no checkpoint from after iteration {found.iteration}"
        )
    weights = "weights, " if found.weights else ""
    return f"the replay is the run's update, bit for bit: {weights}{equal} that both have"
