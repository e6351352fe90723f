"""What a run that goes on shares with the one that saved, and what of it may change when said.

Compares two graphs as `graph.json` has them, value by value. Weights, moments and counters have
to fit; a learning rate, a coefficient or an evaluation may be another from here on.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlflow.errors import CheckpointError, Finding, near_names
from rlflow.graph.cut.whole import whole_rollouts
from rlflow.graph.rules.nesting import keeps_surplus
from rlflow.runtime.record.identity.digests import comparable, differing_parts, is_digest

if TYPE_CHECKING:
    from rlflow.scheduler.plan.plan import Plan

NOTHING = "nothing"
# Values that decide what a batch looks like, or what a checkpoint has to hold.
SHAPES = frozenset({"batch", "n", "max_new_tokens"})
WIRED = ("op", "per", "use", "model", "outputs", "loop", "trip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One value by its path, before and now; `fixed` where no run can go on with another."""

    path: str
    before: str
    now: str
    fixed: bool = False

    def line(self) -> str:
        """The change as it is printed."""
        return f"{self.path}: {self.before} -> {self.now}"

    def named(self, names: Iterable[str]) -> bool:
        """Whether one of the names is the path or the end of it."""
        return any(name == self.path or self.path.endswith(f".{name}") for name in names)


def identity_of(
    plan: Plan,
    *,
    seed: int,
    threads: int,
    save_every: int,
    torch: str,
    digests: Mapping[str, str],
) -> dict[str, str]:
    """What a resumed run has to share with the one that saved: what decides its numbers.

    `digests` are those of data, of functions and of models' files.

    Where rollouts run ahead, those after a checkpoint start on the newest weights; what a loop
    leaves over is dropped there.
    """
    known = {
        "graph": whole_rollouts(plan.graph).hash,
        "seed": str(seed),
        "torch": torch,
        "threads": str(threads),
    }
    return {**digests, **known} | ({"save_every": str(save_every)} if drains(plan) else {})


def drains(plan: Plan) -> bool:
    """Whether checkpoints change what comes after them, so that where they are is part of a run."""
    return bool(plan.staleness) or keeps_surplus(plan.graph)


def changes_of(
    saved: Mapping[str, str],
    now: Mapping[str, str],
    graphs: tuple[Mapping[str, Any], Mapping[str, Any]] | None,
) -> tuple[Change, ...]:
    """Everything that differs between two identities; `graphs` are theirs, None where unknown."""
    found = []
    saved, now = comparable(saved, now)
    for key in sorted({*saved, *now}):
        pair = saved.get(key, NOTHING), now.get(key, NOTHING)
        if pair[0] == pair[1]:
            continue
        if key == "graph" and graphs is not None:
            found += graph_changes(*graphs)
        elif is_digest(key):
            before, after = differing_parts(*pair)
            found.append(Change(path=key, before=before, now=after))
        else:
            found.append(Change(path=key, before=pair[0], now=pair[1], fixed=key == "graph"))
    return tuple(found)


