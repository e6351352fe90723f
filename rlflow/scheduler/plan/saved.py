"""A plan read back from the JSON that `plan -o` writes: what can be compared, not what can be run.

The graph comes back as data, with ops that have no body. A file whose content does not
give the hash that it states is refused.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from rlflow.errors import Finding, UsageError
from rlflow.graph.fields import Binding, Field
from rlflow.graph.graph import Graph, Node
from rlflow.graph.model import Model
from rlflow.graph.op import Op
from rlflow.graph.roles import ALL
from rlflow.graph.rules.counts import Counts
from rlflow.graph.schedule import ALWAYS, Window
from rlflow.graph.user.engine_options import EngineOptions, options_from_json
from rlflow.scheduler.plan.period_range import PeriodRange
from rlflow.scheduler.plan.plan import (
    Action,
    Instance,
    KeptRows,
    LoadedState,
    Note,
    Part,
    Plan,
    SavedState,
    Timing,
)

T = TypeVar("T")
UNITED = (typing.Union, types.UnionType)


def read_plan(path: Path) -> Plan:
    """The plan in a file. Raises UsageError where it cannot be read, or is not a whole plan."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        plan = plan_from_json(document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(_not_a_plan(path, _said(error))) from error
    if plan.hash != document.get("hash"):
        got = f"it states the hash {str(document.get('hash'))[:8]}, its content has {plan.hash[:8]}"
        raise UsageError(_not_a_plan(path, got))
    return plan


def _said(error: Exception) -> str:
    """An error's text, in words of the file rather than of Python."""
    if isinstance(error, OSError):
        return str(error.strerror)
    return f"no {error} in it" if isinstance(error, KeyError) else str(error)


def _not_a_plan(path: Path, got: str) -> Finding:
    return Finding(
        code="E237",
        what=f"{path} is not a saved plan of this version",
        got=got,
        expected="what `rlflow plan -o` wrote, unchanged",
        fix="rlflow plan PIPELINE --placement NAME -o plan.json",
    )


def plan_from_json(document: Mapping[str, Any]) -> Plan:
    """The plan of which `document` is the JSON, with its graph under `declared`.

    Pools are in the order of their devices. Raises KeyError, TypeError or ValueError for
    data of another form.
    """
    pools = {name: tuple(devices) for name, devices in document["pools"].items()}
    return Plan(
        graph=graph_from_json(document["declared"]),
        placement=document["placement"],
        cluster=document["cluster"],
        budgets={int(device): size for device, size in document["budgets"].items()},
        backend=document["backend"],
        staleness=document["staleness"],
        pools=dict(sorted(pools.items(), key=lambda item: (item[1], item[0]))),
        hosts=document["hosts"],
        host_starts=tuple(document["host_starts"]),
        instances=_built(tuple[Instance, ...], document["instances"]),
        parts=_built(tuple[Part, ...], document["parts"]),
        kept=_built(tuple[KeptRows, ...], document.get("kept", ())),
        saved=_built(tuple[SavedState, ...], document.get("saved", ())),
        loads=_built(tuple[LoadedState, ...], document.get("loads", ())),
        pinned=bool(document.get("pinned", False)),
        actions=_built(tuple[Action, ...], document["actions"]),
        awake_at_start=tuple(document["awake_at_start"]),
        peaks={int(device): peak for device, peak in document["peaks"].items()},
        notes=_built(tuple[Note, ...], document["notes"]),
        timing=_built(Timing | None, document["timing"]),
        inputs=tuple(document.get("inputs", ())),
        range=_built(PeriodRange | None, document.get("worlds")),
    )


def _built(kind: Any, value: Any) -> Any:
    """A value of the type that an annotation names, from plain data."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        unknown = set(value) - {each.name for each in fields(kind)}
        if unknown:
            raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
        return kind(**{name: _built(hints[name], held) for name, held in value.items()})
    origin, given = typing.get_origin(kind), typing.get_args(kind)
    if origin in UNITED:
        rest = [each for each in given if each is not type(None)]
        return None if value is None else _built(rest[0], value)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        engine = kind is EngineOptions
        return options_from_json(value) if engine else kind.model_validate(value)
    if origin is tuple:
        if len(given) == 2 and given[1] is Ellipsis:
            return tuple(_built(given[0], each) for each in value)
        return tuple(_built(each, held) for each, held in zip(given, value, strict=True))
    return value


def graph_from_json(document: Mapping[str, Any]) -> Graph:
    """The graph of which `document` is the JSON; its ops have neither a body nor options."""
    return Graph(
        name=document["name"],
        nodes=tuple(_node(node, _sources(document, node["name"])) for node in document["nodes"]),
        models=tuple(_model(model) for model in document["models"]),
        staleness=document["staleness"],
    )


def _model(document: Mapping[str, Any]) -> Model:
    options = {key: value for key, value in document.items() if key not in ("name", "path")}
    return Model(document["name"], document["path"], **options)


def _sources(graph: Mapping[str, Any], node: str) -> list[str]:
    """The nodes that feed a node, in the order of its edges."""
    edges: Sequence[Mapping[str, Any]] = graph["edges"]
    return [edge["source"] for edge in edges if edge["target"] == node and edge["kind"] == "data"]


def _node(document: Mapping[str, Any], sources: list[str]) -> Node:
    bindings = []
    for name, reference in document["inputs"].items():
        part, named, own = name.rpartition(":")
        for each in [reference] if isinstance(reference, str) else reference:
            source, _, field = each.rpartition(".")
            made = Field(name=field, dtype="float32", level="row")
            number = int(part) if named else 0
            bindings.append(Binding(name=own, source=source, field=made, part=number))
    bindings.sort(key=lambda b: (sources.index(b.source), b.part, b.name))
    samples = document["use"] == "rollout" and document["op"] not in ("evaluate", "act")
    op = Op(
        name=document["op"],
        body="",
        inputs=(),
        outputs=tuple(_field(text) for text in document["outputs"]),
        per=document["per"],
        recalls=document.get("recalls", False),
        use=document["use"],
        rows="expand" if samples and "resumes" not in document["params"] else "same",
        effect=document.get("effect", "pure"),
        roles=ALL,
    )
    trip = document.get("trip")
    return Node(
        name=document["name"],
        op=op,
        inputs=tuple(bindings),
        params=tuple(document["params"].items()),
        model=document["model"],
        every=document["every"],
        within=_window(document),
        loop=document.get("loop"),
        trip=(trip[0], trip[1]) if trip is not None else None,
        counts=Counts.from_data(document["counts"]) if "counts" in document else None,
    )


def _window(document: Mapping[str, Any]) -> Window:
    start, stop = document.get("within", ALWAYS)
    return start, stop


def _field(text: str) -> Field:
    """A field from its printed form: `top_ids:int64[token,8|response_mask]`."""
    name, _, rest = text.partition(":")
    dtype, _, level = rest.rstrip("]").partition("[")
    level, _, mask = level.partition("|")
    level, _, width = level.partition(",")
    kinds: Any = {"dtype": dtype, "level": level, "width": int(width) if width else None}
    return Field(name=name, mask=mask or None, **kinds)
