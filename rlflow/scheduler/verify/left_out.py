"""Rules of the verifier: work left out is not missed, and a paused rollout is gone on with.

Knows the graph and what ops declare; shares no code with the passes. What both have to agree on,
when an old policy is known, the graph says.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.graph.graph import Graph, Node
from rlflow.graph.rules.old_policy import why_not_current
from rlflow.scheduler.verify.happens_before import Facts

# What a forward may make of its logits beside log-probs, once.
BESIDE = frozenset({"sum_pi_squared", "top_log_probs", "top_ids", "top_rest"})
BESIDE |= {"prompt_experts", "routed_experts"}


def shared_work_is_exact(facts: Facts) -> Iterator[str]:
    """Who computes for several, for another model or without old log-probs can do so exactly."""
    graph = facts.plan.graph
    for node in graph.nodes:
        params = dict(node.params)
        if params.get("adapters") == "off" and node.op.use is not None:
            yield from _base_is_there(graph, node)
        if node.op.name == "log_probs" and node.op.use == "forward":
            yield from _outputs_are_told_apart(node)
        if node.op.use == "train" and "old" in params:
            yield from _old_policy_is_known(graph, node)


def pauses_are_resumed(facts: Facts) -> Iterator[str]:
    """Who goes on does so where its rollout stopped, alike, and others read what it has made."""
    graph = facts.plan.graph
    resumed: dict[str, Node] = {}
    for node in graph.nodes:
        if node.resumes is None:
            continue
        if node.resumes in resumed or not graph.has_node(node.resumes):
            yield f"{node.name} goes on with {node.resumes}, which is not there for it"
            continue
        resumed[node.resumes] = node
        yield from _goes_on(graph.node(node.resumes), node)
    for node in graph.nodes:
        for bound in node.inputs:
            last = resumed.get(bound.source)
            made = last is not None and last.op.output(bound.field.name) is not None
            stopped = graph.has_node(bound.source) and "until" in dict(
                graph.node(bound.source).params
            )
            if stopped and node is not last and (made or last is None):
                yield f"{node.name} reads {bound.field.name} of {bound.source}, which is paused"


def _goes_on(begun: Node, node: Node) -> Iterator[str]:
    """Two halves of one rollout: the same model, options and token at which they meet."""
    first, last = dict(begun.params), dict(node.params)
    at, then = first.pop("until", None), last.pop("first", None)
    last.pop("resumes")
    if at is None or at != then or not 0 < int(at) < int(first["max_new_tokens"]):
        yield f"{begun.name} stops after {at} tokens, and {node.name} goes on after {then}"
    due = begun.model, begun.every, begun.within
    if first != last or due != (node.model, node.every, node.within):
        yield f"{node.name} goes on otherwise than {begun.name} began"
    other = begun.op.resumed is None or begun.op.resumed.body != node.op.body
    if other or any(bound.source != begun.name for bound in node.inputs):
        yield f"{node.name} goes on with other rows than those of {begun.name}"


def _base_is_there(graph: Graph, node: Node) -> Iterator[str]:
    """Weights below adapters are as they were loaded; a value head is not, nor random weights."""
    model = next((m for m in graph.models if m.name == node.model), None)
    if model is None or model.lora is None or node.op.use != "forward":
        yield f"{node.name} computes without adapters, {node.model} has none"
    elif (model.head, model.init) != ("lm", "pretrained"):
        yield f"{node.name} computes without adapters, and {model.name} trains more than those"


def _outputs_are_told_apart(node: Node) -> Iterator[str]:
    names = [made.name for made in node.op.outputs if made.name not in BESIDE]
    temperature = node.param("temperature")
    count = len(temperature) if isinstance(temperature, tuple) else 1
    if len(set(names)) < len(names) or len(names) != count:
        yield f"{node.name} makes {', '.join(names)} at {count} temperatures"


def _old_policy_is_known(graph: Graph, node: Node) -> Iterator[str]:
    """Log-probs that the ratio is taken against are read, or the update begins with that policy."""
    params, read = dict(node.params), {bound.name for bound in node.inputs}
    wanted = {"recomputed": "old_log_probs", "rollout": "rollout_log_probs"}.get(params["old"])
    if wanted and wanted not in read:
        yield f"{node.name} compares with {wanted}, which it does not read"
    if getattr(params["loss"], "old", None) != "auto" or params["old"] != "current":
        return
    why = why_not_current(graph, node)
    if why:
        yield f"{node.name} takes its ratio against the weights it begins with: {why}"
