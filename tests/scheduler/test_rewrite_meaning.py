"""Random graphs mean the same before and after they are rewritten.

`Terms` writes out what a graph computes as nested tuples: every effect with the terms of all
that it reads, down to the data and the weights. It knows the ops and shares nothing with the
rewrites.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, reject, settings

import rlflow as rf
from rlflow import ops
from rlflow.errors import PlanError
from rlflow.graph.fields import Binding
from rlflow.graph.graph import Graph, Node
from rlflow.graph.trace import Handle
from rlflow.scheduler.passes.rewrite import rewrite
from rlflow.scheduler.passes.staleness import stamp
from rlflow.scheduler.plan.plan import Plan
from rlflow.scheduler.verify.happens_before import Facts
from rlflow.scheduler.verify.left_out import shared_work_is_exact
from rlflow.scheduler.verify.verify import verify
from tests.budget import examples
from tests.scheduler.examples import COLOCATE
from tests.scheduler.rewriting import ADAM, LORA, before, names
from tests.scheduler.strategies import exact, graph_of, graphs, length, placements

Draw = Callable[[st.SearchStrategy], Any]
TEMPERATURES = st.sampled_from([None, 1.0, 0.5])


class Terms:
    """What the nodes of a graph compute."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def effects(self) -> dict[str, Any]:
        """The term of every node with an effect, by name."""
        return {n.name: self.of(n) for n in self.graph.nodes if n.op.effect == "effectful"}

    def of(self, node: Node) -> Any:
        """The term of a node without outputs, or of all of them."""
        params = {key: repr(value) for key, value in node.params if key != "adapters"}
        inputs = {b.name: self.read(b) for b in node.inputs}
        if node.op.use == "train":
            inputs["old"] = self.old(node)
            inputs.pop("old_log_probs", None)
            params.pop("old", None)
        kind = (node.op.name, node.op.body, getattr(node.op.function, "__name__", ""))
        own = node.name if node.op.rows in ("new", "expand") else ""
        weights = self.weights(node) if node.model else None
        return kind, own, weights, sorted(params.items()), sorted(inputs.items()), node.every

    def read(self, bound: Binding) -> Any:
        """The term of a field; log-probs are what they are at their own temperature."""
        source = self.graph.node(bound.source)
        if source.op.name != "log_probs":
            return self.of(source), bound.field.name
        number = [made.name for made in source.op.outputs].index(bound.field.name)
        given = source.param("temperature")
        return self.scored(source, given[number] if isinstance(given, tuple) else given)

    def scored(self, node: Node, temperature: float) -> Any:
        """The term of log-probs of the tokens that a node reads."""
        tokens = [self.read(b) for b in node.inputs if b.name.endswith("_tokens")]
        return "log-probs", self.weights(node), float(temperature), tokens

    def old(self, node: Node) -> Any:
        """Whose log-probs an update compares with."""
        params = dict(node.params)
        bound = {b.name: b for b in node.inputs}
        if params.get("old") == "recomputed":
            return self.read(bound["old_log_probs"])
        if params.get("old") == "current":
            return self.scored(node, params["temperature"])
        return params.get("old")

    def weights(self, node: Node) -> Any:
        """The weights that a node computes with: as loaded, or trained so and so often before."""
        model = self.graph.model(str(node.model))
        updates = [update.name for update in self.graph.updates(model.name)]
        if not updates or dict(node.params).get("adapters") == "off":
            return model.path, model.dtype, model.head, model.init
        place = updates.index(node.name) if node.name in updates else 0
        return model.name, place, self.graph.lag(node)


@st.composite
def graphs_with_forwards(draw: Draw) -> Graph:
    """An actor, adapted or not, and forwards of it and of frozen models that others read."""
    return graph_of(lambda: _declare(draw))


def _declare(draw: Draw) -> None:
    flag, paths = st.booleans(), st.sampled_from(["models/tiny", "models/tiny", "models/mid"])
    lora = LORA if draw(flag) else None
    actor = rf.Model("actor", draw(paths), optimizer=ADAM, lora=lora)
    frozen = [rf.Model(name, draw(paths)) for name in ("one", "two")]
    prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
    samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
    others = ops.rollout(actor, prompts, n=2, max_new_tokens=8) if draw(flag) else samples
    if others is not samples:
        ops.metrics(ops.reward(length, others, name="measure"), name="lengths")
    rewards = [ops.reward(exact, samples, name=f"reward{n}") for n in range(2)]
    reference: list[Handle] = []
    for number in range(draw(st.integers(0, 4))):
        model = draw(st.sampled_from([actor, *frozen]))
        rows = draw(st.sampled_from([samples, others]))
        at = draw(TEMPERATURES)
        made = ops.log_probs(model, rows, temperature=at, field="ref_log_probs", name=f"f{number}")
        if rows is samples and at != 0.5 and draw(flag):
            reference = [made]
        ops.metrics(made, name=f"seen{number}")
    if draw(flag):
        ops.update(actor, samples, loss=rf.SFTLoss(), name="sft")
    given = [*reference]
    if draw(flag):
        given.append(ops.log_probs(actor, samples, name="old"))
    coefficient = 0.1 if reference and draw(flag) else 0.0
    advantage = ops.advantage("grpo", samples, draw(st.sampled_from(rewards)))
    for number, reward in enumerate(rewards):
        ops.metrics(reward, name=f"shown{number}")
    loss = rf.PolicyLoss(kl_coef=coefficient)
    epochs = draw(st.sampled_from([1, 1, 2]))
    ops.update(actor, samples, advantage, *given, loss=loss, epochs=epochs, name="learn")


def check(graph: Graph, plan: Plan) -> None:
    """What a rewritten graph must have in common with the declared one."""
    assert Terms(graph).effects() == Terms(plan.graph).effects()
    assert [] == list(shared_work_is_exact(Facts(plan=plan)))
    kept, said = set(names(plan)), " ".join(note.text for note in plan.notes)
    assert all(node.name in said for node in graph.nodes if node.name not in kept)
    loaded = {model.name for model in plan.graph.models}
    assert all(f"{m.name} is not loaded" in said for m in graph.models if m.name not in loaded)


def each_forward_sees_rows_of_its_own(graph: Graph) -> bool:
    """Whether no two forwards of one model compute the same."""
    seen = [
        (node.model, node.reads_base, Terms(graph).scored(node, 1.0))
        for node in graph.nodes
        if node.op.name == "log_probs"
    ]
    return all(one not in seen[:number] for number, one in enumerate(seen))


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(graph=graphs_with_forwards(), staleness=st.sampled_from([0, 0, 1]))
def test_rewriting_changes_no_meaning(graph: Graph, staleness: int) -> None:
    plan, context = before(graph, COLOCATE, staleness)
    try:
        plan = stamp(plan, context)
    except PlanError:
        reject()

    found = rewrite(plan, context)

    check(plan.graph, found)
    assert [] == verify(found, "rewrite")
    assert each_forward_sees_rows_of_its_own(found.graph)
    again = rewrite(found, context)
    assert found.graph == again.graph
    assert found.graph.hash == rewrite(plan, context).graph.hash


@given(data=st.data())
def test_pipelines_of_every_kind_keep_their_meaning(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    placement = data.draw(placements(graph))
    plan, context = before(graph, placement, placement.staleness)
    try:
        plan = stamp(plan, context)
    except PlanError:
        reject()

    check(plan.graph, rewrite(plan, context))
