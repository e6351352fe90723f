"""Bodies of pass rates: what is measured of each bucket, and the prompts drawn by it.

The state that both share holds, of the last few versions, how many samples of a bucket were seen
and passed (`seen/V/B`, `passed/V/B`), and how many of its rows were drawn (`drawn/B`). Version V
is what the iterations before V have measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum

from torch import Tensor

from rlflow.batch import strings
from rlflow.contract.values import Stat
from rlflow.data.buckets import draw_rows, drawn_buckets, shared_out
from rlflow.data.sources import ROW_ID
from rlflow.errors import DataError, Finding, RunError
from rlflow.ops.bodies.data import fields_of
from rlflow.ops.bodies.finite import finite_inputs
from rlflow.ops.body import Call, Output
from rlflow.ops.loops.curriculum import PassRates

State = dict[str, float]
SEEN, PASSED, DRAWN, NEWEST, OLDEST = "seen", "passed", "drawn", "newest", "oldest"
MOST_BUCKETS = 10_000
MOST_LOGGED = 20


def prompts_by_pass_rate(call: Call) -> Output:
    """Rows of buckets in proportion to what their pass rates are worth."""
    spec, data, size = call.params["weights"], call.params["data"], call.params["batch"]
    names = list(data.buckets(spec.by))
    if len(names) > MOST_BUCKETS:
        raise DataError(_too_many(call, spec, len(names)))
    version = version_read(call.state, call.iteration - call.staleness)
    rates = [pass_rate(spec, call.state, version, name) for name in names]
    shares = shared_out([worth(spec, rate) for rate in rates], spec.floor)
    places = drawn_buckets(shares, size, seed=call.seed, draw=call.drawn)
    taken = {name: int(call.state.get(f"{DRAWN}/{name}", 0)) for name in names}
    rows, counts = draw_rows(data, spec.by, [names[k] for k in places], taken, call.seed)
    call.state.update({f"{DRAWN}/{name}": float(count) for name, count in counts.items()})
    return Output(
        fields=fields_of(call, rows).fields,
        rows=len(rows),
        metrics=_logged("rate", names, rates) | _logged("share", names, shares),
    )


def track(call: Call) -> Output:
    """Write the next version of the pass rates: those before it, and the rewards of these rows."""
    spec, inputs = call.params["weights"], finite_inputs(call)
    by, reward = inputs[spec.by], inputs["reward"]
    keys = [str(key) for key in by.tolist()] if spec.by == ROW_ID else strings(by)
    found: dict[str, list[float]] = {}
    for key, part in zip(keys, passed_of(call, spec, reward), strict=True):
        found.setdefault(key, []).append(part)
    begin_version(call.state, call.iteration + 1, kept=call.staleness + 2)
    for key, parts in found.items():
        seen, passed = (f"{kind}/{call.iteration + 1}/{key}" for kind in (SEEN, PASSED))
        call.state[seen] = spec.decay * call.state.get(seen, 0.0) + len(parts)
        call.state[passed] = spec.decay * call.state.get(passed, 0.0) + fsum(parts)
    metrics: dict[str, float | Stat] = {}
    if len(reward):
        metrics["passed"] = Stat(
            kind="mean", total=fsum(p for parts in found.values() for p in parts), count=len(reward)
        )
    for key, parts in sorted(found.items()) if len(found) <= MOST_LOGGED else ():
        metrics[f"passed/{key}"] = Stat(kind="mean", total=fsum(parts), count=len(parts))
    return Output(metrics=metrics)


def passed_of(call: Call, spec: PassRates, reward: Tensor) -> list[float]:
    """How far each sample passes, from 0 to 1; raises RunError for a reward that does not say."""
    values: list[float] = reward.tolist()
    if spec.threshold is not None:
        return [float(value >= spec.threshold) for value in values]
    for row, value in enumerate(values):
        if not 0 <= value <= 1:
            raise RunError(
                Finding(
                    code="E647",
                    what=f"{call.node}: a reward of {value:g} is no part of a pass",
                    where=call.where,
                    got=f"row {row} of {len(values)}",
                    expected="rewards from 0 to 1, or a threshold above which a sample passes",
                    fix=f'rf.PassRates("{spec.name}", threshold=1.0)',
                )
            )
    return values


def begin_version(state: State, version: int, *, kept: int) -> None:
    """Let a version begin as the newest has ended, if it is not that, and drop all but the last."""
    newest = int(state.get(NEWEST, 0))
    for key, value in list(state.items()):
        kind, _, rest = key.partition("/")
        if kind not in (SEEN, PASSED):
            continue
        of, _, bucket = rest.partition("/")
        if int(of) == newest:
            state[f"{kind}/{version}/{bucket}"] = value
        if int(of) <= version - kept:
            del state[key]
    state[NEWEST] = float(version)
    state[OLDEST] = float(max(version - kept + 1, int(state.get(OLDEST, 0))))


def version_read(state: Mapping[str, float], wanted: int) -> int:
    """The version that an iteration reads: version 0 before the first, or the oldest there is."""
    return max(wanted, int(state.get(OLDEST, 0)), 0)


def pass_rate(spec: PassRates, state: Mapping[str, float], version: int, bucket: str) -> float:
    """The pass rate of a bucket in a version."""
    seen = state.get(f"{SEEN}/{version}/{bucket}", 0.0)
    passed = state.get(f"{PASSED}/{version}/{bucket}", 0.0)
    return (spec.prior * spec.prior_samples + passed) / (spec.prior_samples + seen)


def worth(spec: PassRates, rate: float) -> float:
    """What drawing from a bucket is worth."""
    return rate * (1 - rate) if spec.weight == "learnability" else 1 - rate


def _logged(what: str, names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """A number of each bucket where there are few, the smallest and the largest where many."""
    if len(names) <= MOST_LOGGED:
        return {f"{what}/{name}": value for name, value in zip(names, values, strict=True)}
    return {f"{what}/min": min(values), f"{what}/max": max(values)}


def _too_many(call: Call, spec: PassRates, count: int) -> Finding:
    return Finding(
        code="E648",
        what=f"{call.node}: column {spec.by!r} has {count:,} values, each a bucket",
        where=call.where,
        got=call.params["data"].describe(),
        expected=f"at most {MOST_BUCKETS:,}: pass rates of all are part of a checkpoint",
        fix='by="level", a column with few values',
    )
