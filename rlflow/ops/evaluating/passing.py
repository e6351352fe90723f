"""What an evaluation counts: which samples are right, what their answers are, for which k.

Contracts only; the body is in `rlflow.ops.bodies.metrics`. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlflow.data.answers import extract_boxed, extract_gsm8k, last_number
from rlflow.errors import Finding, UsageError
from rlflow.graph.op import Input, Op
from rlflow.graph.trace import Handle, add_node

DRAWS = 2000
LEVEL = 0.95
LOW, HIGH = "/low", "/high"
RULE = re.compile(r"\s*reward\s*(>=|>)\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)\s*", re.IGNORECASE)

Answer = Callable[[str], str | None]

PASSES = Op(
    name="passes",
    body="rlflow.ops.bodies.metrics:pass_rates",
    inputs=(
        Input(name="reward", dtype="float32", levels=("row",)),
        # One sample of a prompt is enough, where what requires a group compares several.
        Input(name="group", dtype="int64", levels=("row",), required=False),
        Input(name="response", dtype="text", levels=("row",)),
    ),
    outputs=(),
    per="batch",
    rows="none",
    effect="effectful",
)


@dataclass(frozen=True, slots=True)
class PassRule:
    """A sample is right whose reward is at least, or above, a bound."""

    sign: Literal[">=", ">"] = ">="
    bound: float = 1.0

    @classmethod
    def parse(cls, text: str) -> PassRule:
        """The rule that a text says, `reward>=1`. Raises UsageError E362 for what is none."""
        said = RULE.fullmatch(text)
        try:
            return cls(">=" if said[1] == ">=" else ">", float(said[2])) if said else _refused(text)
        except ValueError:
            return _refused(text)

    def describe(self) -> str:
        """The rule as it is typed."""
        return f"reward{self.sign}{self.bound:g}"


def _refused(text: str) -> PassRule:
    raise UsageError(
        Finding(
            code="E362",
            what=f"--passes {text!r} does not say which samples are right",
            expected="a bound of the reward: 'reward>=1' or 'reward>0.5'",
            fix="--passes 'reward>=1'",
        ),
        summary="Nothing was started.",
    )


def whole_response(response: str) -> str:
    """The response itself, without the blanks around it."""
    return response.strip()


ANSWERS: dict[str, Answer] = {
    "response": whole_response,
    "boxed": extract_boxed,
    "gsm8k": extract_gsm8k,
    "number": last_number,
}


def passes(
    *handles: Handle, ks: Sequence[int], rule: PassRule, answer: Answer, name: str
) -> Handle:
    """Count what samples of each prompt say of k of them: the mean reward, pass@k and maj@k.

    Logs each with the ends of its interval over prompts, `pass@4`, `pass@4/low` and `pass@4/high`.
    `answer` makes of a response what it votes for, or None for no vote.
    """
    params = {"ks": tuple(ks), "rule": rule, "answer": answer}
    return add_node(PASSES, handles, params=params, name=name)
