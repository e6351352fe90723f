"""`rlflow doctor`: what is installed, what is missing, and what to type.

Looks at package metadata and the PATH, and runs one program in a jail; imports nothing heavy.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rlflow.cli.interpreters import asked, engine_python
from rlflow.errors import RewardError
from rlflow.graph.user.engine_options import EngineOptions, registered_engines
from rlflow.rewards.sandbox import walls_here
from rlflow.scheduler.devices.cluster import GB, machine_cores, machine_memory
from rlflow.scheduler.devices.machine import chosen_text, machine_gpus

REQUIRED = (
    "torch",
    "transformers",
    "tensordict",
    "safetensors",
    "numpy",
    "networkx",
    "pydantic",
    "graphviz",
    "click",
    "rich",
    "matplotlib",
    "tensorboard",
    "pyarrow",
    "ray",
)
OPTIONAL = {
    "datasets": "pip install -e '.[datasets]'",
    "pygraphviz": "pip install pygraphviz",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sought:
    """One thing that was looked for."""

    name: str
    found: str
    required: bool = True
    missing: bool = False
    fix: str = ""

    def line(self) -> str:
        """The row as it is printed."""
        state = "missing" if self.missing else "ok"
        fix = f"   type: {self.fix}" if self.missing else ""
        return f"{state:<8} {self.name:<14} {self.found}{fix}"

    def as_json(self) -> dict[str, Any]:
        """The row as plain data."""
        return asdict(self)


def examine() -> list[Sought]:
    """Look for everything; rows in a fixed order."""
    engines = [_engine(kind) for kind in registered_engines() if kind.packages]
    return [*_machine(), *_packages(), _drawing(), *engines]


def _machine() -> Iterator[Sought]:
    version = platform.python_version()
    yield Sought(
        name="python",
        found=version,
        missing=sys.version_info < (3, 11),
        fix="install Python 3.11 or later",
    )
    yield Sought(name="machine", found=f"{machine_cores()} cores, {machine_memory() / GB:.0f} GB")
    yield Sought(name="gpu", found=chosen_text(machine_gpus()), required=False)
    yield _jail()


def _jail() -> Sought:
    """What a model's programs would run in, tried by running one."""
    fix = "apt install bubblewrap, or allow user namespaces that need no privilege"
    try:
        found, missing = walls_here().describe(), False
    except RewardError as error:
        found, missing = error.findings[0].got, True
    return Sought(name="programs in", found=found, required=False, missing=missing, fix=fix)


def _packages() -> Iterator[Sought]:
    for name in (*REQUIRED, *OPTIONAL):
        fix = OPTIONAL.get(name, f"pip install -c constraints.txt {name}")
        try:
            yield Sought(name=name, found=importlib.metadata.version(name), fix=fix)
        except importlib.metadata.PackageNotFoundError:
            yield Sought(
                name=name, found="not installed", required=name in REQUIRED, missing=True, fix=fix
            )


def _drawing() -> Sought:
    program = shutil.which("dot")
    if program:
        return Sought(name="drawing", found=program)
    wheel = importlib.util.find_spec("pygraphviz") is not None
    return Sought(
        name="drawing",
        found="pygraphviz" if wheel else "neither dot nor pygraphviz",
        missing=not wheel,
        fix="pip install pygraphviz",
    )


def _engine(kind: type[EngineOptions]) -> Sought:
    """What an engine would start with: an interpreter, and packages there."""
    found = asked(engine_python(kind), kind.packages)
    return Sought(
        name=f"engine {kind.engine}",
        found=found.describe(),
        required=False,
        missing=bool(found.problem or found.missing),
        fix=kind.install,
    )
