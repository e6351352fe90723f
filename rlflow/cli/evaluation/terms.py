"""On what terms weights are evaluated: the data, reward and sampling that a pipeline has declared.

They are those of an `ops.evaluate`, or of a rollout and the reward of its rows. What the command
line says goes before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlflow.data import DataSource, huggingface
from rlflow.data.beginnings import FirstRows
from rlflow.data.files import jsonl, parquet
from rlflow.errors import Finding, UsageError, known_names, near_names
from rlflow.graph.graph import Graph, Node
from rlflow.graph.model import Model
from rlflow.graph.roles import Drawn
from rlflow.ops.evaluating.passing import ANSWERS, Answer
from rlflow.ops.scoring import STRICT, Dispatch, Functions

NOTHING = "Nothing was started."
READERS: dict[str, Callable[..., DataSource]] = {".jsonl": jsonl, ".parquet": parquet}
BOUNDS = ("concurrency", "timeout", "retries", "backoff")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is asked of which model, how it samples, and what scores a response.

    `node` is the node that says so; `sampling` are options of `ops.rollout`, `options` those of
    `ops.reward`.
    """

    node: Node
    model: Model
    data: DataSource
    function: Functions
    sampling: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)


def terms_of(graph: Graph, name: str | None, model: str | None, n: int) -> Terms:
    """The terms of a node of a pipeline: the one of that name, or the first that has some.

    Where one sample is taken it is as greedy as an evaluation is; several are taken at the
    temperature of the model's rollout, 1 without one. Raises UsageError E364 where there is none.
    """
    node = _chosen(graph, name, model)
    if node.op.name == "evaluate":
        return _of_evaluation(graph, node, n)
    return _of_rollout(graph, node)


def _chosen(graph: Graph, name: str | None, model: str | None) -> Node:
    evaluations = [node for node in graph.nodes if node.op.name == "evaluate"]
    rollouts = [node for node in _rollouts(graph) if _reward_of(graph, node) is not None]
    known = [each for each in (*evaluations, *rollouts) if model in (None, each.model)]
    found = [node for node in known if name in (None, node.name)]
    if found:
        return found[0]
    names = [node.name for node in (*evaluations, *rollouts)]
    models = list(dict.fromkeys(str(node.model) for node in (*evaluations, *rollouts)))
    asked = f"--node {name}" if name else f"--model {model}" if model else f"pipeline {graph.name}"
    raise UsageError(
        Finding(
            code="E364",
            what=f"{asked}: no evaluation, nor a rollout with a reward of its rows",
            where=graph.source,
            expected=f"{known_names(names)}; models {known_names(models)}"
            if names
            else "an ops.evaluate, or ops.rollout and ops.reward on single prompts",
            near=near_names(name or model or "", names if name else models),
            fix="" if names else "ops.evaluate(actor, held_out, reward, every=25, ...)",
        ),
        summary=NOTHING,
    )


def _rollouts(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op.name == "rollout"]


def _reward_of(graph: Graph, rollout: Node) -> Node | None:
    """The first reward that reads what a rollout responded."""
    for node in graph.nodes:
        reads = any(b.name == "response" and b.source == rollout.name for b in node.inputs)
        if node.op.name == "reward" and reads and _data_of(graph, rollout) is not None:
            return node
    return None


def _data_of(graph: Graph, rollout: Node) -> DataSource | None:
    """The source of the prompts that a rollout reads as they are."""
    for bound in rollout.inputs:
        drawn = graph.node(bound.source).role(Drawn)
        if bound.name == "prompt" and drawn is not None and isinstance(drawn.data, DataSource):
            return drawn.data
    return None


