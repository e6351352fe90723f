"""Options of the commands, and the one description by which their lines are written and read.

What to look at, on which devices, models of which shape, how to run. A line is written from the
parameters that click reads it with, so that an option is in both or in neither.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import click

from rlflow.cli.shell.numbers import Finite, is_count
from rlflow.cli.shell.printed import json_option
from rlflow.cli.shell.times import time_of
from rlflow.cli.shell.values import typed_fields, typed_files, typed_placements
from rlflow.cli.stages.parts import part_options
from rlflow.errors import Finding, UsageError
from rlflow.graph.placement import MOST_STALE

F = TypeVar("F", bound=Callable[..., Any])

engine_option = click.option(
    "--engine",
    metavar="NAME",
    help="What makes rollouts: torch, sglang, vllm; left out, torch or what a placement names.",
)


def chunks_said(stream: str) -> int | str:
    """How many chunks `--stream` says, or `auto`. Raises UsageError E226 for what is neither."""
    if stream != "auto" and not is_count(stream):
        raise UsageError(
            Finding(
                code="E226",
                what=f"--stream {stream} is no number of chunks",
                expected="1 or more, or auto",
                fix="--stream auto",
            )
        )
    return "auto" if stream == "auto" else int(stream)


def memory_options(function: F) -> F:
    """The options that say how much of the machine's memory plans may count on."""
    for option in (
        click.option(
            "--reserve",
            metavar="SHARE",
            help="Share of each GPU's memory that plans leave alone, 8% if left out.",
        ),
        click.option(
            "--host-memory",
            metavar="SIZE",
            help="Memory of each host for what sleeps there: 512GB; "
            "this machine's, or the server's.",
        ),
    ):
        function = option(function)
    return function


model_shape_option = click.option(
    "--model-shape",
    metavar="NAME",
    help="Take models as public ones of this shape: qwen2.5-7b, or actor=qwen2.5-7b,...",
)


range_option = click.option(
    "--range",
    "ranged",
    is_flag=True,
    help="Say the iteration as a range on CPU devices too, as of accelerators always.",
)
lengths_option = click.option(
    "--lengths",
    metavar="WORDS",
    help="Tokens that plans count with: prompt=512,response=mean:1800,p95:4000,max:8192; or a "
    "file of lengths, or a RUN; else the pipeline's, what was measured before, or assumed.",
)


acceptance_option = click.option(
    "--acceptance",
    type=float,
    metavar="CHANCE",
    help="How often a drafted token is accepted where those before it were, 0 to 1; else assumed.",
)


def target_options(function: F) -> F:
    """The options by which every command is told what to look at."""
    for option in (
        click.option(
            "--backend",
            type=click.Choice(["local", "ray"]),
            help="local is this process, ray one process a device; by the pools if left out.",
        ),
        click.option("--threads", type=click.IntRange(1), help="Host threads of each device."),
        memory_options,
        click.option(
            "--devices",
            metavar="KIND:COUNT",
            help="Devices: cpu:2, cpu:2@4GB, h100:8,a100:8, or a file that declares them: my.toml.",
        ),
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            shell_complete=typed_fields,
            help="A field of the config; repeatable, later wins.",
        ),
        click.option(
            "--placement",
            metavar="NAME",
            shell_complete=typed_placements,
            help="A placement, or a file that tune -o wrote; the first by default, for check all.",
        ),
        click.argument("pipeline", metavar="PIPELINE", shell_complete=typed_files),
    ):
        function = option(function)
    return function


def schedule_options(function: F) -> F:
    """The options that change a schedule: staleness, pauses, chunks, the seconds of a solver."""
    for option in (
        engine_option,
        lengths_option,
        click.option(
            "--optimize",
            type=Finite(min=0, min_open=True),
            metavar="SECONDS",
            help="Let an exact solver improve order and residency for so long.",
        ),
        click.option(
            "--stream",
            metavar="COUNT",
            help="Chunks of chains across pools, or auto; the placement's if left out.",
        ),
        click.option(
            "--pause-at",
            type=click.IntRange(1),
            metavar="TOKENS",
            help="Where rollouts take newer weights on the way; the placement's if left out.",
        ),
        click.option(
            "--staleness",
            type=click.IntRange(0, MOST_STALE),
            metavar="UPDATES",
            help="How many updates old rollout weights may be; the placement's if left out.",
        ),
    ):
        function = option(function)
    return function


def plan_options(function: F) -> F:
    """The options of commands that compile a plan, and do not run it."""
    function = acceptance_option(model_shape_option(function))
    for option in (schedule_options, part_options, target_options):
        function = option(function)
    return function


def checkpoint_options(function: F) -> F:
    """When a run saves, what it keeps, and on which weights it starts."""
    for option in (
        click.option(
            "--keep-best",
            metavar="METRIC",
            help="Keep the checkpoint where it is highest too; min:METRIC where lowest.",
        ),
        click.option(
            "--keep",
            type=click.IntRange(1),
            default=2,
            show_default=True,
            help="Newest checkpoints that stay.",
        ),
        click.option(
            "--save-every",
            default="50",
            show_default=True,
            metavar="WHEN",
            help="Iterations between checkpoints, a time (600s, 10m, 2h), or both: 50,600s.",
        ),
        click.option(
            "--from-weights",
            metavar="RUN",
            help="Start on the weights of a run's newest checkpoint, or of a checkpoint directory.",
        ),
        click.option(
            "--allow-changes",
            metavar="NAMES",
            help="With --resume: values that may be others from here on: lr,kl_coef.",
        ),
    ):
        function = option(function)
    return function


