"""What seconds of a plan rest on, in one line: said, measured, counted or assumed.

Of lengths, of drafted tokens, of rewards and of the rates of devices. Decides nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlflow.graph.graph import Node
from rlflow.graph.roles import Calling, Drafted, Paused, SamplingOptions
from rlflow.graph.rules.nesting import declared_name
from rlflow.scheduler.costs.estimate import HOST_SECONDS_PER_ROW, HOST_WORK, TABLE, Costs
from rlflow.scheduler.costs.origins import origins
from rlflow.scheduler.costs.ranks.draft_turns import DraftTurn
from rlflow.scheduler.costs.rows.given import ninety_fifth
from rlflow.scheduler.devices.cluster import Cluster
from rlflow.scheduler.models.prompts import PromptTokens
from rlflow.scheduler.plan.plan import Plan


def seconds_rest_on(plan: Plan, costs: Costs) -> tuple[str, ...]:
    """What the seconds of a plan rest on, each with where it is from."""
    rollouts = [node for node in plan.graph.nodes if node.op.name == "rollout"]
    trained = [node for node in plan.graph.nodes if node.op.use == "train"]
    rollouts = rollouts or [made for node in trained for made in origins(plan.graph, node)]
    found = _by_node(rollouts, [responses_text(node, costs) for node in rollouts])
    found += _by_node(rollouts, [prompts_text(node, costs) for node in rollouts])
    found += drafting_text(plan, costs)
    sources = {action.cost.source for action in plan.actions}
    calling = {node.name for node, _ in plan.graph.having(Calling) if node.model is None}
    if calling:
        told = {action.cost.source for action in plan.actions if action.node in calling}
        assumed = told & {HOST_WORK}
        each = f"rewards {HOST_SECONDS_PER_ROW * 1e6:g} us a row (assumed)"
        found.append(each if assumed else "rewards (measured)")
    if not any(source.startswith(TABLE) for source in sources):
        return (*found, "rates (measured)")
    return (*found, *rates_text(costs.cluster))


def drafting_text(plan: Plan, costs: Costs) -> list[str]:
    """How many drafted tokens are accepted, and where that is from; empty where none are."""
    runs = {action.node: action for action in plan.actions if action.kind == "run"}
    nodes, texts = [], []
    for node in plan.graph.nodes:
        run = runs.get(node.name)
        if run is None or run.instance is None:
            continue
        turn = costs.turn(node, plan.instance(run.instance))
        if turn is not None:
            nodes.append(node)
            counts = not run.cost.source or run.cost.source.startswith(TABLE)
            texts.append(
                acceptance_text(turn) if counts else "acceptance as in the run that was measured"
            )
    if nodes:
        return _by_node(nodes, texts)
    drafted = any(node.role(Drafted) is not None for node in plan.graph.nodes)
    if drafted or any(instance.engine_plan.drafts for instance in plan.instances):
        return ["drafted tokens: none counts (assumed)"]
    said = costs.graph.acceptance
    return [] if said is None else [f"acceptance {said:g}: nothing drafts (given)"]


def acceptance_text(turn: DraftTurn) -> str:
    """A turn as it is printed: `acceptance 0.71, 2.6 tokens a pass that verifies 3 (assumed)`."""
    drafted = turn.read - 1
    each = f"{round(turn.tokens, 2):g} tokens a pass that verifies {drafted}"
    each += "" if math.isinf(turn.rows) else f", of {turn.rows:g} rows at most"
    return f"acceptance {turn.acceptance:g}, {each} ({turn.how})"


def _by_node(nodes: list[Node], texts: list[str]) -> list[str]:
    """Texts of nodes, equal ones once; with names where they differ. Trips count as one node."""
    named = {declared_name(node.name): text for node, text in zip(nodes, texts, strict=True)}
    if len(set(named.values())) < 2:
        return list(dict.fromkeys(named.values()))
    return [f"{text} of {name}" for name, text in named.items()]


def responses_text(node: Node, costs: Costs) -> str:
    """Lengths of a rollout's responses, and where they are from."""
    lengths = costs.lengths(node.without(Paused) if node.role(Paused) is not None else node)
    _, longest = costs.tokens(node)
    sampling = node.role(SamplingOptions)
    if sampling is not None and sampling.ignore_eos:
        return f"responses of {longest:,} tokens (ignore_eos)"
    said = None if costs.graph.lengths is None else costs.graph.lengths.responses
    if said is None:
        record = costs.lengths_from(node)
        source = "assumed: half of the limit" if record is None else record.source
        tail = ""
    else:
        source = costs.graph.lengths.source if costs.graph.lengths else ""
        known = said.p95 is not None or said.seen
        tail = f", 95 % within {amount_of(ninety_fifth(lengths))}"
        tail += "" if known else " (assumed tail)"
    told = f"responses {amount_of(lengths.mean)} tokens in the mean{tail}"
    return f"{told}, {lengths.end:,} at most ({source})"


def amount_of(tokens: float) -> str:
    """Tokens as they are printed: `3.5`, `12`, `1,800`."""
    return f"{tokens:,.0f}" if tokens >= 10 else f"{round(tokens, 1):g}"


def prompts_text(node: Node, costs: Costs) -> str:
    """Lengths of a rollout's prompts, and where they are from."""
    found = costs.prompt_tokens(node)
    if (seen := found.pictures) is not None:
        text = prompts_text_of(replace(found, pictures=None))
        each = f"{amount_of(seen.count)} a prompt of {amount_of(seen.mean)} tokens"
        return f"{text}, pictures {each} ({seen.how})"
    return prompts_text_of(found)


def prompts_text_of(found: PromptTokens) -> str:
    """Lengths of prompts as they are printed."""
    if found.mean is None or found.mean == found.longest:
        return f"prompts {found.longest:,} ({found.how})"
    return f"prompts {amount_of(found.mean)} in the mean, {found.longest:,} at most ({found.how})"


def rates_text(cluster: Cluster) -> tuple[str, ...]:
    """What part of their peaks accelerators are taken to reach; rates of CPUs are measured ones."""
    told = []
    for kind, _ in cluster.kinds:
        if kind.curves.version:
            told.append(f"rates of {kind.name} by curves {kind.curves.version} (measured)")
            continue
        if kind.name == "cpu":
            continue
        own = kind.family and kind.name != kind.family
        source = "as declared" if own else "published"
        told.append(f"products at {100 * kind.sustained:.0f} % of {kind.chip}'s peak ({source})")
    return tuple(dict.fromkeys(told)) or ("rates of cpu (table)",)
