"""Tracing: a pipeline function runs once, with handles that stand for what will be.

An op called with handles takes from them the fields that its contract names; the
handles' fields make the edges. Findings are collected, never raised, so that one
trace reports everything that is wrong. No op's body runs here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from rlflow.errors import LONGEST_NAME, Finding, GraphError, Source
from rlflow.graph.fields import Binding, Declined, Field
from rlflow.graph.graph import Node
from rlflow.graph.model import Model
from rlflow.graph.op import Input, Op
from rlflow.graph.rules import handle_findings
from rlflow.graph.rules.counts import Counts
from rlflow.graph.rules.nesting import OF_TRIP
from rlflow.graph.rules.not_offered import missing_input, no_such_field, offered_twice, other_field
from rlflow.graph.source import declared_at


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
    trace: object = field(default_factory=lambda: _TRACE.get(), compare=False, repr=False)

    def __bool__(self) -> bool:
        """No answer: what it stands for is known when the plan runs. Raises GraphError (E658)."""
        raise GraphError(handle_findings.truth(self.node, declared_at()))

    def rename(self, **names: str) -> Handle:
        """The same handle with fields under other names: `adv.rename(advantages="returns")`."""
        by_old = {old: new for new, old in names.items()}
        unknown = sorted(set(by_old) - {offer.name for offer in self.offers})
        if unknown:
            _current().report(self._without(unknown[0]))
        renamed = tuple(
            replace(offer, name=by_old.get(offer.name, offer.name)) for offer in self.offers
        )
        return replace(self, offers=renamed)

    def only(self, *names: str) -> Handle:
        """The same handle with some of its fields, where two handles offer a field of one name."""
        missing = [name for name in names if name not in {offer.name for offer in self.offers}]
        if missing:
            _current().report(self._without(missing[0]))
        return replace(self, offers=tuple(o for o in self.offers if o.name in names))

    def _without(self, name: str) -> Finding:
        return no_such_field(self.node, [o.name for o in self.offers], name, declared_at())


def merged_handles(*handles: Handle) -> Handle:
    """The fields of several handles of the same rows; of those of one name the last one's."""
    offers = {offer.name: offer for handle in handles for offer in handle.offers}
    return replace(handles[-1], offers=tuple(offers.values()))


@dataclass(slots=True)
class _Trace:
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


_TRACE: ContextVar[_Trace | None] = ContextVar("rlflow_trace", default=None)


def _current() -> _Trace:
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
def tracing() -> Iterator[_Trace]:
    """Collect what ops declare inside the block."""
    trace = _Trace()
    reset = _TRACE.set(trace)
    try:
        yield trace
    finally:
        _TRACE.reset(reset)


def report_finding(finding: Finding) -> None:
    """Note a finding in the pipeline that is being traced."""
    _current().report(finding)


def checked_name(name: str) -> str:
    """A name that was given; a finding where it has the sign by which trips are told apart.

    Once for each line of the user's: others are made of that name.
    """
    trace, where = _current(), declared_at()
    if len(name) > LONGEST_NAME:
        report_finding(
            Finding(
                code="E130",
                what=f"a name of {len(name)} letters: {name!r:.60}",
                where=where,
                expected=f"at most {LONGEST_NAME}: files are called by it",
            )
        )
    known = any(found.code == "E130" and found.where == where for found in trace.findings)
    if OF_TRIP in name and not known:
        report_finding(
            Finding(
                code="E130",
                what=f"a name with {OF_TRIP!r}: {name!r}",
                where=where,
                expected="a name without it: trip 2 of a loop calls its copy of node x x#2",
                fix=f'name="{name.replace(OF_TRIP, "_")}"',
            )
        )
    return name


def declared_node(name: str) -> Node:
    """A node declared earlier in the pipeline that is being traced."""
    return _current().nodes[name]


def declared_nodes() -> tuple[Node, ...]:
    """All nodes declared so far in the pipeline that is being traced, in their order."""
    return tuple(_current().nodes.values())


def declared_names() -> list[str]:
    """The nodes declared so far in the pipeline that is being traced, in their order."""
    return list(_current().nodes)


