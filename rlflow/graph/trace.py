"""Tracing: a pipeline function runs once, with handles that stand for what will be.

An op called with handles takes from them the fields that its contract names; the
handles' fields make the edges. Findings are collected, never raised, so that one
trace reports everything that is wrong. No op's body runs here.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rlflow.errors import Finding, GraphError, Source, known_names, near_names
from rlflow.graph.fields import LEVEL_NAMES, Field
from rlflow.graph.graph import Binding, Declined, Node
from rlflow.graph.model import Model
from rlflow.graph.op import Input, Op, providers

PACKAGE = str(Path(__file__).resolve().parents[1])


def declared_at() -> Source | None:
    """The nearest line of the call stack that is not rlflow's own or a library's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        library = "site-packages" in path or path.startswith("<")
        if not path.startswith(PACKAGE) and not library:
            text = linecache.getline(path, frame.f_lineno).strip()
            return Source(path=short_path(path), line=frame.f_lineno, text=text)
        frame = frame.f_back
    return None


def raised_at(error: BaseException, path: Path | None) -> Source | None:
    """The deepest line of a user's file that an error passed through."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if path is not None and Path(name).resolve() == path.resolve():
            text = linecache.getline(name, trace.tb_lineno).strip()
            found = Source(path=short_path(name), line=trace.tb_lineno, text=text)
        trace = trace.tb_next
    return found


def short_path(path: str | Path) -> str:
    """A path as the user would type it: relative to the working directory where it is below it."""
    full = Path(path)
    try:
        return str(full.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(full)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A field that a handle offers, under the name it offers it by."""

    name: str
    source: str
    field: Field


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """Stands for what a node makes. Passing it to an op offers all of its fields."""

    node: str
    rows: str | None
    offers: tuple[Offer, ...]

    def rename(self, **names: str) -> Handle:
        """The same handle with fields under other names: `adv.rename(advantages="returns")`."""
        by_old = {old: new for new, old in names.items()}
        unknown = sorted(set(by_old) - {offer.name for offer in self.offers})
        if unknown:
            _current().report(_no_such_field(self, unknown[0]))
        renamed = tuple(
            replace(offer, name=by_old.get(offer.name, offer.name)) for offer in self.offers
        )
        return replace(self, offers=renamed)

    def only(self, *names: str) -> Handle:
        """The same handle with some of its fields: for when two handles offer the same name."""
        missing = [name for name in names if name not in {offer.name for offer in self.offers}]
        if missing:
            _current().report(_no_such_field(self, missing[0]))
        return replace(self, offers=tuple(o for o in self.offers if o.name in names))


def joined(*handles: Handle) -> Handle:
    """The fields of several handles of the same rows; of those of one name the last one's."""
    offers = {offer.name: offer for handle in handles for offer in handle.offers}
    return replace(handles[-1], offers=tuple(offers.values()))


@dataclass(slots=True)
class Trace:
    """What one run of a pipeline function has declared so far, and what is wrong with it."""

    nodes: dict[str, Node] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def report(self, finding: Finding) -> None:
        """Note something that is wrong and go on."""
        self.findings.append(finding)

    def use_model(self, model: Model) -> None:
        """Note that a node uses a model; two models of one name are a finding."""
        known = self.models.setdefault(model.name, model)
        if known is not model:
            self.report(
                Finding(
                    code="E105",
                    what=f"two models are named {model.name!r}",
                    where=model.where,
                    got=f"the first is declared at {known.where}",
                    fix=f'rf.Model("{model.name}_2", ...)',
                )
            )

    def unique_name(self, wanted: str, given: bool) -> str:
        """A name no node has yet: `wanted`, numbered where the user did not give it."""
        if wanted not in self.nodes:
            return wanted
        if given:
            first = self.nodes[wanted]
            self.report(
                Finding(
                    code="E105",
                    what=f"two nodes are named {wanted!r}",
                    where=declared_at(),
                    got=f"the first is declared at {first.where}",
                    fix=f'name="{wanted}_2"',
                )
            )
        number = 2
        while f"{wanted}_{number}" in self.nodes:
            number += 1
        return f"{wanted}_{number}"


_TRACE: ContextVar[Trace | None] = ContextVar("rlflow_trace", default=None)


def _current() -> Trace:
    trace = _TRACE.get()
    if trace is None:
        raise GraphError(
            Finding(
                code="E101",
                what="an op was called outside of a pipeline",
                where=declared_at(),
                expected="ops are called inside a function decorated with @rf.pipeline",
                fix="@rf.pipeline()\ndef my_pipeline(cfg: Config): ...",
            )
        )
    return trace


@contextmanager
def tracing() -> Iterator[Trace]:
    """Collect what ops declare inside the block."""
    trace = Trace()
    reset = _TRACE.set(trace)
    try:
        yield trace
    finally:
        _TRACE.reset(reset)


def report(finding: Finding) -> None:
    """Note a finding in the pipeline that is being traced."""
    _current().report(finding)


def checked_name(name: str) -> str:
    """A name that was given; a finding where it has the sign by which trips are told apart.

    Once for each line of the user's: others are made of that name.
    """
    trace, where = _current(), declared_at()
    known = any(found.code == "E130" and found.where == where for found in trace.findings)
    if "#" in name and not known:
        report(
            Finding(
                code="E130",
                what=f"a name with '#': {name!r}",
                where=where,
                expected="a name without it: trip 2 of a loop calls its copy of node x x#2",
                fix=f'name="{name.replace("#", "_")}"',
            )
        )
    return name


def declared_node(name: str) -> Node:
    """A node declared earlier in the pipeline that is being traced."""
    return _current().nodes[name]


