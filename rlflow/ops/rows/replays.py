"""Rows of earlier iterations: a replay buffer as an operator.

The contract only, with how many rows it makes and may hold; the body is in
`rlflow.ops.bodies.rows.replays`. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlflow.errors import Finding
from rlflow.graph.fields import row
from rlflow.graph.op import Input, register
from rlflow.graph.roles import Recalling, SamplingOptions
from rlflow.graph.rules.counts import Counts
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, add_node, report_finding
from rlflow.ops.rows.sets import CONCAT, GROUP, declared_counts, sampled

REPLAY = register(
    replace(
        CONCAT,
        name="replay",
        body="rlflow.ops.bodies.rows.replays:replay",
        recalls=True,
        roles=(SamplingOptions, Recalling),
    )
)


def replay(
    *handles: Handle,
    keep: int,
    sample: int,
    fresh: bool = True,
    name: str | None = None,
) -> Handle:
    """A replay buffer: groups drawn from the rows of this iteration and of the last `keep`.

    Draws `sample` groups in each iteration, uniformly and without replacement, by seed and
    iteration alone; they stand in the order of their iterations. Where there are fewer, as in the
    first iterations, it draws them all. With `fresh=False` groups of this iteration are drawn only
    where earlier ones do not suffice. A row in no group is a group of its own.

    Values stay as they were: `version` and `rollout_log_probs` are those of the weights that
    sampled a row. They may be `keep` updates older than the rollout's, so a loss has to correct
    for that (E402). `group` and `sample` are made anew. Logs `<name>/age`, the mean age of the
    rows in iterations, and `<name>/held`, the rows that are kept for later.

    Its rows wait on the host, or where the node is assigned, and are part of every checkpoint.
    """
    offered = {o.name: o for h in handles if isinstance(h, Handle) for o in h.offers}
    rows = [handle for handle in handles if isinstance(handle, Handle) and handle.rows is not None]
    if not rows:
        finding = Finding(
            code="E156",
            what="op 'replay' has no rows to keep",
            where=declared_at(),
            expected="handles of the same rows, as ops.rollout and ops.reward return them",
        )
        report_finding(finding)
        return Handle(node="replay", rows=None, offers=())
    known = declared_counts(rows[0])
    most = known.groups * (keep + 1)
    checks = (
        (keep >= 1, f"keep={keep}", "keep >= 1: for how many iterations rows are kept"),
        (keep < 1 or 1 <= sample <= most, f"sample={sample}", f"1 to {most} groups"),
    )
    wrong = [f for holds, got, want in checks if not holds for f in [_refused(got, want)]]
    for finding in wrong:
        report_finding(finding)
    if wrong:
        return rows[0]
    counts = Counts(
        groups=sample,
        rows=sample * known.largest,
        least=min(sample, known.least),
        expected=known.expected,
    )
    fields = tuple(replace(offer.field, name=key) for key, offer in offered.items())
    inputs = tuple(
        Input(name=f.name, dtype=f.dtype, levels=(f.level,), required=f.name == "group")
        for f in fields
    )
    numbered = {"group": GROUP, "sample": row("sample", "int64")}
    outputs = tuple(numbered.get(f.name, f) for f in fields)
    op = replace(REPLAY, inputs=inputs, outputs=outputs)
    params: dict[str, Any] = {"keep": keep, "sample": sample}
    params |= {} if fresh else {"fresh": False}
    return add_node(op, handles, params=params | sampled([offered]), counts=counts, name=name)


def _refused(got: str, expected: str) -> Finding:
    what = f"op 'replay' with {got}"
    return Finding(code="E156", what=what, where=declared_at(), expected=expected)
