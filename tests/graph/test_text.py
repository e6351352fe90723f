"""The printed graph: a golden, and that it is short and stable."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlflow.graph.text import WIDTH, graph_text
from tests.viz.examples import ppo, small_graph

GOLDEN = """\
small   6 nodes, 1 models   graph {hash}

models
  actor  models/tiny  adamw(lr=0.001)

nodes
  prompts        prompts(data=a "quoted" | source, batch=8)
                 -> prompt:text[row], answer:text[row]
  actor.rollout  rollout[actor](n=4, temperature=1)
                 <- prompts: prompt
                 -> response_tokens:float32[token|response_mask], response:text[row], (1 more,
                    unread)
  tidy<b>[x]     tidy()
                 <- actor.rollout: response
                 -> tidy:text[row]
  reward         reward()
                 <- tidy<b>[x]: tidy as response
                 <- prompts: answer
                 -> reward:float32[row]
  eval           evaluate[actor]() every 5
  actor.update   update[actor](epochs=1)
                 <- actor.rollout: response_tokens
                 <- reward: reward

edges that are not data (@d: d iterations later)
  actor.update -> actor.rollout @1  actor.rollout reads actor vi
  actor.update -> eval @1           eval reads actor vi
  actor.update -> actor.update @1   actor.update trains actor vi
  actor.rollout -> actor.update     actor.rollout reads actor before it is written
  eval -> actor.update              eval reads actor before it is written"""


def test_text_of_the_small_graph_is_golden():
    graph = small_graph()
    assert GOLDEN.format(hash=graph.hash[:8]) == graph_text(graph)


def test_no_line_of_ppo_is_long():
    assert max(len(line) for line in graph_text(ppo.trace()).splitlines()) <= WIDTH


def test_every_node_of_ppo_has_one_heading():
    lines = graph_text(ppo.trace()).splitlines()
    for node in ppo.trace().nodes:
        assert 1 == sum(line.startswith(f"  {node.name} ") and "(" in line for line in lines[6:-9])


@pytest.mark.slow
def test_text_is_the_same_in_every_process():
    program = (
        "from rlflow.graph.text import graph_text\n"
        "from tests.viz.examples import ppo\n"
        "print(graph_text(ppo.trace()))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert 1 == len(printed)