def declared_names() -> list[str]:
    """The nodes declared so far in the pipeline that is being traced, in their order."""
    return list(_current().nodes)


def put_in_loop(name: str, loop: str) -> None:
    """Note that a declared node is in the loop that a node of that name ends."""
    nodes = _current().nodes
    nodes[name] = replace(nodes[name], loop=loop)


def add_node(
    op: Op,
    handles: Sequence[Handle],
    *,
    params: dict[str, Any] | None = None,
    model: Model | None = None,
    name: str | None = None,
    every: int = 1,
    declined: dict[str, str] | None = None,
    beside: Model | None = None,
) -> Handle:
    """Declare a node: bind the op's inputs to the handles' fields and return its handle.

    `declined` maps fields that options leave unread to the reason why; `beside` is a model that the
    node uses besides its own.
    """
    trace = _current()
    where = declared_at()
    for used in (model, beside):
        if used is not None:
            trace.use_model(used)
    wanted = name or (f"{model.name}.{op.name}" if model is not None else op.name)
    if name is not None:
        checked_name(name)
    node_name = trace.unique_name(wanted, given=name is not None)
    offers = _offers(op, handles, where)
    bindings = tuple(
        bound for wants in op.inputs if (bound := _bind(op, node_name, wants, offers, where))
    )
    rows = _row_set(op, node_name, bindings, handles, where)
    node = Node(
        name=node_name,
        op=op,
        inputs=bindings,
        params=tuple((params or {}).items()),
        model=model.name if model is not None else None,
        every=every,
        rows_of=rows,
        declined=tuple(
            Declined(source=offers[name][0].source, field=name, why=why)
            for name, why in (declined or {}).items()
            if name in offers
        ),
        where=where,
    )
    trace.nodes[node_name] = node
    made = tuple(Offer(name=f.name, source=node_name, field=f) for f in op.outputs)
    return Handle(node=node_name, rows=None if op.rows == "none" else rows, offers=made)


def _offers(op: Op, handles: Sequence[Any], where: Source | None) -> dict[str, list[Offer]]:
    offers: dict[str, list[Offer]] = {}
    for handle in handles:
        if not isinstance(handle, Handle):
            report(
                Finding(
                    code="E102",
                    what=f"op {op.name!r} was given something that is not a handle",
                    where=where,
                    got=f"{type(handle).__name__}: {handle!r:.80}",
                    expected="what another op returned",
                )
            )
            continue
        for offer in handle.offers:
            same = offers.setdefault(offer.name, [])
            if offer not in same:
                same.append(offer)
    return offers


def _bind(
    op: Op, node: str, wants: Input, offers: dict[str, list[Offer]], where: Source | None
) -> Binding | None:
    found = offers.get(wants.name, [])
    if not found:
        if wants.required:
            report(_missing(op, node, wants, offers, where))
        return None
    if len(found) > 1:
        sources = [offer.source for offer in found]
        report(
            Finding(
                code="E106",
                what=f"node {node!r} is offered {wants.name!r} more than once",
                where=where,
                got=f"by {' and '.join(sources)}",
                fix=f"pass one of them only, or rename: handle.rename(other={wants.name!r})",
            )
        )
    offer = found[-1]
    if not wants.accepts(offer.field):
        levels = " or ".join(LEVEL_NAMES[level] for level in wants.levels)
        report(
            Finding(
                code="E104",
                what=f"node {node!r} cannot read {wants.name!r} of {offer.source!r}",
                where=where,
                got=str(offer.field),
                expected=f"dtype {wants.dtype}, level {levels}",
                fix=wants.hint,
            )
        )
        return None
    return Binding(name=wants.name, source=offer.source, field=offer.field)


def _missing(
    op: Op, node: str, wants: Input, offers: dict[str, list[Offer]], where: Source | None
) -> Finding:
    if wants.name == "group":
        return Finding(
            code="E109",
            what=f"group op {op.name!r} ({node}) was given rows that are not grouped",
            where=where,
            expected="the samples of a rollout: their field 'group' says which belong together",
            fix="pass the handle that ops.rollout(...) returned",
        )
    made_by = providers(wants.name)
    expected = str(wants)
    if made_by:
        expected += f", made by {' or '.join('ops.' + name for name in made_by)}"
    return Finding(
        code="E103",
        what=f"node {node!r} has no input {wants.name!r}",
        where=where,
        got=f"offered: {known_names(sorted(offers))}",
        expected=expected,
        near=near_names(wants.name, offers),
        fix=wants.hint,
    )


def _row_set(
    op: Op,
    node: str,
    bindings: tuple[Binding, ...],
    handles: Sequence[Any],
    where: Source | None,
) -> str | None:
    rows_of = {h.node: h.rows for h in handles if isinstance(h, Handle)}
    rows_of |= {name: known.rows_of for name, known in _current().nodes.items()}
    used = {binding.source for binding in bindings}
    sets = {rows for name, rows in rows_of.items() if name in used and rows is not None}
    if len(sets) > 1:
        report(
            Finding(
                code="E108",
                what=f"node {node!r} joins rows that do not belong together",
                where=where,
                got=f"rows made by {' and '.join(sorted(sets))}",
                expected="fields of one row set: a rollout makes n rows of its own of each prompt",
            )
        )
    if op.rows in ("new", "expand", "gather"):
        return node
    return min(sets) if sets else None


def _no_such_field(handle: Handle, name: str) -> Finding:
    names = sorted(offer.name for offer in handle.offers)
    return Finding(
        code="E103",
        what=f"node {handle.node!r} makes no field {name!r}",
        where=declared_at(),
        expected=known_names(names),
        near=near_names(name, names),
    )
