"""`rlflow samples`: the rows that a run has recorded, found, sorted and shown."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlflow.cli.shell.printed import escaped, json_option
from rlflow.cli.shell.values import typed_files
from rlflow.errors import Finding, UsageError

if TYPE_CHECKING:
    from rlflow.report.samples.chosen import Wanted
    from rlflow.report.samples.joined import Samples
    from rlflow.report.samples.text import Decode

EXAMPLES = """\b
Examples:
  rlflow samples runs/grpo-20250131T142501Z --iteration 30 --sort reward
  rlflow samples runs/grpo-20250131T142501Z --iteration all --text "carry" --html samples.html
  rlflow samples runs/grpo-20250131T142501Z --group 3 --tokens --colour log-prob
"""


@click.command("samples", epilog=EXAMPLES, no_args_is_help=True)
@click.argument("run_dir", metavar="RUN", shell_complete=typed_files)
@click.option(
    "--iteration",
    default="last",
    show_default=True,
    metavar="WHICH",
    help="An iteration, FROM:TO, last or all.",
)
@click.option("--reward", metavar="FROM:TO", help="Rewards within; one number for that one.")
@click.option("--length", metavar="FROM:TO", help="Responses of so many tokens.")
@click.option("--text", metavar="PATTERN", help="A regular expression in prompt or response.")
@click.option("--group", type=int, help="One group, its samples side by side.")
@click.option(
    "--sort",
    metavar="KEY",
    help="reward, length, gap, or a recorded field, lowest first; -reward highest first.",
)
@click.option("--limit", type=click.IntRange(1), help="How many; 10, in a page 500.")
@click.option("--tokens", is_flag=True, help="Responses token by token, in colour.")
@click.option(
    "--colour",
    type=click.Choice(["advantage", "log-prob", "ratio", "entropy"]),
    default="advantage",
    show_default=True,
    help="What tokens are coloured by.",
)
@click.option("--node", metavar="NODE", help="Rows made by another node than the rollout.")
@click.option("--html", "page", metavar="FILE", help="Write one page that works offline.")
@json_option
def show_samples(run_dir: str, **options: Any) -> None:
    """Show what a run sampled, also while it runs: prompts, responses, rewards, tokens."""
    from rlflow.report.samples.chosen import in_order
    from rlflow.runtime.record.rundir import RunDir

    run = RunDir.view(Path(run_dir)).path
    wanted = _wanted(options)
    found = _loaded(run, options["node"], options["iteration"])
    kept = [sample for sample in found.samples if wanted.holds(sample)]
    ordered = in_order(kept, options["sort"])
    limit = options["limit"] or (500 if options["page"] else 10)
    shown = ordered[: len(ordered) if options["group"] is not None else limit]
    if options["as_json"]:
        text = json.dumps([s.as_json() for s in shown], sort_keys=True, ensure_ascii=False)
        click.echo(escaped(text))
    elif not shown:
        click.echo(_none(found, options["group"]), err=True)
    elif options["page"]:
        _write_page(found, len(kept), shown, options)
    else:
        _print(found, len(kept), shown, options)


def _none(found: Samples, group: int | None) -> str:
    """What to say where no sample is one of those asked for."""
    text = f"none of {len(found.samples):,} recorded samples is one of those"
    groups = sorted({s.group for s in found.samples if s.group is not None})
    if group is None or not groups or group in groups:
        return text
    return f"{text}: their groups are {groups[0]} to {groups[-1]}"


def _wanted(options: dict[str, Any]) -> Wanted:
    from rlflow.report.samples.chosen import Range, Wanted, text_pattern

    said = {key: options[key] for key in ("reward", "length") if options[key] is not None}
    ranges = {key: Range.parse(text, f"--{key}") for key, text in said.items()}
    return Wanted(ranges=ranges, text=text_pattern(options["text"]), group=options["group"])


def _loaded(run: Path, node: str | None, which: str) -> Samples:
    """The samples of the iterations that are asked for."""
    from rlflow.report.samples.chosen import Range
    from rlflow.report.samples.joined import load_samples
    from rlflow.runtime.record.edges.reading import recorded

    known = sorted({number for found in recorded(run).values() for number in found})
    chosen: Collection[int] | None = known[-1:]
    if which != "last":
        asked = None if which == "all" else Range.parse(which, "--iteration")
        chosen = [number for number in known if asked is None or asked.holds(number)]
    return load_samples(run, node, chosen)


def _print(found: Samples, count: int, shown: Sequence[Any], options: dict[str, Any]) -> None:
    from rich.console import Console

    from rlflow.report.samples.text import overview, side_by_side, tokens

    console = Console(highlight=False)
    if options["tokens"]:
        decode = token_texts(found.run, found.node)
        for sample in shown:
            console.print(tokens(sample, options["colour"], decode))
        return
    if options["group"] is None:
        console.print(overview(found, count, shown, options["sort"] or ""))
        return
    for iteration in dict.fromkeys(sample.iteration for sample in shown):
        console.print(side_by_side([s for s in shown if s.iteration == iteration]))


def _write_page(found: Samples, count: int, shown: Sequence[Any], options: dict[str, Any]) -> None:
    from rlflow.report.samples.page import samples_page

    made = samples_page(
        found,
        count,
        shown,
        order=options["sort"] or "",
        colour=options["colour"],
        decode=token_texts(found.run, found.node),
    )
    path = Path(options["page"])
    try:
        path.write_text(made, encoding="utf-8")
    except OSError as error:
        what = f"cannot write {path}: {error.strerror}"
        raise UsageError(Finding(code="E321", what=what, fix="--html samples.html")) from None
    click.echo(f"wrote {path}   {len(shown):,} samples", err=True)


def token_texts(run: Path, node: str) -> Decode | None:
    """What makes texts of a rollout's tokens, each by itself; None where its model is not here."""
    from tokenizers import Tokenizer

    from rlflow.modelfiles.directories import model_directory

    with suppress(Exception):  # without a tokenizer tokens are shown as numbers
        graph = json.loads((run / "graph.json").read_text(encoding="utf-8"))
        name = next(each["model"] for each in graph["nodes"] if each["name"] == node)
        path = next(each["path"] for each in graph["models"] if each["name"] == name)
        words = json.loads((run / "run.json").read_text(encoding="utf-8"))
        path = words.get("tokenizer", path)
        directory = model_directory(path, Path(words["pipeline"]))
        tokenizer = Tokenizer.from_file(str(Path(directory or path) / "tokenizer.json"))
        return lambda ids: [tokenizer.decode([each], skip_special_tokens=False) for each in ids]
    return None
