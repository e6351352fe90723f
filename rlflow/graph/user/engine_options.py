"""What is said of an engine in a process of its own, and the engines known by name.

An engine is a class of options: its values go into a plan, its `load` starts it where the plan
runs. Nothing here knows what an engine does with an option, or whether one is installed.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import ConfigDict, Field, field_validator

from rlflow.errors import Finding, GraphError, PlanError, near_names
from rlflow.graph.source import declared_at
from rlflow.graph.strict_model import Strict

if TYPE_CHECKING:
    from rlflow.contract import engines as contract

EMBEDDED = "torch"

Positive = Annotated[int, Field(ge=1)]


class EngineOptions(Strict):
    """Options of a rollout engine that runs beside the worker. What is None is derived by the plan.

    The pool of keys and values has `max_total_tokens` tokens. Without a number it has what
    `mem_fraction_static` of a device's memory leaves beside the weights, or else as many as the
    rollouts need at the most. `python` is the interpreter that the engine is installed for: by
    default that of the variable RLFLOW_<ENGINE>_PYTHON, or this one. It has `start_seconds` to
    start. With `memory_saver` weights and pool can be freed while the engine is idle; None means
    where the plan has it sleep. `args` are further arguments of the engine, under its own names.

    A subclass has a name, `engine`, and a `title` for messages. It overrides `load`, or names a
    function that starts the engine in `loader` (`package.module:function`). `packages` have to be
    installed for the interpreter; `install` is what to type where one is missing. `said_elsewhere`
    maps arguments that `args` may not have to what decides them. `adapted` names the linear
    layers, by the last part of their names, to which the engine can add low-rank adapters. With
    `drafts` a drafter may be loaded into the engine beside its model; with `routes` it tells which
    experts tokens chose.
    """

    engine: ClassVar[str] = ""
    title: ClassVar[str] = ""
    loader: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()
    install: ClassVar[str] = ""
    said_elsewhere: ClassVar[Mapping[str, str]] = {}
    adapted: ClassVar[tuple[str, ...]] = ()
    drafts: ClassVar[bool] = False
    routes: ClassVar[bool] = False

    max_total_tokens: Positive | None = None
    mem_fraction_static: float | None = Field(default=None, gt=0, lt=1)
    memory_saver: bool | None = None
    python: str | None = None
    start_seconds: float = Field(default=300.0, gt=0)
    args: dict[str, Any] = Field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @field_validator("args")
    @classmethod
    def _of_its_own(cls, args: dict[str, Any]) -> dict[str, Any]:
        """Plain data under names that nothing else decides; PlanError E246 for any other."""
        taken = {*cls.said_elsewhere, *cls.model_fields}
        findings = [_said_elsewhere(cls, name) for name in args if name in taken]
        findings += [_no_data(cls, key, value) for key, value in args.items() if not _plain(value)]
        if findings:
            raise PlanError(*findings)
        return args

    def load(self, path: str, **how: Any) -> tuple[contract.LoadedModel, contract.RolloutEngine]:
        """Start one: its weights by name and version, and what generates with them.

        `path` is the model's directory or hub name; `how` has `name`, `dtype`, `device`, `seed`,
        `init` ("weights" or "random"), `threads` and `devices`, the numbers of its ranks' devices;
        for a model with adapters `lora` as well, and where a drafter lies in it `draft`: its
        `path`, `name`, `dtype`, `init` and how many `tokens` it proposes at a time.
        """
        start: Callable[..., tuple[contract.LoadedModel, contract.RolloutEngine]]
        start = pkgutil.resolve_name(self.loader)
        return start(path, options=self, **how)

    def unseeded(self, *, on_cpu: bool) -> str:
        """Why equal seeds may sample other tokens, to follow "not replayable"; empty if not."""
        del on_cpu
        return ""

    def distorted(self, temperature: float, *, on_cpu: bool) -> str:
        """Why a drafter would change what is sampled at a temperature; empty if it does not."""
        del temperature, on_cpu
        return ""

    @classmethod
    def unadapted(cls, targets: Sequence[str]) -> list[str]:
        """The layers among the targets of adapters to which the engine cannot add any."""
        layers = dict.fromkeys(target.rpartition(".")[2] for target in targets)
        return [layer for layer in layers if layer not in cls.adapted]

    def host_findings(self, name: str, hosts: int) -> list[Finding]:
        """Why the ranks of a replica cannot be on that many hosts; `name` is the instance's."""
        if hosts == 1:
            return []
        return [
            Finding(
                code="E672",
                what=f"the ranks of {name} are on {hosts} hosts",
                got=f"{self.title or self.engine} is started in one process, on one host",
                expected="a replica, tp= devices, on one host",
                fix="a smaller tp=, or other devices for its pool",
            )
        ]

    @classmethod
    def spelled(cls) -> str:
        """The class as a pipeline names it."""
        return f"rf.{cls.__name__}" if cls.__module__.startswith("rlflow.") else cls.__name__

    @classmethod
    def variable(cls) -> str:
        """The environment variable that names the engine's interpreter."""
        return f"RLFLOW_{cls.engine.upper().replace('-', '_')}_PYTHON"

    def describe(self) -> str:
        """The printed form: the name, and in brackets what differs from the defaults."""
        said = self.said()
        options = ", ".join(f"{name}={value}" for name, value in said.items())
        return f"{self.engine}({options})" if said else self.engine

    def said(self) -> dict[str, Any]:
        """What differs from the defaults, as plain data."""
        return self.model_dump(exclude_defaults=True)

    def as_json(self) -> dict[str, Any]:
        """The same, with the engine's name."""
        return {"engine": self.engine, **self.said()}


