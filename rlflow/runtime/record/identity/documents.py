"""The JSON files of a run directory, read back: anything of another form is damage.

A form has what is read; a file of another version may have more in it. Types are strict: a figure
is no text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlflow.errors import Finding, RunDirError
from rlflow.scheduler.plan.plan import ActionKind, Mode

Count = Field(ge=0)


class _Form(BaseModel):
    """What is read is there and of its type; what is not read may be anything."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Edge(_Form):
    source: str
    target: str
    kind: str
    distance: int
    reason: str


class _Node(_Form):
    name: str
    op: str
    model: str | None
    use: str | None
    every: int = Field(ge=1)
    inputs: dict[str, str | list[str]]
    outputs: list[str]
    params: dict[str, str]
    loop: str | None = None
    trip: list[int] | None = Field(None, min_length=2)
    within: list[Any] = Field([0, None], min_length=2, max_length=2)


class _Model(_Form):
    name: str
    path: str
    dtype: str


class _Headline(_Form):
    training: list[str]
    held_out: list[str]


class GraphForm(_Form):
    """graph.json."""

    name: str
    staleness: int
    nodes: list[_Node]
    models: list[_Model]
    edges: list[_Edge]
    headline: _Headline | None = None

    @model_validator(mode="after")
    def _names_are_of_nodes(self) -> Self:
        names = {node.name for node in self.nodes}
        _known("a node", names, (end for e in self.edges for end in (e.source, e.target)))
        _known("a node", names, (node.loop for node in self.nodes if node.loop is not None))
        _known("a model", {m.name for m in self.models}, (n.model for n in self.nodes if n.model))
        return self


class _Dep(_Form):
    action: str
    distance: int
    kind: str


class _Reason(_Form):
    rule: str
    text: str


class _Cost(_Form):
    seconds: float | None
    moved: int | None
    source: str


class _Chunk(_Form):
    count: int


class _Trip(_Form):
    loop: str
    index: int
    within: _Trip | None = None


class _Action(_Form):
    id: str
    kind: ActionKind
    reason: _Reason
    devices: list[int] = Field(min_length=1)
    pool: str
    after: list[_Dep]
    node: str | None
    instance: str | None
    targets: list[str]
    part: str | None
    mode: Mode | None
    fields: list[str]
    cost: _Cost
    peak: int | None
    ahead: int
    every: int = Field(ge=1)
    chunk: _Chunk | None = None
    begins: bool = False
    trip: _Trip | None = None

    @model_validator(mode="after")
    def _a_reshard_fills_something(self) -> Self:
        if self.kind == "reshard" and not self.targets:
            raise ValueError(f"{self.id} fills no instance")
        return self


class _Instance(_Form):
    name: str
    model: str


class _Timing(_Form):
    period: float


class PlanForm(_Form):
    """plan.json."""

    pipeline: str
    placement: str
    cluster: str
    backend: Literal["local", "ray"]
    pools: dict[str, list[int]]
    budgets: dict[str, int]
    peaks: dict[str, int]
    instances: list[_Instance]
    actions: list[_Action]
    notes: list[_Reason]
    timing: _Timing | None
    declared: GraphForm | None = None

    @model_validator(mode="after")
    def _names_are_of_actions(self) -> Self:
        names = [action.id for action in self.actions]
        if len(names) != len(set(names)):
            raise ValueError("two actions of one id")
        _known("an action", set(names), (dep.action for a in self.actions for dep in a.after))
        return self


class _Git(_Form):
    commit: str
    dirty: bool


class RunForm(_Form):
    """run.json."""

    name: str
    pipeline: str
    command: list[str]
    started: str
    again: list[str] | None = None
    git: _Git | None = None
    versions: dict[str, str | None] | None = None
    record: list[str] | None = None


class _Products(_Form):
    body: int = Count
    head: int = Count
    head_dim: int = Count
    heads: int = Count
    layers: int = Count


class PeaksForm(_Form):
    """peaks.json."""

    products: dict[str, _Products] = {}
    dtypes: dict[str, str] = {}
    flops: float | None = Field(None, gt=0)
    flops32: float | None = Field(None, gt=0)


FORMS: dict[str, type[_Form]] = {
    "graph.json": GraphForm,
    "plan.json": PlanForm,
    "run.json": RunForm,
    "peaks.json": PeaksForm,
}


def read_document(path: Path) -> dict[str, Any] | None:
    """A JSON file of a run directory; None where it is not there. RunDirError E714 if damaged."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise damaged(path, str(error)) from error
    if not isinstance(found, dict):
        raise damaged(path, f"a {type(found).__name__} at the top")
    if wrong := _wrong_in(path.name, found):
        raise damaged(path, wrong)
    return found


def damaged(path: Path, got: str) -> RunDirError:
    """The error for a file that is not what was written."""
    return RunDirError(
        Finding(
            code="E714",
            what=f"{path} is damaged",
            got=got,
            fix=f"move {path} away; the rest of the run is still read",
        )
    )


def _wrong_in(name: str, document: object) -> str:
    """The first thing that is not as a file of this name has it; empty where all is."""
    form = FORMS.get(name)
    if form is None:
        return ""
    try:
        form.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}" if place else first["msg"]
    return ""


def _known(what: str, names: set[str], named: Iterable[str]) -> None:
    """Raise ValueError for a name that is none."""
    for name in named:
        if name not in names:
            raise ValueError(f"{name!r} is not {what}")
