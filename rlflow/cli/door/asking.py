"""What a program asks for, as keyword arguments: the same words as the options of the commands.

A keyword is the option's name with `_` for `-`, and one at the end where Python has the word for
itself: `from_`. The one that differs is `config`, which says what `--set` says. Values become what
the commands make of theirs, so that both go one way from here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

from rlflow.cli.commands import Target
from rlflow.cli.options import read_run
from rlflow.cli.shell.times import check_deadline
from rlflow.errors import Finding, UsageError, near_names
from rlflow.graph.pipeline import Config, Pipeline
from rlflow.graph.placement import Placement
from rlflow.graph.user.lengths import Lengths
from rlflow.scheduler.plan.plan import Backend
from rlflow.strict import kinds_of, problem

Declaring = Pipeline | str | Path


class TargetOptions(TypedDict, total=False):
    """What is looked at, and on what; each is the command's option of that name.

    `placement` is the name of one, a file that `rlflow tune -o` wrote, or a value; `config` a
    config, or the fields of it that differ. `devices` is as on the command line, `"h100:8"`.
    """

    placement: str | Placement | None
    config: Config | Mapping[str, object] | None
    devices: str | None
    threads: int | None
    host_memory: str | None
    reserve: str | None
    backend: Backend | None
    engine: str | None


class PlacedOptions(TargetOptions, total=False):
    """What a plan and a run are told alike besides; each is the command's option of that name.

    `only` names nodes, `from_` edges of records as `"runs/a:actor.rollout"`: one text, or several.
    `lengths` is `rf.Lengths`, the option's words, a file or a run.
    """

    lengths: str | Path | Lengths | None
    only: str | Sequence[str]
    from_: str | Sequence[str]
    staleness: int | None
    stream: int | Literal["auto"] | None
    pause_at: int | None
    optimize: float | None


class PlanOptions(PlacedOptions, total=False):
    """What a plan is made for; each is the option of that name of `rlflow plan`."""

    model_shape: str | None
    acceptance: float | None


class SearchOptions(TargetOptions, total=False):
    """What a search is made for; each is the option of that name of `rlflow tune`."""

    model_shape: str | None
    acceptance: float | None
    lengths: str | Path | Lengths | None


class RunOptions(PlacedOptions, total=False):
    """What a run is told; each is the option of that name of `rlflow run`.

    Those of plans (`PlanOptions`) but for `model_shape` and `acceptance`, and how the run goes on.
    `save_every` is iterations, or a text such as `"50,600s"`; `quiet=False` prints what the command
    prints. `record`, `track` and `profile_action` are one text or several, as on the command line:
    `"actor.rollout=every:10"`, `"tensorboard"`, `"actor.update"`; or `"none"` of the first two.
    `record_cap` is in GB.
    """

    iterations: int | None
    run_dir: str | Path | None
    resume: str | Path | None
    record: str | Sequence[str]
    record_cap: float
    track: str | Sequence[str]
    profile_action: str | Sequence[str]
    profile_iterations: str | None
    from_weights: str | Path | None
    allow_changes: str | Sequence[str]
    save_every: int | str
    keep: int
    keep_best: str | None
    address: str | None
    wait: float | None
    strict: bool
    elastic: bool
    check_sync: bool
    deadline: float | None
    grace: float | None
    quiet: bool


def target_of(
    pipeline: Declaring, options: PlanOptions | SearchOptions, function: str, known: type
) -> Target:
    """The target of a command with these `known` options; UsageError E820 for those it has not."""
    return Target(pipeline=declared_of(pipeline), **spoken(options, known, function))


def run_values(pipeline: Declaring, options: RunOptions) -> dict[str, Any]:
    """The values of all options of `rlflow run`: defaults, and those that a program has said."""
    said = {"quiet": True, **spoken(options, RunOptions, "rf.run")}
    for name in ("run_dir", "resume", "from_weights", "save_every"):
        if said.get(name) is not None:
            said[name] = str(said[name])
    if "allow_changes" in said:
        said["allow_changes"] = ",".join(said["allow_changes"]) or None
    check_deadline(said.get("deadline"))
    return {**read_run(["pipeline"]), **said, "pipeline": declared_of(pipeline)}


def of_a_plan(options: PlanOptions) -> Finding:
    """What is wrong with options for a plan that is compiled already."""
    return Finding(
        code="E820",
        what="rf.simulate of a plan takes no options of plans",
        got=", ".join(options),
        expected="a plan of rf.compile with these options, or a pipeline and these options",
        fix="rf.simulate(rf.compile(pipeline, ...))",
    )


def declared_of(pipeline: Declaring) -> Pipeline | str:
    """What declares a pipeline, as commands take it; UsageError E820 for what does not."""
    if isinstance(pipeline, Pipeline | str):
        return pipeline
    if isinstance(pipeline, Path):
        return str(pipeline)
    raise UsageError(
        Finding(
            code="E820",
            what="nothing that declares a pipeline",
            got=f"{type(pipeline).__name__}: {pipeline!r:.60}",
            expected="what `@rf.pipeline()` has made, or the path of a file with one",
            fix='rf.compile("pipelines/grpo.py")',
        )
    )


def spoken(options: Mapping[str, Any], known: type, function: str) -> dict[str, Any]:
    """Options as those of a command: the config as settings, the rest by name.

    Raises UsageError E820 for those that are not `known`, or of another type.
    """
    hints = get_type_hints(known)
    findings = [_unknown(name, list(hints), function) for name in options if name not in hints]
    findings += [
        _wrong(name, value, expected, function)
        for name, value in options.items()
        if name in hints and (expected := _expected(value, hints[name]))
    ]
    if findings:
        raise UsageError(*findings)
    said = {
        name: _several(value) if _repeats(hints[name]) else value
        for name, value in options.items()
        if name != "config"
    }
    if said.get("stream") is not None:
        said["stream"] = str(said["stream"])
    if isinstance(said.get("lengths"), Path):
        said["lengths"] = str(said["lengths"])
    config = options.get("config")
    if isinstance(config, Mapping):
        said["settings"] = tuple(f"{name}={_text(value)}" for name, value in config.items())
    elif config is not None:
        said["config"] = config
    return said


def _expected(value: object, hint: Any) -> str:
    """What an option should have been, or nothing where it is that."""
    kinds = kinds_of(hint)
    words = [word for part in (hint, *get_args(hint)) for word in _choices(part)]
    if words and isinstance(value, str) and value not in words:
        return " or ".join(words)
    if _repeats(hint):
        several = value if isinstance(value, list | tuple) else [value]
        right = value is None or all(isinstance(each, str) for each in several)
        return "" if right else "a text, or several"
    if isinstance(value, int | float) and not kinds & {"int", "float", "bool", "object"}:
        return "a text"
    return problem(value, kinds)


def _repeats(hint: Any) -> bool:
    """Whether an option is a text that may be said several times."""
    return {"Sequence", "str"} <= kinds_of(hint)


def _several(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """The values of an option that may be said several times; a text is one."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def _choices(hint: Any) -> tuple[str, ...]:
    """The words of a `Literal`."""
    return get_args(hint) if get_origin(hint) is Literal else ()


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _unknown(name: str, known: Sequence[str], function: str) -> Finding:
    near = near_names(name, known)
    return Finding(
        code="E820",
        what=f"{function} has no option {name!r}",
        expected=", ".join(known),
        near=near,
        fix=f"{near[0]}=..." if near else "",
    )


def _wrong(name: str, value: object, expected: str, function: str) -> Finding:
    return Finding(
        code="E820",
        what=f"{function} with {name}={value!r:.60}",
        got=type(value).__name__,
        expected=expected,
    )