def _of_evaluation(graph: Graph, node: Node, n: int) -> Terms:
    params = dict(node.params)
    sampling = {key: params[key] for key in ("max_new_tokens", "temperature")}
    sampling |= {"chat": params["chat"]} if "chat" in params else {}
    if n > 1:
        alike = [dict(r.params) for r in _rollouts(graph) if r.model == node.model]
        drawn = next((p for p in alike if p["temperature"]), {"temperature": 1.0})
        sampling |= {k: drawn[k] for k in ("temperature", "top_p", "top_k") if k in drawn}
    data = params["data"]
    if params["limit"] is not None:
        data = FirstRows(source=data, count=params["limit"], declared=data.declared)
    return Terms(
        node=node,
        model=graph.model(str(node.model)),
        data=data,
        **_called(params["function"]),
        sampling=sampling,
    )


def _of_rollout(graph: Graph, node: Node) -> Terms:
    params, reward, data = dict(node.params), _reward_of(graph, node), _data_of(graph, node)
    assert reward is not None
    assert data is not None
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "chat", "ignore_eos")
    said = dict(reward.params)
    bounds = said.pop("policy", STRICT).bounds
    called = _called(said.pop("function"))
    said.pop("batched")
    unusual = {k: getattr(bounds, k) for k in BOUNDS}
    unusual = {k: v for k, v in unusual.items() if v != getattr(STRICT.bounds, k)}
    return Terms(
        node=node,
        model=graph.model(str(node.model)),
        data=data,
        function=called["function"],
        sampling={key: params[key] for key in names if key in params},
        options={**called["options"], **said, **unusual},
    )


def _called(function: Any) -> dict[str, Any]:
    """A function as `ops.reward` is given it; several by the column that says which."""
    if isinstance(function, Dispatch):
        return {"function": function.functions, "options": {"by": function.column}}
    return {"function": function, "options": {}}


def changed_terms(terms: Terms, said: Mapping[str, Any]) -> Terms:
    """The terms with what the command line says: data, its columns, a limit, and sampling."""
    data = terms.data
    if said["data"] is not None:
        data = read_data(said["data"], said["prompt_column"], said["answer_column"])
    if said["limit"] is not None:
        whole = data.source if isinstance(data, FirstRows) else data
        data = FirstRows(source=whole, count=said["limit"], declared=whole.declared)
    names = ("max_new_tokens", "temperature", "top_p")
    sampling = {name: said[name] for name in names if said[name] is not None}
    sampling = {**terms.sampling, **sampling}
    if said["n"] > 1 and not sampling["temperature"]:
        raise UsageError(
            Finding(
                code="E365",
                what=f"{said['n']} samples at temperature 0 are all the same",
                fix="-n 1, or --temperature 1",
            ),
            summary=NOTHING,
        )
    return replace(terms, data=data, sampling=sampling)


def read_data(text: str, prompt: str | None, answer: str | None) -> DataSource:
    """The rows of a .jsonl or .parquet file, or of a data set of the hub, `NAME` or `NAME:SPLIT`.

    `prompt` and `answer` are the columns that become those; as they are called where left out.
    No line of a file has declared it.
    """
    rename = {answer: "answer"} if answer not in (None, "answer") else None
    named: dict[str, Any] = {"prompt": prompt or "prompt", "rename": rename}
    for suffix, reader in READERS.items():
        if text.endswith(suffix):
            return replace(reader(text, **named), declared=None)
    name, _, split = text.partition(":")
    return replace(huggingface(name, split=split or "test", **named), declared=None)


def answer_named(name: str | Answer, names: Mapping[str, Any]) -> Answer:
    """What reads the answer of a response: a known way, or a function of the pipeline's file.

    `names` are those of the file; a program may give the function. Raises UsageError E366 for what
    is neither.
    """
    if not isinstance(name, str):
        return name
    if name in ANSWERS:
        return ANSWERS[name]
    found = names.get(name)
    if found is not None and callable(found):
        made: Answer = found
        return made
    functions = [key for key, value in names.items() if callable(value) and key[:1] != "_"]
    raise UsageError(
        Finding(
            code="E366",
            what=f"--answer {name}: nothing that reads an answer is called so",
            expected=f"{', '.join(ANSWERS)}, or a function of the pipeline's file",
            near=near_names(name, [*ANSWERS, *functions]),
        ),
        summary=NOTHING,
    )
