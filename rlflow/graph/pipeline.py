"""`@rf.pipeline`: a function that declares a graph, its config and its placements.

The config is a pydantic model whose every field is a `--set` key. Tracing runs the
function once; whatever is wrong with the graph comes back as one list.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from rlflow.contract.trackers import DEFAULT_TRACKERS, tracker_findings, tracker_names
from rlflow.errors import (
    LONGEST_NAME,
    Finding,
    GraphError,
    Source,
    UsageError,
    known_names,
    near_names,
)
from rlflow.graph.graph import Graph
from rlflow.graph.headline import no_numbers
from rlflow.graph.placement import MOST_STALE, Placement, on
from rlflow.graph.rules.check import check_graph
from rlflow.graph.source import declared_at, raised_at, short_path
from rlflow.graph.strict_model import Strict
from rlflow.graph.trace import tracing
from rlflow.graph.user.length_files import declared_lengths
from rlflow.graph.user.lengths import Lengths
from rlflow.graph.user.recording import RecordRule, read_rules

# The names of the modules that files of pipelines are loaded as.
MODULE = "rlflow_pipeline_"
DEFAULT_PLACEMENTS = {"colocate": Placement(pools={"all": 1}, assign={"*": on("all")})}


class Config(Strict):
    """Base of a pipeline's config. Every field is a key of `--set`."""

    model_config = ConfigDict(validate_default=True)
    INFINITE: ClassVar[bool] = True
    TEXT: ClassVar[bool] = True

    seed: int = 0
    iterations: int = Field(default=100, ge=1)

    @field_validator("iterations")
    @classmethod
    def _at_least_one(cls, count: int) -> int:
        """Hold for a field that a config declares anew, too."""
        if count < 1:
            raise ValueError("Input should be greater than or equal to 1")
        return count


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A declared pipeline: the function, its config type and its placements by name.

    `staleness` holds in every placement that does not say its own; `headline` names the metrics
    that are shown first, those of the rewards that updates learn from where it is empty; `track`
    names the trackers that its runs are told to.
    """

    name: str
    function: Callable[[Any], None]
    config: type[Config]
    placements: Mapping[str, Placement]
    staleness: int = 0
    headline: tuple[str, ...] = ()
    track: tuple[str, ...] = DEFAULT_TRACKERS
    record: tuple[RecordRule, ...] | None = None
    lengths: Lengths | None = None
    where: Source | None = None
    path: Path | None = None

    def trace(self, config: Config | None = None) -> Graph:
        """Run the function once and return its graph.

        Raises GraphError with every finding, each at the line that caused it.
        """
        with tracing() as trace:
            try:
                self.function(config if config is not None else self.config())
            except GraphError as error:
                found = [*trace.findings, *error.findings]
                raise GraphError(*found, summary=_summary(found, self.where)) from None
            except ValidationError as error:
                where = raised_at(error, self.path)
                found = [*trace.findings, *validation_findings(error, "E301", where=where)]
                raise GraphError(*found, summary=_summary(found, self.where)) from None
        graph = Graph(
            name=self.name,
            nodes=tuple(trace.nodes.values()),
            models=tuple(trace.models.values()),
            staleness=self.staleness,
            source=self.where,
            headline=self.headline,
            lengths=self.lengths,
        )
        trace.findings += no_numbers(self.headline, graph.nodes, self.where)
        findings = [*trace.findings, *check_graph(graph, complete=not trace.findings)]
        if findings:
            raise GraphError(*findings, summary=_summary(findings, self.where))
        return graph

    def placement(self, name: str | None) -> tuple[str, Placement]:
        """The placement of that name, or the first one; UsageError if there is none."""
        if name is None:
            return next(iter(self.placements.items()))
        if name not in self.placements:
            raise UsageError(
                Finding(
                    code="E201",
                    what=f"pipeline {self.name!r} has no placement {name!r}",
                    where=self.where,
                    expected=known_names(list(self.placements)),
                    near=near_names(name, self.placements),
                )
            )
        return name, self.placements[name]


def _summary(findings: Sequence[Finding], where: Source | None) -> str:
    count = len(findings)
    path = where.path if where is not None else "the pipeline"
    return f"{count} error{'s' if count != 1 else ''} in {path}. Nothing was started."


def pipeline(
    *,
    placements: Mapping[str, Placement] | None = None,
    staleness: int = 0,
    headline: str | Sequence[str] = (),
    track: str | Sequence[str] = DEFAULT_TRACKERS,
    record: str | Sequence[str] = (),
    lengths: Lengths | str | Path | None = None,
    name: str | None = None,
) -> Callable[[Callable[[Any], None]], Pipeline]:
    """Make a pipeline of a function of one config that calls ops.

    `placements` are the pipeline's placements by name; without any it has `colocate`, one pool of
    one device. With `staleness` k a rollout may read weights that are up to k updates old, and so
    run ahead; a placement with a `staleness` of its own overrides it. `headline` names metrics
    (`reward/mean`) that the live line, the report and its curves show first; by default these are
    the rewards that updates learn from. `track` names where runs are told besides their directory:
    `tensorboard`, or `none`. `record` says which nodes' rows a run writes, each as `--record` does:
    `NODE`, `NODE=every:N`, or `none`; by default 8 groups of rollouts with what belongs to them.
    `lengths` says what plans count with for prompts and responses: `rf.Lengths`, the words of
    `--lengths`, or a file; that option wins over it.

    Raises GraphError for a staleness that is no number of updates, for an unknown tracker, for what
    is no `record` and what says no `lengths`, and where the function takes other than one
    parameter, an `rf.Config`.
    """
    _require_staleness(staleness)
    unknown = tracker_findings((track,) if isinstance(track, str) else tuple(track), "track=")
    if unknown:
        where = declared_at()
        raise GraphError(*(dataclasses.replace(finding, where=where) for finding in unknown))
    at = declared_at()
    rules = read_rules(record, GraphError, at)
    given = declared_lengths(lengths, GraphError, at, *([Path(at.path).parent] if at else []))

    def decorate(function: Callable[[Any], None]) -> Pipeline:
        _require_plain(function)
        code = function.__code__
        where = Source(
            path=short_path(code.co_filename),
            line=code.co_firstlineno,
            text=f"def {function.__name__:.80}(...)",
        )
        _require_short(function.__name__, where)
        return Pipeline(
            name=name or function.__name__,
            function=function,
            config=_config_type(function, where),
            placements=dict(placements or DEFAULT_PLACEMENTS),
            staleness=staleness,
            headline=(headline,) if isinstance(headline, str) else tuple(headline),
            track=tracker_names(track),
            record=rules,
            lengths=given,
            where=where,
            path=Path(code.co_filename),
        )

    return decorate


def _require_plain(function: Callable[..., Any]) -> None:
    """Raise GraphError for a function that a call alone does not run."""
    kinds = {
        "an async function": inspect.iscoroutinefunction(function),
        "a generator": inspect.isgeneratorfunction(function),
        "an async generator": inspect.isasyncgenfunction(function),
    }
    for kind in (kind for kind, holds in kinds.items() if holds):
        raise GraphError(
            Finding(
                code="E659",
                what=f"pipeline {function.__name__!r} is {kind}",
                where=declared_at(),
                expected="a function that declares ops as it is called: no await, no yield",
                fix=f"def {function.__name__}(cfg: rf.Config): ...",
            )
        )


def _config_type(function: Callable[[Any], None], where: Source) -> type[Config]:
    parameters = list(inspect.signature(function).parameters)
    annotation = typing.get_type_hints(function).get(parameters[0]) if parameters else None
    if len(parameters) == 1 and isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    raise GraphError(
        Finding(
            code="E302",
            what=f"pipeline {function.__name__!r} does not say what its config is",
            where=where,
            expected="one parameter annotated with a class derived from rf.Config",
            fix=f"def {function.__name__}(cfg: rf.Config): ...",
        )
    )


def _require_staleness(staleness: object) -> None:
    """Raise GraphError E227 for what is no number of updates, or too many."""
    number = -1 if isinstance(staleness, bool) or not isinstance(staleness, int) else staleness
    if not 0 <= number <= MOST_STALE:
        raise GraphError(
            Finding(
                code="E227",
                what=f"a pipeline with staleness={staleness!r}",
                where=declared_at(),
                expected=f"how many updates old the weights of a rollout may be: 0 to {MOST_STALE}",
            )
        )


def _require_short(name: str, where: Source) -> None:
    """Raise GraphError E130 for a name that no directory of a run can have."""
    if len(name) > LONGEST_NAME:
        finding = Finding(
            code="E130",
            what=f"a pipeline with a name of {len(name)} letters",
            where=where,
            expected=f"at most {LONGEST_NAME}: directories of runs are called by it",
        )
        raise GraphError(finding)


def make_config(kind: type[Config], settings: Sequence[str]) -> Config:
    """A config with `key=value` settings over its defaults; later settings win.

    A field that is a dataclass or a pydantic model of its own has keys with dots, `optim.lr=1e-3`.

    Values are read as the field's type wants them: JSON first, then plain text.
    Raises UsageError for an unknown key, a setting without `=`, or a value of the
    wrong type.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(
                Finding(code="E303", what=f"--set {setting!r} has no '='", fix="--set key=value")
            )
        first, *deeper = key.split(".")
        _check_key(kind, first)
        if deeper:
            held = values.get(
                first, kind.model_fields[first].get_default(call_default_factory=True)
            )
            values[first] = _with(held, deeper, text, key)
        else:
            values[key] = _parse(text, kind.model_fields[key].annotation)
    try:
        return kind(**values)
    except ValidationError as error:
        raise UsageError(*validation_findings(error, "E305", prefix="--set ")) from None


