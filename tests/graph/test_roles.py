"""What a node is: read from its options in one place, and from no option of a user's own."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest

import rlflow as rf
from rlflow import ops
from rlflow.graph.roles import Learning, LoopEnd, Paused
from tests.scheduler.examples import exact, grpo
from tests.scheduler.looping import counting
from tests.scheduler.strategies import graph_of
from tests.sources import PACKAGE, nodes

# The verifier shares nothing with the passes, not even what a role is. A call of a body has all
# options, prompts are measured by one, and an evaluation samples with those of the node it repeats.
OWN_WORDS = (
    "scheduler/verify/",
    "runtime/worker/worker.py",
    "runtime/preflight.py",
    "cli/evaluation/terms.py",
)


@rf.op(per="batch")
def named_alike(
    reward: rf.Row[float],
    *,
    drafter: str,
    averages: str,
    at_most: int,
    data: str,
    resumes: str,
    tokenizer: str,
) -> rf.Row[float]:
    return reward


def test_an_option_of_a_user_is_never_what_a_node_is():
    options = {"averages": "actor", "at_most": 3, "data": "x", "resumes": "y", "tokenizer": "z"}

    def declare() -> None:
        actor = rf.Model("actor", "models/mid", optimizer=rf.AdamW(lr=1e-3))
        prompts = ops.prompts(rf.data.arithmetic(digits=2), batch=8)
        samples = ops.rollout(actor, prompts, n=2, max_new_tokens=8)
        reward = ops.reward(exact, samples)
        own = named_alike(reward, drafter="actor", **options)
        ops.update(
            actor,
            samples,
            ops.advantage("grpo", samples, own.rename(reward="named_alike")),
            loss=rf.PolicyLoss(),
        )

    graph = graph_of(declare, "named alike")
    node = graph.node("named_alike")
    assert node.roles == ()
    assert (node.drafter, node.averages, node.resumes, node.ends_loop) == (None, None, None, False)
    assert all(reader.name != node.name for reader in graph.readers("actor"))


def test_roles_are_written_as_they_were_read():
    for graph in (grpo(), counting()):
        for node in graph.nodes:
            for role in node.roles:
                assert role.written(node.params) == node.params
                assert type(role).read(role.options()) == role


def test_a_role_takes_the_place_of_the_one_before():
    node = next(node for node, _ in grpo().having(Learning))
    behind = node.being(Learning(loss=node.as_a(Learning).loss, epochs=3, staleness=2))
    assert behind.as_a(Learning).epochs == 3
    assert [name for name, _ in behind.params][: len(node.params)] == [n for n, _ in node.params]
    assert behind.params[-1] == ("staleness", 2)
    rollout = next(node for node in grpo().nodes if node.op.name == "rollout")
    assert rollout.being(Paused(until=3)).as_a(Paused).until == 3
    assert rollout.being(Paused(until=3)).without(Paused) == rollout
    with pytest.raises(KeyError, match="is no LoopEnd"):
        rollout.as_a(LoopEnd)


def looks_up(found: Iterable[ast.AST]) -> list[int]:
    """Lines that look an option up by its name: `dict(node.params)`, `node.param("x")`."""
    lines = []
    for node in found:
        if not isinstance(node, ast.Call):
            continue
        given = node.args[0] if node.args else None
        made = isinstance(node.func, ast.Name) and node.func.id == "dict"
        asked = isinstance(node.func, ast.Attribute) and node.func.attr == "param"
        if asked or (made and isinstance(given, ast.Attribute) and given.attr == "params"):
            lines.append(node.lineno)
    return sorted(lines)


def test_nobody_asks_an_option_what_a_node_is():
    assert looks_up(ast.walk(ast.parse("dict(node.params).get('until')\nnode.param('n')"))) == [
        1,
        2,
    ]
    folders = ("graph", "scheduler", "runtime", "engines", "report", "cli")
    files = [file for folder in folders for file in sorted((PACKAGE / folder).rglob("*.py"))]
    found = {
        f"{file.relative_to(PACKAGE)}:{line}"
        for file in files
        if not str(file.relative_to(PACKAGE)).startswith(OWN_WORDS)
        for line in looks_up(nodes(file))
    }
    assert {place.partition(":")[0] for place in found} <= {"graph/graph.py"}
