"""Rule of the verifier: who reads a shared state finds just the version that is declared.

A write makes the version of its iteration, and drops the one that the iteration before reads.
Turns of one action follow each other. Knows the graph and the plan; shares no code with the passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rlflow.scheduler.plan.plan import Action
from rlflow.scheduler.verify.happens_before import Facts


def states_are_exact(facts: Facts) -> Iterator[str]:
    """Readers start after the write that they read and before the one that drops it, in turns."""
    graph, lag = facts.plan.graph, 1 + facts.plan.graph.staleness
    for state in sorted({node.shares for node in graph.nodes if node.shares}):
        nodes = [node for node in graph.nodes if node.shares == state]
        runs = [(node, run) for node in nodes for run in facts.runs[node.name]]
        readers = [run for node, run in runs if node.op.effect == "pure"]
        writers = [run for node, run in runs if node.op.effect != "pure"]
        if len({run.devices for _, run in runs}) > 1 or any(len(r.devices) > 1 for _, r in runs):
            yield f"those who share {state} run on {sorted({run.devices for _, run in runs})}"
        if not writers:
            yield f"nobody writes {state}, which {readers[0].id} reads"
        yield from _take_turns(facts, state, readers)
        yield from _take_turns(facts, state, writers)
        for reader in readers:
            for writer in writers:
                if not facts.comes_before(writer.id, reader.id, lag):
                    yield f"{reader.id} may start before {writer.id} has left {state}"
                if not any(facts.comes_before(reader.id, writer.id, gap) for gap in (0, 1)):
                    yield f"{writer.id} may drop what {reader.id} is to read of {state}"
            yield from _waits_as_declared(facts, reader, {run.id for run in writers}, lag)


def _take_turns(facts: Facts, state: str, runs: list[Action]) -> Iterator[str]:
    """Of several of a kind each starts after the one before, and the first after the last."""
    for one, other in itertools.pairwise(runs):
        if not facts.comes_before(one.id, other.id, 0):
            yield f"{other.id} may change {state} before {one.id}"
    if len(runs) > 1 and not facts.comes_before(runs[-1].id, runs[0].id, 1):
        yield f"{runs[0].id} may change {state} before {runs[-1].id} of the iteration before"


def _waits_as_declared(facts: Facts, reader: Action, writers: set[str], lag: int) -> Iterator[str]:
    """A reader waits for no other iteration's write than the one it reads."""
    for dep in reader.after:
        if dep.action in writers and dep.kind != "device":
            gap = facts.turns(reader, dep) + facts.ahead[reader.id] - facts.ahead[dep.action]
            if gap != lag:
                yield f"{reader.id} waits for {dep.action} of {gap} iterations before, not {lag}"