def declared_updates(model: str) -> list[str]:
    """The nodes declared so far that write the weights of a model, in their order."""
    nodes = _current().nodes.values()
    return [node.name for node in nodes if node.model == model and node.op.use == "train"]


def free_name(wanted: str) -> str:
    """A name that no node has, nor those of several nodes that begin with it and a point."""
    taken = {name.partition(".")[0] for name in declared_names()}
    names = (wanted if number == 1 else f"{wanted}_{number}" for number in itertools.count(1))
    return next(name for name in names if name not in taken)


def numbered_name(wanted: str) -> str:
    """The name of a node that was given none."""
    return _current().unique_name(wanted, given=False)


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
    within: tuple[int, int | None] = (0, None),
    declined: dict[str, str] | None = None,
    beside: Model | None = None,
    others: Sequence[Sequence[Handle]] = (),
    counts: Counts | None = None,
) -> Handle:
    """Declare a node: bind the op's inputs to the handles' fields and return its handle.

    `declined` maps fields that options leave unread to the reason why; `beside` is a model that the
    node uses besides its own; `others` are the handles of further row sets that it reads, and
    `counts` the rows that it makes.
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
    parts = (offers, *(_offers(op, other, where) for other in others))
    bindings = tuple(
        bound
        for wants in op.inputs
        if (bound := _bind(op, node_name, wants, parts[wants.part], where))
    )
    for part, other in enumerate(others, start=1):
        _row_set(op, node_name, tuple(b for b in bindings if b.part == part), other, where)
    own = tuple(bound for bound in bindings if not bound.part)
    rows = _row_set(op, node_name, own, handles, where)
    node = Node(
        name=node_name,
        op=op,
        inputs=bindings,
        params=tuple((params or {}).items()),
        model=model.name if model is not None else None,
        every=every,
        within=within,
        rows_of=rows,
        declined=tuple(
            Declined(source=offers[name][0].source, field=name, why=why)
            for name, why in (declined or {}).items()
            if name in offers
        ),
        where=where,
        counts=counts,
    )
    trace.nodes[node_name] = node
    made = tuple(Offer(name=f.name, source=node_name, field=f) for f in op.outputs)
    return Handle(node=node_name, rows=None if op.rows == "none" else rows, offers=made)


def require_handles(op: str, given: Sequence[object]) -> None:
    """Raise GraphError for a list of handles, or handles of another pipeline."""
    where, trace = declared_at(), _current()
    listed = [one for one in given if isinstance(one, list | tuple | set | dict)]
    other = [one for one in given if isinstance(one, Handle) and one.trace is not trace]
    found = [handle_findings.listed(op, type(one).__name__, where) for one in listed]
    found += [handle_findings.foreign(op, one.node, where) for one in other]
    if found:
        raise GraphError(*found)


def _offers(op: Op, handles: Sequence[Any], where: Source | None) -> dict[str, list[Offer]]:
    offers: dict[str, list[Offer]] = {}
    for handle in handles:
        if not isinstance(handle, Handle):
            report_finding(
                Finding(
                    code="E102",
                    what=f"op {op.name!r} was given something that is not a handle",
                    where=where,
                    got=f"{type(handle).__name__}: {handle!r:.80}",
                    expected="what another op returned",
                )
            )
            continue
        if handle.trace is not _current():
            report_finding(handle_findings.foreign(op.name, handle.node, where))
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
            report_finding(missing_input(op, node, wants, sorted(offers), where))
        return None
    if len(found) > 1:
        sources = [offer.source for offer in found]
        report_finding(offered_twice(node, wants.name, sources, where))
    offer = found[-1]
    if not wants.accepts(offer.field):
        report_finding(other_field(node, wants, offer.field, offer.source, where))
        return None
    return Binding(name=wants.name, source=offer.source, field=offer.field, part=wants.part)


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
        report_finding(
            Finding(
                code="E108",
                what=f"node {node!r} joins rows that do not belong together",
                where=where,
                got=f"rows made by {' and '.join(sorted(sets))}",
                expected="fields of one row set: a rollout makes n rows of its own of each prompt",
                fix="ops.concat(a, b) for rows below each other, ops.join(a, b, by=...) for fields",
            )
        )
    if op.rows in ("new", "expand", "gather"):
        return node
    return min(sets) if sets else None
