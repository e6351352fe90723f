"""The operators that make a row set of others: rows below each other.

Contracts only: what each reads and makes, and how many rows. The bodies are in
`rlflow.ops.bodies.rows.sets`; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from rlflow.errors import Finding, known_names, near_names
from rlflow.graph.fields import Field, row
from rlflow.graph.graph import Graph
from rlflow.graph.op import Input, Op, providers, register
from rlflow.graph.roles import SamplingOptions
from rlflow.graph.rules.check import row_counts
from rlflow.graph.rules.counts import Counts
from rlflow.graph.source import declared_at
from rlflow.graph.trace import (
    Handle,
    Offer,
    add_node,
    declared_node,
    declared_nodes,
    report_finding,
)

Groups = Literal["apart", "shared"]
Rows = Handle | Sequence[Handle]
Value = float | int | bool

CONCAT = register(
    Op(
        name="concat",
        body="rlflow.ops.bodies.rows.sets:concat",
        roles=(SamplingOptions,),
        inputs=(),
        outputs=(),
        per="batch",
        rows="gather",
        dispatch="first",
        hands_on=True,
    )
)
GROUP = row("group", "int64")
NUMBERED = ("group", "sample")
# Options of a rollout that say what its rows are like: the largest, or the same of all.
LARGEST, ALIKE = ("max_new_tokens", "max_tokens"), ("temperature", "ignore_eos")
PYTHON = {"float32": (int, float), "int64": (int,), "bool": (bool,)}


def concat(
    *sources: Rows,
    groups: Groups = "apart",
    fill: Mapping[str, Value] | None = None,
    name: str | None = None,
) -> Handle:
    """The rows of several row sets below each other, with the fields that all sets have.

    Each source is a handle, or several handles of the same rows: `concat((samples, adv), demos)`.
    A field has the same dtype, level and mask in every source. Its values stay as they are, so
    `version` and `rollout_log_probs` are still those of the weights that sampled each row. `fill`
    gives a number for a field that some sources lack: they have it in each row or response token.

    `group` int64 is made anew. With `groups="apart"` no group has rows of two sources, and a row
    in no group is a group of its own. With "shared", for sources that draw from the same rows of
    the same prompts, rows of one prompt are one group and stand together. `sample` int64 numbers
    the rows anew. Where no source has a group, neither does the result.
    """
    given = [_as_handles(source) for source in sources]
    offers = [{o.name: o for handle in part for o in handle.offers} for part in given]
    found = _wrong_sources(given, offers, name)
    fields = _common(offers, fill or {}, found)
    if groups not in get_args(Groups):
        expected = " or ".join(map(repr, get_args(Groups)))
        found.append(_misused("E118", f"a concat with groups={groups!r}", expected))
    elif groups == "shared":
        found += _not_shared(given, offers)
    for finding in found:
        report_finding(finding)
    if found:
        handle = next((part[0] for part in given if part), None)
        return Handle(node="concat", rows=None, offers=()) if handle is None else handle
    needed = {"group"} if groups == "shared" else set()
    if any(f.level == "token" and f.name in (fill or ()) for f in fields):
        needed.add("response_tokens")
    inputs = tuple(
        Input(
            name=f.name,
            dtype=f.dtype,
            levels=(f.level,),
            required=f.name in needed,
            part=part,
        )
        for part, offered in enumerate(offers)
        for f in fields
        if f.name in offered
    )
    op = replace(CONCAT, inputs=inputs, outputs=fields)
    counts = joined_counts([declared_counts(part[0]) for part in given], shared=groups == "shared")
    params: dict[str, Any] = {"groups": groups} if groups != "apart" else {}
    params |= {"fill": Fill(values=tuple(sorted(fill.items())))} if fill else {}
    params |= sampled(offers)
    return add_node(op, given[0], others=given[1:], params=params, counts=counts, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """The numbers that fields have where a source lacks them, by name."""

    values: tuple[tuple[str, Value], ...] = ()

    def describe(self) -> str:
        """The printed form."""
        return ", ".join(f"{name} {value:g}" for name, value in self.values)


def joined_counts(parts: Sequence[Counts], *, shared: bool) -> Counts:
    """The counts of several row sets below each other; shared groups have rows of all of them."""
    rows = sum(part.rows for part in parts)
    expected = sum((part.rows * part.expected for part in parts), Fraction()) / max(rows, 1)
    groups = [part.groups for part in parts]
    least = [part.least for part in parts]
    return Counts(
        groups=max(groups) if shared else sum(groups),
        rows=rows,
        least=max(least) if shared else sum(least),
        expected=expected,
    )


def declared_counts(handle: Handle) -> Counts:
    """How many rows a handle's node works on, as declared so far."""
    graph = Graph(name="", nodes=declared_nodes(), models=())
    found = row_counts(graph, graph.node(handle.node))
    return found or Counts(groups=1, rows=1, least=1)


def sampled(offers: Sequence[Mapping[str, Offer]]) -> dict[str, Any]:
    """What the rows of several sources are like: options of who made their responses."""
    made = [o["response_tokens"].source for o in offers if "response_tokens" in o]
    params = [dict(declared_node(source).params) for source in made]
    found = {key: max(p[key] for p in params if key in p) for key in LARGEST if _any(key, params)}
    for key in ALIKE:
        values = {p[key] for p in params if key in p}
        if len(values) == 1 and (key == "temperature" or all(key in p for p in params)):
            found[key] = values.pop()
    return found


def _any(key: str, params: Sequence[Mapping[str, Any]]) -> bool:
    return any(key in each for each in params)


