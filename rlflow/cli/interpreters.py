"""The interpreter that an engine runs in, which may be another than this one, and what it lacks.

Asks that interpreter for its packages; starts no engine. Knows neither plans nor torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlflow.errors import Finding
from rlflow.graph.user.engine_options import EngineOptions

SECONDS = 30.0
# Packages by their names to Python: one of another distribution is as good.
ASK = """
import importlib.metadata as m, json, platform, sys
from importlib.util import find_spec
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        for other in m.packages_distributions().get(name, ())[:1] if find_spec(name) else ():
            found[name] = m.version(other)
print(json.dumps([platform.python_version(), found]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """An interpreter by its path: its version, its packages by name, and why it cannot be asked.

    An engine needs the packages `needed`.
    """

    path: str
    needed: tuple[str, ...] = ()
    version: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def missing(self) -> tuple[str, ...]:
        """The packages that an engine needs and that are not there."""
        return tuple(name for name in self.needed if name not in self.packages)

    def describe(self) -> str:
        """One line: path, then versions or what is wrong."""
        if self.problem:
            return f"{self.path}: {self.problem}"
        known = [f"{name} {version}" for name, version in self.packages.items()]
        told = ", ".join([f"python {self.version}", *known])
        lacks = f"; no {', no '.join(self.missing)}" if self.missing else ""
        return f"{self.path}: {told}{lacks}"


def engine_python(kind: type[EngineOptions], said: str | None = None) -> str:
    """The interpreter of an engine: as said, that of its variable, or this one."""
    return said or os.environ.get(kind.variable()) or sys.executable


def asked(path: str, needed: tuple[str, ...]) -> Interpreter:
    """What an interpreter answers about packages, within so many seconds."""
    program = shutil.which(path)
    if program is None:
        return Interpreter(path=path, needed=needed, problem="there is no such program")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    try:
        done = subprocess.run(  # noqa: S603  the interpreter that the user names
            [program, "-c", ASK, *needed],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment,
            check=True,
        )
        version, packages = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or "no answer"
        return Interpreter(path=path, needed=needed, problem=said.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return Interpreter(path=path, needed=needed, problem=f"{type(error).__name__}: {error}")
    return Interpreter(path=path, needed=needed, version=version, packages=packages)


def missing_engines(engines: Mapping[str, EngineOptions]) -> list[Finding]:
    """The findings that engines, by the names of their instances, cannot start on this machine."""
    wanted: dict[tuple[type[EngineOptions], str], list[str]] = {}
    for name, options in engines.items():
        if options.packages:
            where = type(options), engine_python(type(options), options.python)
            wanted.setdefault(where, []).append(name)
    found = [missing_engine(names, *where) for where, names in wanted.items()]
    return [finding for finding in found if finding is not None]


def missing_engine(names: list[str], kind: type[EngineOptions], path: str) -> Finding | None:
    """The finding that instances of an engine cannot start; None where they can."""
    found = asked(path, kind.packages)
    if not found.problem and not found.missing:
        return None
    lacks = found.problem or f"no package {' and no package '.join(found.missing)} there"
    return Finding(
        code="E250",
        what=f"engine {kind.engine!r} of {' and '.join(names)} cannot start: {lacks}",
        got=found.describe(),
        expected=f"an interpreter with {', '.join(kind.packages)}: python= of {kind.spelled()}, "
        f"or {kind.variable()}",
        fix=kind.install,
    )
