"""Options that several commands have: what to look at, on which devices, models of which shape."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def target_options(function: F) -> F:
    """The options by which every command is told what to look at."""
    for option in (
        click.option(
            "--backend",
            type=click.Choice(["local", "ray"]),
            help="local is this process, ray one process a device; by the pools if left out.",
        ),
        click.option("--threads", type=click.IntRange(1), help="Threads of each CPU device."),
        click.option(
            "--devices", metavar="KIND:COUNT", help="Devices: cpu:2, cpu:2@4GB, h100:8,a100:8."
        ),
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            help="A field of the config; repeatable, later wins.",
        ),
        click.option(
            "--placement",
            metavar="NAME",
            help="A placement; the first one by default, all for check.",
        ),
        click.argument("pipeline", metavar="PIPELINE"),
    ):
        function = option(function)
    return function


def schedule_options(function: F) -> F:
    """The options that change a schedule: staleness, pauses, chunks, the seconds of a solver."""
    for option in (
        click.option(
            "--optimize",
            type=click.FloatRange(min=0, min_open=True),
            metavar="SECONDS",
            help="Let an exact solver improve the order for so long.",
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
            type=click.IntRange(0),
            metavar="UPDATES",
            help="How many updates old rollout weights may be; the placement's if left out.",
        ),
    ):
        function = option(function)
    return function


def repeated(options: dict[str, Any], placement: str, *, run: bool) -> str:
    """The pipeline and its options as they were typed; those that `rlflow run` has, where asked."""
    words = [options["pipeline"], "--placement", placement]
    for setting in options["settings"]:
        words += ["--set", setting]
    names = ["devices", "threads", "backend", "staleness", "pause_at", "stream", "optimize"]
    names += [] if run else ["model_shape"]
    for name in names:
        if options.get(name) is not None:
            words += [f"--{name.replace('_', '-')}", f"{options[name]}"]
    return shlex.join(words)


model_shape_option = click.option(
    "--model-shape",
    metavar="NAME",
    help="Take models as public ones of this shape: qwen2.5-7b, or actor=qwen2.5-7b,...",
)

engine_option = click.option(
    "--engine",
    metavar="NAME",
    help="What makes rollouts: torch, sglang, vllm; left out, torch or what a placement names.",
)