def record_options(function: F) -> F:
    """What a run records of its rows, and how much of that stays."""
    for option in (
        click.option(
            "--record-cap",
            type=Finite(min=0, min_open=True),
            default=4.0,
            show_default=True,
            metavar="GB",
            help="The largest record; beyond it the oldest iterations are dropped.",
        ),
        click.option(
            "--record",
            multiple=True,
            metavar="NODE[=HOW]",
            help="Record a node's rows: every:N iterations, first:N groups, rows:N; or none. "
            "By default the pipeline's, or 8 groups of rollouts. Repeatable.",
        ),
    ):
        function = option(function)
    return function


def observing_options(function: F) -> F:
    """Where a run is told besides its directory, and of what of it kernels are recorded."""
    for option in (
        click.option(
            "--profile-iterations",
            metavar="FROM:TO",
            help="Iterations whose kernels are recorded, TO left out; by default the second.",
        ),
        click.option(
            "--profile-action",
            multiple=True,
            metavar="ACTION",
            help="Record the kernels of an action, or of a node's runs, with torch.profiler.",
        ),
        click.option(
            "--track",
            multiple=True,
            metavar="NAME",
            help="Tell the run to tensorboard, wandb, trackio, mlflow, swanlab (wandb=PROJECT), "
            "or to none.",
        ),
    ):
        function = option(function)
    return function


def lasting_options(function: F) -> F:
    """The options of a run that stay when it is started elsewhere."""
    for option in (
        click.option("--no-color", is_flag=True, help="Plain text; NO_COLOR does the same."),
        click.option("-q", "--quiet", is_flag=True, help="Print warnings only."),
        click.option(
            "--deadline",
            type=time_of("--deadline", bare=True),
            metavar="TIME",
            help="The longest wait for one action; by default from its estimate and progress.",
        ),
        click.option(
            "--check-sync", is_flag=True, help="After every reshard, compare hashes of both ends."
        ),
        click.option(
            "--strict", is_flag=True, help="End at the first sign that nothing is learned."
        ),
        click.option("--elastic", is_flag=True, help="Lose devices, go on with those left."),
        record_options,
        checkpoint_options,
        observing_options,
        click.option(
            "--resume",
            metavar="RUN",
            is_flag=False,
            flag_value="latest",
            help="Continue a run directory; the latest one by default.",
        ),
        click.option("--run-dir", metavar="DIR", help="Where to write; runs/NAME-TIME by default."),
        click.option(
            "--iterations",
            type=click.IntRange(1),
            help="Iterations in all; the config's by default, of a run that goes on its own.",
        ),
        schedule_options,
        part_options,
        target_options,
    ):
        function = option(function)
    return function


def grace_option(function: F) -> F:
    """How long a scheduler waits between SIGTERM and SIGKILL."""
    return click.option(
        "--grace",
        type=time_of("--grace", bare=True),
        metavar="TIME",
        help="After SIGTERM, be over in so long: saved if that can be; exit code 75.",
    )(function)


def run_options(function: F) -> F:
    """All options of `rlflow run`."""
    for option in (
        json_option,
        click.option(
            "--wait",
            type=time_of("--wait", bare=True),
            metavar="TIME",
            help="With --address: how long the cluster may take to have room.",
        ),
        click.option("--address", metavar="HOST:PORT", help="Join a running Ray cluster."),
        click.option(
            "-n", "--dry-run", is_flag=True, help="Compile and check everything; start nothing."
        ),
        grace_option,
        lasting_options,
    ):
        function = option(function)
    return function


@cache
def _run_command() -> click.Command:
    return click.command("run")(run_options(lambda **_: None))


@cache
def _plan_command() -> click.Command:
    return click.command("plan")(plan_options(lambda **_: 0))


def run_words(values: Mapping[str, Any]) -> list[str]:
    """The words after `rlflow run` that say these values of its options; defaults are left out."""
    return typed_words(_run_command(), values)


def read_run(words: Sequence[str]) -> dict[str, Any]:
    """The values of all options of `rlflow run` that such words say; what click raises."""
    return _read(_run_command(), words)


def _read(command: click.Command, words: Sequence[str]) -> dict[str, Any]:
    return command.make_context(command.name, list(words)).params


def typed_words(command: click.Command, values: Mapping[str, Any]) -> list[str]:
    """Words that click reads back as these values: the argument, then options as in the help."""
    default = _read(command, ["x"])
    named = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    told = {str(option.name): _spelled(option) for option in named}
    options = [
        word
        for name, spelled in told.items()
        if name in values and values[name] is not None and values[name] != default[name]
        for word in spelled(values[name])
    ]
    argument = next(each for each in command.params if isinstance(each, click.Argument))
    target = str(values[str(argument.name)])
    return [*options, "--", target] if target.startswith("-") else [target, *options]


def _spelled(option: click.Option) -> Callable[[Any], list[str]]:
    """How an option's value is typed; one that could be taken for an option is joined by `=`.

    Where the value may be left out, click takes even that for an option: a path gets its `./`.
    """
    name = max(option.opts, key=len)
    optional = isinstance(option.flag_value, str)

    def one(value: Any) -> list[str]:
        text = _number(value) if isinstance(value, float) else str(value)
        if optional and text.startswith("-"):
            text = f"./{text}"
        return [f"{name}={text}"] if text.startswith("-") or not text else [name, text]

    def spelled(value: Any) -> list[str]:
        if option.is_flag:
            return [name]
        return [word for each in value for word in one(each)] if option.multiple else one(value)

    return spelled


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def repeated(options: Mapping[str, Any], placement: str | None, *, run: bool) -> str:
    """The pipeline and its options as they were typed; those that `rlflow run` has, where asked."""
    values = {**options, "placement": placement}
    return shlex.join(typed_words(_run_command() if run else _plan_command(), values))