def _with(held: Any, names: Sequence[str], text: str, key: str) -> Any:
    """A nested value with the one that the names lead to said anew; UsageError E304 for others.

    Validated where it is a pydantic model or is read as a field of one.
    """
    name, *deeper = names
    fields = _fields(held)
    if name not in fields:
        raise UsageError(
            Finding(
                code="E304",
                what=f"--set {key}: {type(held).__name__} has no field {name!r}",
                expected=known_names(list(fields)),
                near=near_names(name, fields),
            )
        )
    now = getattr(held, name)
    said = _with(now, deeper, text, key) if deeper else _parse(text, fields[name])
    values = {field: getattr(held, field) for field in fields} | {name: said}
    try:
        return TypeAdapter(type(held)).validate_python(values)
    except ValidationError as error:
        raise UsageError(*validation_findings(error, "E305", prefix=f"--set {key}: ")) from None


def _fields(held: Any) -> dict[str, Any]:
    """The fields of a nested value and their types; none of what is neither model nor dataclass."""
    if isinstance(held, BaseModel):
        return {name: field.annotation for name, field in type(held).model_fields.items()}
    if dataclasses.is_dataclass(held):
        hints = typing.get_type_hints(type(held))
        return {field.name: hints[field.name] for field in dataclasses.fields(held) if field.init}
    return {}


def _check_key(kind: type[Config], key: str) -> None:
    if key in kind.model_fields:
        return
    names = list(kind.model_fields)
    raise UsageError(
        Finding(
            code="E304",
            what=f"--set {key}: the config {kind.__name__} has no field {key!r}",
            expected=known_names(names),
            near=near_names(key, names),
        )
    )


def _parse(text: str, annotation: Any) -> Any:
    wants = typing.get_args(annotation) or (annotation,)
    if str in wants and isinstance(annotation, type | types.UnionType):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def validation_findings(
    error: ValidationError, code: str, *, prefix: str = "", where: Source | None = None
) -> list[Finding]:
    """What pydantic found, one finding a field."""
    findings = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        shown = f"{prefix}{key}" if key else error.title
        # Of all options together the message says what is wrong; none of them is shown twice.
        got = "" if problem["type"] == "missing" or not key else f"{problem['input']!r:.120}"
        message = problem["msg"].removeprefix("Value error, ")
        known = re.findall(r"'(.+?)'", message) if problem["type"] == "literal_error" else []
        near = near_names(str(problem["input"]), known)
        what = f"{shown}: {message}"
        findings.append(Finding(code=code, what=what, where=where, got=got, near=near))
    return findings
