"""The operator that keeps a model's weights an average of another's. Contract only."""

from __future__ import annotations

from rlflow.errors import Finding
from rlflow.graph.model import Average, Model
from rlflow.graph.op import Op, register
from rlflow.graph.roles import Averaged
from rlflow.graph.source import declared_at
from rlflow.graph.trace import Handle, add_node, report_finding

AVERAGE = register(
    Op(
        name="average",
        body="rlflow.ops.bodies.average:average",
        roles=(Averaged,),
        inputs=(),
        outputs=(),
        per="batch",
        use="train",
        rows="none",
        effect="effectful",
    )
)


def average(model: Model, source: Model, *, every: int = 1, name: str | None = None) -> Handle:
    """Keep the weights w of `model` an exponential moving average of the weights theta of `source`.

    After the last update of `source` in iteration i, w[i+1] = decay * w[i] + (1 - decay) *
    theta[i+1], in float32 at least (Polyak and Juditsky 1992; Tarvainen and Valpola 2017, arXiv
    1703.01780, section 2). Nodes that use `model` in iteration i read w[i]; w[0] is what it is
    loaded with. `decay` is that of `optimizer=rf.Average(decay=...)`. With `every=n` it runs in
    every n-th iteration, and w stays as it is in the others. Of models with the same adapters it
    averages A and B each by itself, not their product.
    """
    if every < 1:
        report_finding(
            Finding(
                code="E118",
                what=f"an average every {every} iterations",
                where=declared_at(),
                expected="every >= 1",
            )
        )
    params: dict[str, object] = {"averages": source.name, "every": max(every, 1)}
    if isinstance(model.optimizer, Average):
        params["decay"] = model.optimizer.decay
    return add_node(AVERAGE, (), params=params, model=model, name=name)
