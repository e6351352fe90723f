"""`rlflow eval`: weights sampled on held-out rows, and what their responses are worth."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, TypeVar

import click

from rlflow.cli.options import engine_option, memory_options, typed_words
from rlflow.cli.shell.numbers import Finite
from rlflow.cli.shell.printed import json_option, print_json
from rlflow.cli.shell.times import time_of

F = TypeVar("F", bound=Callable[..., Any])
EXAMPLES = """\b
Examples:
  rlflow eval runs/grpo-20250131T142501Z -n 16
  rlflow eval runs/demo/checkpoints/iteration-000050 --placement split --limit 100
  rlflow eval Qwen/Qwen2.5-7B-Instruct --pipeline mine.py --data test.jsonl --answer boxed
"""


def _asked_options(function: F) -> F:
    """What is asked, how often, and what counts."""
    for option in (
        click.option(
            "--answer",
            default="response",
            show_default=True,
            metavar="HOW",
            help="What votes for maj@k: response (whole), boxed, gsm8k, number, or a function "
            "(response: str) -> str | None of the pipeline's file.",
        ),
        click.option(
            "--passes",
            default="reward>=1",
            show_default=True,
            metavar="RULE",
            help="Which samples are right.",
        ),
        click.option("--seed", type=click.IntRange(0), default=0, show_default=True),
        click.option("--top-p", type=Finite(0, 1, min_open=True), help="Nucleus."),
        click.option("--max-new-tokens", type=click.IntRange(1), help="Longest response."),
        click.option(
            "--temperature",
            type=Finite(0),
            help="By default the rollout's; of one sample the evaluation's.",
        ),
        click.option(
            "-k",
            "ks",
            type=click.IntRange(1),
            multiple=True,
            help="Repeatable; by default 1, 2, 4, ... and n.",
        ),
        click.option(
            "-n",
            "--samples",
            "n",
            type=click.IntRange(1, 1000),
            default=8,
            show_default=True,
            help="Samples of each prompt.",
        ),
        click.option("--limit", type=click.IntRange(1), help="The first so many rows."),
        click.option("--answer-column", metavar="NAME", help="In --data; answer if left out."),
        click.option("--prompt-column", metavar="NAME", help="In --data; prompt if left out."),
        click.option(
            "--data",
            metavar="DATA",
            help="A .jsonl or .parquet file, or a hub data set, NAME or NAME:SPLIT.",
        ),
    ):
        function = option(function)
    return function


def _pipeline_options(function: F) -> F:
    """Whose terms, and where it runs."""
    for option in (
        click.option(
            "--deadline",
            type=time_of("--deadline", bare=True),
            metavar="TIME",
            help="The longest wait for one action.",
        ),
        click.option("--address", metavar="HOST:PORT", help="Join a running Ray cluster."),
        engine_option,
        click.option("--backend", type=click.Choice(["local", "ray"]), help="As of rlflow run."),
        click.option("--threads", type=click.IntRange(1), help="Host threads of each device."),
        memory_options,
        click.option("--devices", metavar="KIND:COUNT", help="As of rlflow run."),
        click.option("--placement", metavar="NAME", help="The run's, or the pipeline's first."),
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            help="A field of the config, beside those of the run; repeatable.",
        ),
        click.option("--model", metavar="NAME", help="Which of the pipeline's models."),
        click.option(
            "--node",
            metavar="NODE",
            help="Whose data, reward and sampling; the first evaluation, else a rollout.",
        ),
        click.option(
            "--pipeline", metavar="FILE", help="Where data and reward are; a run has its own."
        ),
        click.option(
            "--iteration", type=click.IntRange(0), help="Of a run: the checkpoint after so many."
        ),
    ):
        function = option(function)
    return function


@click.command("eval", epilog=EXAMPLES, no_args_is_help=True)
@click.argument("weights", metavar="RUN | CHECKPOINT | MODEL | PIPELINE")
@_pipeline_options
@_asked_options
@click.option("--run-dir", metavar="DIR", help="Where to write; evals/NAME-TIME by default.")
@click.option("--dry-run", is_flag=True, help="Print the plan; start nothing.")
@click.option("-q", "--quiet", is_flag=True, help="Print the result and warnings only.")
@json_option
@click.option("--no-color", is_flag=True, help="Plain text; NO_COLOR does the same.")
def evaluate_weights(weights: str, **options: Any) -> None:
    """Sample held-out rows with some weights: mean reward, pass@k and maj@k with intervals."""
    from rlflow.cli.evaluation.running import evaluate_named
    from rlflow.cli.evaluation.weights import named_weights

    again = typed_words(evaluate_weights, {"weights": weights, **options})
    named = named_weights(weights, options["iteration"])
    found = evaluate_named(named, ("eval", *again), options)
    if found is None:
        return
    if options["as_json"]:
        print_json(found.as_json())
        return
    from rich.console import Console

    from rlflow.cli.evaluation.shown import evaluated_table

    Console(highlight=False, no_color=options["no_color"] or None).print(
        evaluated_table(found), soft_wrap=True
    )
    click.echo(f"worst: rlflow samples {shlex.quote(str(found.run_dir))} --sort reward", err=True)