def graph_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What differs between two graphs: of models, of nodes, of how far rollouts run ahead."""
    return [
        *_differing("", {"staleness": before["staleness"]}, {"staleness": now["staleness"]}),
        *_models(_named(before["models"]), _named(now["models"])),
        *_nodes(_named(before["nodes"]), _named(now["nodes"])),
    ]


def _named(items: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {str(item["name"]): item for item in items}


def _models(
    before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> Iterator[Change]:
    """Frozen models may come and go; of a trained one, how it is trained may change."""
    for name in dict.fromkeys([*before, *now]):
        one, other = before.get(name), now.get(name)
        if one is None or other is None:
            held = one or other or {}
            trained = held.get("optimizer") is not None or held.get("averaged") is not None
            yield _there(name, one, trained)
            continue
        trained = one["optimizer"] is not None or other["optimizer"] is not None
        for change in _differing(name, _flat(one), _flat(other)):
            how = change.path.startswith(f"{name}.optimizer.") and not _another_kind(change)
            yield _fixed(change) if trained and not how else change


def _another_kind(change: Change) -> bool:
    """Whether one run has Muon and the other AdamW, or moments in 8 bits, and the other has not."""
    pair = change.before, change.now
    coded = change.path.endswith(".optimizer.moments") and "int8" in pair
    return coded or (change.path.endswith(".optimizer.momentum") and NOTHING in pair)


def _nodes(
    before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> Iterator[Change]:
    """Evaluations and forwards may come and go; what samples or trains has to stay."""
    for name in dict.fromkeys([*before, *now]):
        one, other = before.get(name), now.get(name)
        if one is None or other is None:
            held = one or other or {}
            kept = held["op"] != "evaluate" and (
                held["use"] in {"train", "rollout"} or held["op"] == "prompts"
            )
            yield _there(name, one, kept)
            continue
        looks = one["op"] == "evaluate"
        yield from _differing(name, _wiring(one), _wiring(other), fixed=True)
        yield from _differing(name, {"every": one["every"]}, {"every": other["every"]})
        yield from _differing(name, one["inputs"], other["inputs"])
        for change in _differing(name, _values(one["params"]), _values(other["params"])):
            shape = change.path.rpartition(".")[2] in SHAPES and not looks
            yield _fixed(change) if shape else change


def _wiring(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: node[key] for key in WIRED if key in node}


def _there(name: str, before: object, fixed: bool) -> Change:
    there = ("declared", NOTHING)
    one, other = there if before is not None else reversed(there)
    return Change(path=name, before=one, now=other, fixed=fixed)


def _fixed(change: Change) -> Change:
    return Change(path=change.path, before=change.before, now=change.now, fixed=True)


def _differing(
    prefix: str, before: Mapping[str, Any], now: Mapping[str, Any], *, fixed: bool = False
) -> Iterator[Change]:
    for key in dict.fromkeys([*before, *now]):
        pair = before.get(key, NOTHING), now.get(key, NOTHING)
        if pair[0] != pair[1]:
            path = f"{prefix}.{key}" if prefix else key
            yield Change(path=path, before=str(pair[0]), now=str(pair[1]), fixed=fixed)


def _flat(model: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a model, those of its optimizer by their own names."""
    found = {key: value for key, value in model.items() if key != "optimizer"}
    spec = model["optimizer"]
    if not isinstance(spec, Mapping):
        return found | {"optimizer": spec or NOTHING}
    return found | {f"optimizer.{key}": value for key, value in spec.items()}


def _values(params: Mapping[str, str]) -> dict[str, str]:
    """Parameters by name; `Loss(kind, a=1)` by the names in its brackets as well."""
    found: dict[str, str] = {}
    for key, text in params.items():
        found |= {f"{key}{name}": value for name, value in _parts(text)}
    return found


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """What a value is made of, if it is printed as a call: its name and first words, then names."""
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        call = None
    if not isinstance(call, ast.Call):
        yield "", text
        return
    words = ", ".join(map(ast.unparse, call.args))
    yield "", f"{ast.unparse(call.func)}({words})"
    for keyword in call.keywords:
        yield f".{keyword.arg}", ast.unparse(keyword.value)


def require_allowed(where: str, changes: Sequence[Change], allowed: Sequence[str]) -> None:
    """Raise CheckpointError E721 for changes that nobody allowed, or that none can allow.

    Raises E313 for an allowed name that is none of those that changed.
    """
    fixed = [change for change in changes if change.fixed]
    wanted = [change for change in changes if not change.fixed and not change.named(allowed)]
    if fixed or wanted:
        names = dict.fromkeys([*allowed, *(change.path.rpartition(".")[2] for change in wanted)])
        ways = [] if fixed else [f"--allow-changes {','.join(names)}"]
        raise CheckpointError(
            Finding(
                code="E721",
                what=f"{where} was saved by a run with other values",
                got="\n".join(change.line() for change in changes),
                expected="the values as saved"
                + (
                    f"; {', '.join(change.path for change in fixed)} cannot change" if fixed else ""
                ),
                fix="\n".join([*ways, f"--from-weights {where}, to begin a new run"]),
            )
        )
    unknown = [name for name in allowed if not any(change.named([name]) for change in changes)]
    if unknown and changes:
        paths = [change.path for change in changes]
        raise CheckpointError(
            Finding(
                code="E313",
                what=f"--allow-changes {','.join(unknown)}: nothing of that name has changed",
                got="\n".join(change.line() for change in changes),
                near=near_names(unknown[0], [path.rpartition(".")[2] for path in paths]),
            )
        )
