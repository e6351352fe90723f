"""The body that lets an environment answer: many episodes at a time, each from its own state."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from rlflow.batch import strings, text
from rlflow.contract.values import Stat
from rlflow.envs.base import Step, state_text
from rlflow.envs.playing import Turn, play_turns
from rlflow.errors import Finding, RunError
from rlflow.ops.bodies.common import inputs_of, num_rows
from rlflow.ops.bodies.stats import mean_of
from rlflow.ops.body import Call, Output
from rlflow.rewards.bounds import PLAIN
from rlflow.rewards.judging import Failure

SHOWN = 160


def observe(call: Call) -> Output:
    """Take a step of every episode that is not over; the others stay as they are.

    Raises RunError (E621) with the episode where a step fails and the policy says so.
    """
    inputs, environment = inputs_of(call), call.params["environment"]
    rows, begun = num_rows(inputs), "env_state" in inputs.keys()  # noqa: SIM118  rows otherwise
    said = strings(inputs["response"])
    none = torch.zeros(rows, dtype=torch.int64)
    over = inputs["done"] if begun else none.bool()
    places = torch.nonzero(~over).flatten().tolist()
    states = strings(inputs["env_state"]) if begun else [""] * rows
    columns = {} if begun else {name: strings(inputs[name]) for name in environment.fields()}
    turns = [
        Turn(response=said[place], state=json.loads(states[place]))
        if begun
        else Turn(
            response=said[place], fields={name: column[place] for name, column in columns.items()}
        )
        for place in places
    ]
    numbers = inputs["turns"] + 1 if begun else none + 1

    def failed(index: int, failure: Failure) -> None:
        if call.params.get("on_error") != "end":
            place = places[index]
            told = (int(inputs["sample"][place]), int(numbers[place]))
            raise RunError(_broken(call, *told, turns[index], failure)) from failure.error

    steps = play_turns(environment, turns, bounds=call.params.get("bounds", PLAIN), failed=failed)
    told = [""] * rows
    causes = strings(inputs["failure"]) if "failure" in inputs.keys() else [""] * rows  # noqa: SIM118
    done, reward = over.clone(), inputs["reward"].clone() if begun else none.float()
    for place, step in zip(places, steps, strict=True):
        if isinstance(step, Failure):
            causes[place], done[place] = f"{step.cause}: {step.problem}", True
            states[place] = states[place] or "{}"
            continue
        told[place], states[place] = step.observation, state_text(step.state)
        done[place] = step.done
        reward[place] += step.reward
    cut = inputs["truncated"] if begun else none.bool()
    fields = {
        "observation": text(told),
        "done": done,
        "finished": done & ~cut & ~_any(causes),
        "reward": reward,
        "turns": torch.where(over, inputs["turns"] if begun else none, numbers),
        "env_state": text(states),
        "truncated": cut,
        "failure": text(causes),
    }
    kept = {name: value for name, value in fields.items() if name in call.wanted}
    return Output(fields=kept, rows=rows, metrics=_counted(steps, done))


def _any(texts: Sequence[str]) -> torch.Tensor:
    return torch.tensor([bool(entry) for entry in texts], dtype=torch.bool)


def _counted(steps: Sequence[Step | Failure], done: torch.Tensor) -> dict[str, float | Stat]:
    """What share of the episodes took a step, and what share of those steps failed."""
    broken = sum(isinstance(step, Failure) for step in steps)
    return {
        "stepped": Stat(kind="mean", total=float(len(steps)), count=float(len(done))),
        "failed": Stat(kind="mean", total=float(broken), count=float(len(steps))),
        "done": mean_of(done),
    }


def _broken(call: Call, sample: int, number: int, turn: Turn, failure: Failure) -> Finding:
    came = turn.fields if turn.state is None else turn.state
    return Finding(
        code="E621",
        what=f"{call.node}: {call.params['environment'].describe()} failed in turn {number} of "
        f"episode {sample} of iteration {call.iteration}: {failure.problem}",
        where=call.where,
        got=f"response: {turn.response!r:.{SHOWN}}\nstate: {dict(came or {})!r:.{SHOWN}}",
        expected="an rf.Step within the time limit",
        fix='on_error="end", "drop_sample" or "drop_group", and max_failures',
    )
