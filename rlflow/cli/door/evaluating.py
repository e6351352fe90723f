"""`rf.eval`: an evaluation asked for by a program, by the words of the command, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from rlflow.cli.door.asking import Declaring, TargetOptions, declared_of, spoken
from rlflow.cli.door.handle import samples_frame
from rlflow.cli.door.shown import Shown
from rlflow.cli.evaluation.command import evaluate_weights
from rlflow.cli.evaluation.shown import Evaluated, evaluated_table
from rlflow.cli.evaluation.weights import NamedWeights, named_weights
from rlflow.cli.options import typed_words
from rlflow.errors import Finding, UsageError
from rlflow.graph.pipeline import Pipeline

if TYPE_CHECKING:
    import pandas as pd

WIDTH = 120
# What a program may give as a value, for which the command has a name alone.
VALUES = ("placement", "config", "pipeline", "answer")


class Interval(NamedTuple):
    """A number of an evaluation, and the ends of its bootstrap interval over prompts."""

    value: float
    low: float
    high: float


class EvalOptions(TargetOptions, total=False):
    """What is evaluated, and how; each is the option of that name of `rlflow eval`.

    `samples` are those of each prompt, `k` one number or several. `pipeline` is a file, or what
    `@rf.pipeline` has made; `answer` a known way, or a function of a response.
    """

    iteration: int | None
    pipeline: Declaring | None
    node: str | None
    model: str | None
    data: str | None
    prompt_column: str | None
    answer_column: str | None
    limit: int | None
    samples: int
    k: int | Sequence[int]
    temperature: float | None
    max_new_tokens: int | None
    top_p: float | None
    seed: int
    passes: str
    answer: str | Callable[[str], str | None]
    run_dir: str | Path | None
    address: str | None
    deadline: float | None
    quiet: bool


class Evaluation(Shown, Evaluated):
    """What `rf.eval` has found: `mean` reward, `pass_at[k]` and `maj_at[k]`, each an `Interval`.

    `weights` are those that were evaluated, in words; `run_dir` holds every sample, as
    `rlflow samples` shows them. `str(found)` is what `rlflow eval` prints; a notebook shows it.
    """

    def __str__(self) -> str:
        """What `rlflow eval` prints."""
        from rich.console import Console

        console = Console(width=WIDTH, color_system=None, force_jupyter=False)
        with console.capture() as printed:
            console.print(evaluated_table(self), soft_wrap=True)
        return "\n".join(line.rstrip() for line in printed.get().splitlines())

    @property
    def mean(self) -> Interval:
        """The mean reward of all samples."""
        return Interval(*self.interval("mean"))

    @property
    def pass_at(self) -> Mapping[int, Interval]:
        """By k: the share of prompts of which one of k samples is right, without bias."""
        return {k: Interval(*self.interval(f"pass@{k}")) for k in self.counted.ks}

    @property
    def maj_at(self) -> Mapping[int, Interval]:
        """By k: the share of prompts whose most frequent answer of k samples is right."""
        return {k: Interval(*self.interval(f"maj@{k}")) for k in self.counted.ks}

    def samples(self) -> pd.DataFrame:
        """Every sample with its reward, a row each; UsageError E822 where pandas is missing."""
        rows: Collection[int] = (0,)
        return samples_frame(self.run_dir, rows, asked="samples()")


def eval_values(
    weights: Declaring, options: EvalOptions
) -> tuple[NamedWeights, tuple[str, ...], dict[str, Any]]:
    """What is named, the words of a command that evaluates it, and the values of its options.

    Raises UsageError E820 for options that are not understood, E360 and E361 for the weights.
    """
    said = spoken(options, EvalOptions, "rf.eval")
    values = {name: said.pop(name) for name in VALUES if name in said}
    words = {name: value for name, value in values.items() if isinstance(value, str)}
    if "pipeline" in values and values["pipeline"] is not None:
        values["pipeline"] = declared_of(values["pipeline"])
        words["pipeline"] = _text(values["pipeline"])
    if "samples" in said:
        said["n"] = said.pop("samples")
    if "k" in said:
        k = said.pop("k")
        said["ks"] = (k,) if isinstance(k, int) else tuple(k)
    if said.get("run_dir") is not None:
        said["run_dir"] = str(said["run_dir"])
    text = _text(declared_of(weights))
    again = typed_words(evaluate_weights, {"weights": text, "quiet": True, **said, **words})
    read = {**_read(again), **values}
    if isinstance(weights, Pipeline) and read["iteration"] is None:
        return NamedWeights(said=text, pipeline=weights), ("eval", *again), read
    return named_weights(text, read["iteration"]), ("eval", *again), read


def as_evaluation(found: Evaluated) -> Evaluation:
    """What the command has found, for a program: the same fields."""
    return Evaluation(**{field.name: getattr(found, field.name) for field in fields(found)})


def _read(words: Sequence[str]) -> dict[str, Any]:
    """The values that the command makes of its words; UsageError E820 for what it refuses."""
    try:
        return evaluate_weights.make_context("eval", [*words]).params
    except click.UsageError as error:
        finding = Finding(code="E820", what=f"rf.eval: {error.format_message()}")
        raise UsageError(finding) from None


def _text(declared: Pipeline | str) -> str:
    """What one types for weights, or for a pipeline."""
    if isinstance(declared, str):
        return declared
    path, name = declared.path, declared.function.__name__
    return f"{path}:{name}" if path is not None and path.is_file() else name