def _as_handles(source: object) -> tuple[Handle, ...]:
    """The handles of one source; what is none is left out, and found missing."""
    given = source if isinstance(source, list | tuple) else (source,)
    return tuple(handle for handle in given if isinstance(handle, Handle))


def _misused(code: str, what: str, expected: str, got: str = "", fix: str = "") -> Finding:
    return Finding(code=code, what=what, where=declared_at(), got=got, expected=expected, fix=fix)


def _wrong_sources(
    given: Sequence[tuple[Handle, ...]], offers: Sequence[Mapping[str, Offer]], name: str | None
) -> list[Finding]:
    """E150 for fewer than two sources, one that is no handle, or one without rows."""
    what = f"op 'concat'{f' ({name})' if name else ''}"
    fix = "ops.concat(first, second), or ops.concat((first, adv), second)"
    if len(given) < 2 or not all(given):
        wrong = [str(number) for number, part in enumerate(given, start=1) if not part]
        got = f"{len(given)} sources" if not wrong else f"source {wrong[0]} is no handle"
        expected = "two row sets or more, each a handle or a tuple of handles of the same rows"
        return [_misused("E150", f"{what} has nothing to join", expected, got, fix)]
    empty = [part[0].node for part in given if all(handle.rows is None for handle in part)]
    if empty:
        got = f"{empty[0]} makes no rows"
        return [_misused("E150", f"{what} joins rows", "what an op with rows returned", got, fix)]
    for part in given:
        sets = sorted({handle.rows for handle in part if handle.rows is not None})
        if len(sets) > 1:
            got = f"one source with rows made by {' and '.join(sets)}"
            return [_misused("E150", f"{what} is given rows that differ as one source", fix, got)]
    return []


def _common(
    offers: Sequence[Mapping[str, Offer]], fill: Mapping[str, Value], found: list[Finding]
) -> tuple[Field, ...]:
    """The fields that all sources have, or are filled; adds what is wrong with them."""
    if not offers or found:
        return ()
    names = dict.fromkeys(name for offered in offers for name in offered)
    fields = []
    for name in names:
        having = [offered[name].field for offered in offers if name in offered]
        if len(having) < len(offers) and name not in fill and name not in NUMBERED:
            continue
        first, *others = having
        for other in others:
            if _type(other) != _type(first):
                found.append(_of_two_types(name, first, other))
                break
        if name not in NUMBERED:
            fields.append(replace(first, name=name))
    for name, value in fill.items():
        found += _wrong_fill(name, value, offers)
    numbered = [GROUP] if "group" in names else []
    numbered += [row("sample", "int64")] if all("sample" in o for o in offers) else []
    if not fields and not found:
        got = "\n".join(known_names(sorted(offered)) for offered in offers)
        expected = "a field that all of them have, by name"
        found.append(
            _misused("E150", "op 'concat' joins rows without a common field", expected, got)
        )
    return (*fields, *numbered)


def _type(field: Field) -> tuple[object, ...]:
    return field.dtype, field.level, field.mask, field.width


def _of_two_types(name: str, first: Field, other: Field) -> Finding:
    return _misused(
        "E151",
        f"op 'concat' is offered {name!r} as two kinds of field",
        "one dtype, level, mask and width",
        f"{first} and {other}",
        f'leave it out: handle.only(...), or rename it: handle.rename(other="{name}")',
    )


def _wrong_fill(name: str, value: object, offers: Sequence[Mapping[str, Offer]]) -> list[Finding]:
    """E152 for a filled field that none lacks or has, is text, or is of another type."""
    having = [offered[name].field for offered in offers if name in offered]
    what = f"op 'concat' cannot fill {name!r} with {value!r}"
    names = sorted({each for offered in offers for each in offered})
    if not having:
        near = near_names(name, names)
        made = [f"ops.{op}" for op in providers(name)]
        expected = "a field that a source has" + (f", made by {' or '.join(made)}" if made else "")
        finding = _misused("E152", what, expected, f"offered: {known_names(names)}")
        return [replace(finding, near=near)]
    kinds = PYTHON.get(having[0].dtype, ())
    fits = isinstance(value, kinds) and (isinstance(value, bool) == (kinds == (bool,)))
    if name in NUMBERED or not fits:
        expected = f"a number for {having[0]}, not text, and neither group nor sample"
        return [_misused("E152", what, expected)]
    if len(having) == len(offers):
        return [_misused("E152", what, "a field that a source lacks", "every source has it")]
    alone = having[0].level == "token" and not all("response_tokens" in o for o in offers)
    if alone or having[0].width is not None:
        got = f"{having[0]}, and a source without response_tokens" if alone else str(having[0])
        return [_misused("E152", what, "a row field, or one value a response token", got)]
    return []


def _not_shared(
    given: Sequence[tuple[Handle, ...]], offers: Sequence[Mapping[str, Offer]]
) -> list[Finding]:
    """E153 for sources whose groups are not samples of the same prompts."""
    what = "op 'concat' has groups='shared', and its sources do not share groups"
    expected = "rollouts of the same prompts, in one iteration"
    graph = Graph(name="", nodes=declared_nodes(), models=())
    drawn = []
    for part, offered in zip(given, offers, strict=True):
        maker = graph.node(str(part[0].rows))
        if "group" not in offered or maker.op.rows != "expand":
            got = f"rows of {maker.name}, which draws no samples of prompts"
            return [_misused("E153", what, expected, got, 'groups="apart"')]
        drawn.append((maker.name, graph.node(maker.sources[0]).rows_of))
    if len({prompts for _, prompts in drawn}) > 1:
        got = "\n".join(f"{maker} draws of the rows of {prompts}" for maker, prompts in drawn)
        return [_misused("E153", what, expected, got, 'groups="apart"')]
    return []