Options = TypeVar("Options", bound=EngineOptions)
_ENGINES: dict[str, type[EngineOptions]] = {}


def register_engine(options: type[Options]) -> type[Options]:
    """Register an engine under the name in its class of options, so that placements find it.

    `rf.on(pool, engine=name)` and `engine=Options(...)` work from then on. A name registered
    again is replaced. Returns the class, so it can be used as a decorator. Raises GraphError for
    what is no class of options, and for a class without a name or without `load` and `loader`.
    """
    wrong = _misfit(options)
    if wrong:
        raise GraphError(
            Finding(
                code="E262",
                what=f"{getattr(options, '__name__', options)!s} cannot be an engine: {wrong}",
                where=declared_at(),
                expected='a subclass of rf.EngineOptions with a name, engine = "mine", and either '
                'loader = "package.module:function" or a method load',
            )
        )
    _ENGINES[options.engine] = options
    return options


def _misfit(options: object) -> str:
    """What keeps a class from being an engine's; empty if nothing does."""
    if not isinstance(options, type) or not issubclass(options, EngineOptions):
        return "it is no subclass of rf.EngineOptions"
    name = options.engine
    if not name.replace("-", "_").isidentifier() or name == EMBEDDED:
        return f"its name is {name!r}"
    if not options.loader and options.load is EngineOptions.load:
        return "nothing says how it is started"
    return ""


def known_engines() -> tuple[str, ...]:
    """The names that `engine=` may have: the embedded one, then those registered, in order."""
    return (EMBEDDED, *_ENGINES)


def registered_engines() -> tuple[type[EngineOptions], ...]:
    """The classes of options that were registered, in order."""
    return tuple(_ENGINES.values())


def engine_named(value: object) -> object:
    """What `engine=` was given, checked by name.

    Raises PlanError E245 for an unknown name, E263 for options of no registered engine.
    """
    known = known_engines()
    named = value is None or (isinstance(value, str) and value in known)
    if named or (isinstance(value, EngineOptions) and value.engine in _ENGINES):
        return value
    if isinstance(value, EngineOptions):
        kind = type(value).__name__
        raise PlanError(
            Finding(
                code="E263",
                what=f"engine={kind}(...): {kind} is not registered",
                expected=f"one of {', '.join(known)}, or a registered class",
                fix=f"rf.register_engine({kind})",
            )
        )
    raise PlanError(
        Finding(
            code="E245",
            what=f"there is no engine {value!r}",
            expected=f"{', '.join(known)}, or options such as rf.SGLang(...)",
            near=near_names(str(value).lower(), known),
        )
    )


def options_of(engine: str | EngineOptions | None) -> EngineOptions | None:
    """The options of an engine by its name or as they are; None for the embedded one."""
    if engine is None or engine == EMBEDDED:
        return None
    return engine if isinstance(engine, EngineOptions) else _ENGINES[engine]()


def options_from_json(document: Mapping[str, Any]) -> EngineOptions:
    """The options of which `document` is the JSON.

    Those of an engine that is not registered come back as data, which can be compared and not
    started. Raises ValueError where no engine is named.
    """
    said = dict(document)
    name = said.pop("engine", "")
    if not isinstance(name, str) or not name:
        raise ValueError("options of an engine without its name")
    kind = _ENGINES.get(name)
    if kind is None:
        body = {"engine": name, "model_config": ConfigDict(frozen=True, extra="allow")}
        kind = type("Unregistered", (EngineOptions,), {"__module__": __name__, **body})
    return kind.model_validate(said)


def _plain(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _said_elsewhere(options: type[EngineOptions], name: str) -> Finding:
    own = f"{name}= of {options.spelled()}"
    return Finding(
        code="E246",
        what=f"{options.spelled()}(args=...) sets {name!r}, which is said elsewhere",
        expected=f"it follows from {options.said_elsewhere.get(name, own)}",
    )


def _no_data(options: type[EngineOptions], name: str, value: object) -> Finding:
    return Finding(
        code="E246",
        what=f"{options.spelled()}(args=...) sets {name!r} to what is no plain data",
        got=type(value).__name__,
        expected="numbers, text, lists and dictionaries: they go to another process",
    )
