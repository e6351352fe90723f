"""`rlflow recipes` and `rlflow init`."""

from __future__ import annotations

import shlex
from dataclasses import replace

import click

from rlflow.cli.commands import Target, check_all
from rlflow.cli.recipes.catalogue import RECIPES, recipe_named
from rlflow.cli.recipes.rows import OwnRows
from rlflow.cli.recipes.written import AskedPipeline, pipeline_file, write_pipeline
from rlflow.cli.shell.printed import json_option, print_json
from rlflow.errors import Finding, UsageError
from rlflow.modelfiles.directories import model_directory
from rlflow.scheduler.models.known_shapes import KNOWN
from rlflow.scheduler.plan.text import table

INIT_EXAMPLES = """\b
Examples:
  rlflow init mine --recipe grpo --model Qwen/Qwen2.5-7B-Instruct --data my.jsonl
  rlflow init mine --model models/my-model --data my.parquet --prompt-column question
"""


@click.command("recipes")
@json_option
def list_recipes(as_json: bool) -> None:
    """List what `rlflow init` writes a pipeline from."""
    if as_json:
        print_json([recipe.as_json() for recipe in RECIPES])
        return
    rows = [(recipe.name, recipe.what, f"needs {recipe.needs}") for recipe in RECIPES]
    for line in table(rows, ""):
        click.echo(line)
    click.echo("next: rlflow init mine --recipe grpo --model MODEL --data FILE.jsonl", err=True)


@click.command("init", no_args_is_help=True, epilog=INIT_EXAMPLES)
@click.argument("name", metavar="[NAME]", required=False)
@click.option(
    "--recipe",
    metavar="RECIPE",
    default="grpo",
    show_default=True,
    help="One that rlflow recipes lists.",
)
@click.option("--model", metavar="MODEL", required=True, help="A hub name, or a directory.")
@click.option(
    "--data", metavar="DATA", required=True, help="A .jsonl or .parquet file, or a hub name."
)
@click.option(
    "--prompt-column", metavar="NAME", default="prompt", show_default=True, help="In the data."
)
@click.option(
    "--answer-column", metavar="NAME", default="answer", show_default=True, help="In the data."
)
@click.option("--subset", metavar="NAME", help="Of a data set of the hub.")
@click.option(
    "--eval-data",
    metavar="DATA",
    help="Held-out rows of the same columns; of a hub name its split test.",
)
@click.option("--force", is_flag=True, help="Overwrite NAME.py.")
@json_option
def init_pipeline(
    name: str | None,
    recipe: str,
    model: str,
    data: str,
    prompt_column: str,
    answer_column: str,
    subset: str | None,
    eval_data: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write a pipeline of your own, NAME.py, from a recipe, and check it."""
    rows = OwnRows(data=data, prompt=prompt_column, answer=answer_column, subset=subset)
    taken = recipe_named(recipe)
    asked = AskedPipeline(
        recipe=taken,
        path=pipeline_file(name or taken.name),
        model=model,
        rows=rows,
        held_out=None if eval_data is None else replace(rows, data=eval_data),
    )
    checked_words(asked)
    write_pipeline(asked, force=force)
    click.echo(f"wrote {asked.path}", err=True)
    result = check_all(Target(pipeline=str(asked.path)))
    if as_json:
        print_json({"file": str(asked.path), "recipe": taken.name, "check": result})
        return
    click.echo("\n".join(result["lines"]))
    click.echo("\n".join(next_lines(asked)), err=True)


def checked_words(asked: AskedPipeline) -> None:
    """Refuse, before anything is written, a model or rows that are not there (UsageError)."""
    model_directory(asked.model)
    asked.rows.checked()
    if asked.held_out is None:
        return
    asked.held_out.checked()
    if asked.held_out.suffix != asked.rows.suffix:
        raise UsageError(
            Finding(
                code="E354",
                what="--data and --eval-data are of two kinds",
                got=f"{asked.rows.data} and {asked.held_out.data}",
                expected="two files of one format, or two names of the hub",
            )
        )


def next_lines(asked: AskedPipeline) -> list[str]:
    """What to type next: edit, plan on devices that need not be here, and run."""
    file, placement = shlex.quote(str(asked.path)), asked.recipe.placement
    shape = shape_words(asked.model)
    edit = "correct, what a response is paid" if asked.recipe.name != "sft" else "Config"
    return [
        f"edit: {asked.path}   {edit}",
        f"next: rlflow plan {file} --placement {placement} --devices h100:8{shape}",
        f"then: rlflow run {file} --placement {placement}",
    ]


def shape_words(model: str) -> str:
    """The option for a hub model that is not here and whose shape is known by its name."""
    if model_directory(model) is not None:
        return ""
    words = model.rpartition("/")[2].lower()
    found = [name for name in KNOWN if words == name or words.startswith(f"{name}-")]
    return f" --model-shape {max(found, key=len)}" if found else ""
