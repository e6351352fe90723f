"""Signs that a run learns nothing, or is about to break, read from its metrics.

The rules are one table: each looks at the metrics whose names end alike, over some iterations in
a row, and says what to try. They decide by the numbers alone, so a run that is going on and the
report of one that has ended say the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlflow.errors import Finding, HealthError

Values = Sequence[float]

SMALLEST_ENTROPY = 0.01
LARGEST_KL = 1.0
LARGEST_STEP_KL = 0.5
LARGEST_GAP = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """One sign: metrics that end with `metric` are `bad` in the last `lasts` iterations they have.

    `beside` names numbers of the same node that have to be there too, so that a node of another
    kind with a number of the same name is left alone. An empty `metric` stands for every one.
    """

    name: str
    metric: str
    bad: Callable[[Values], bool]
    says: str
    tries: str
    lasts: int = 10
    beside: tuple[str, ...] = ()

    def looks_at(self, name: str, known: Collection[str]) -> bool:
        """Whether a metric is one of those it looks at; `known` are all of the iteration."""
        node, _, number = name.rpartition("/")
        wanted = not self.metric or self.metric == number
        return wanted and all(f"{node}/{other}" in known for other in self.beside)


def above(bound: float) -> Callable[[Values], bool]:
    """Whether all values are finite and larger in size than a bound."""
    return lambda values: all(math.isfinite(v) and abs(v) > bound for v in values)


def below(bound: float) -> Callable[[Values], bool]:
    """Whether all values are smaller than a bound."""
    return lambda values: all(v < bound for v in values)


def all_are(number: float) -> Callable[[Values], bool]:
    """Whether all values are that number."""
    return lambda values: all(v == number for v in values)


RULES: tuple[_Rule, ...] = (
    _Rule(
        name="not finite",
        metric="",
        lasts=1,
        bad=lambda values: not math.isfinite(values[-1]),
        says="a number is no number any more",
        tries="a lower lr, a smaller max_grad_norm; look at what the reward returns",
    ),
    _Rule(
        name="skipped steps",
        metric="skipped",
        lasts=3,
        bad=above(0),
        says="optimizer steps had a gradient that is not finite, and were left out",
        tries="a lower lr, a smaller clip of ratios, float32 for the trained model",
    ),
    _Rule(
        name="equal groups",
        metric="degenerate",
        bad=all_are(1),
        says="the rewards within every group are equal, so every advantage is 0",
        tries="easier or harder prompts, a larger n, a reward of more levels, or prompts drawn "
        "until groups differ: ops.informative in ops.repeat, as pipelines/dapo.py has it",
    ),
    _Rule(
        name="no pairs",
        metric="pairs",
        bad=all_are(0),
        says="no group has a better and a worse response, so there is nothing to prefer",
        tries="a larger n, a higher temperature, a reward of more levels",
    ),
    _Rule(
        name="no gradient",
        metric="grad_norm",
        bad=all_are(0),
        says="the gradient is zero",
        tries="look at the advantages and at the losses' clips and masks: what is left of them?",
    ),
    _Rule(
        name="all truncated",
        metric="finished",
        beside=("length_max",),
        bad=all_are(0),
        says="every response is cut off at max_new_tokens",
        tries="a larger max_new_tokens, a prompt that asks for less, the model's own chat template",
    ),
    _Rule(
        name="entropy collapsed",
        metric="entropy",
        bad=below(SMALLEST_ENTROPY),
        says=f"responses are drawn with less than {SMALLEST_ENTROPY:g} nats of entropy a token",
        tries="an entropy_coef, a larger upper clip, a KL to a reference, a lower lr",
    ),
    _Rule(
        name="constant reward",
        metric="std",
        beside=("mean", "min", "max"),
        bad=all_are(0),
        says="every response of a batch has the same reward",
        tries="print responses beside their rewards: does the reward read what they look like?",
    ),
    _Rule(
        name="constant return",
        metric="reward",
        beside=("turns",),
        bad=lambda values: len(set(values)) == 1,
        says="the mean reward of episodes does not change at all",
        tries="look at what the environment returns: is a reward ever given?",
    ),
    _Rule(
        name="far from the reference",
        metric="kl",
        lasts=5,
        bad=above(LARGEST_KL),
        says=f"the policy is more than {LARGEST_KL:g} nats a token from its reference",
        tries="a larger kl_coef, a lower lr; is the reference the model that training began with?",
    ),
    _Rule(
        name="long steps",
        metric="approx_kl",
        lasts=5,
        bad=above(LARGEST_STEP_KL),
        says=f"an update moves the policy by more than {LARGEST_STEP_KL:g} nats a token",
        tries="a lower lr, fewer epochs or mini_batches, less staleness",
    ),
    _Rule(
        name="rollout gap",
        metric="rollout_gap",
        lasts=5,
        bad=above(LARGEST_GAP),
        says="the rollout's log-probs are not those of the trained model: "
        f"they differ by more than {LARGEST_GAP:g} a token",
        tries="--check-sync; the same dtype and temperature on both sides, less staleness, "
        "a correction such as rf.ImportanceSampling",
    ),
)
"""All rules, in the order in which signs of one iteration are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rule has found: since when, and in which metrics with which last values."""

    rule: _Rule
    iteration: int
    values: Mapping[str, float]

    @property
    def where(self) -> str:
        """The metrics with their values: `advantage/degenerate 1`."""
        (name, value), *others = self.values.items()
        more = f" and {len(others)} more" if others else ""
        return f"{name} {value:.3g}{more}"

    def line(self) -> str:
        """The sign in one line, with what to try."""
        lasts = f" for {self.rule.lasts} iterations" if self.rule.lasts > 1 else ""
        return (
            f"{self.rule.name}, iteration {self.iteration}: {self.rule.says} "
            f"({self.where}{lasts}); try {self.rule.tries}"
        )

    def error(self) -> HealthError:
        """The sign as the error that ends a strict run."""
        return HealthError(
            Finding(
                code="E783",
                what=f"{self.rule.name}: {self.rule.says}",
                got=f"{self.where} at iteration {self.iteration}",
                expected="none of the signs of docs/running.md#health, as --strict asks",
                fix=f"try {self.rule.tries}",
            )
        )


@dataclass(slots=True)
class Health:
    """Follows a run: keeps what the rules look at, and tells each sign once.

    `fixed` are nodes whose responses have one length by declaration: being cut off says nothing.
    """

    fixed: Collection[str] = ()
    _recent: dict[tuple[str, str], deque[float]] = field(default_factory=dict)
    _looking: dict[str, tuple[_Rule, ...]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def see(self, iteration: int, metrics: Mapping[str, float]) -> list[Sign]:
        """Take the metrics of the next iteration; returns the signs that are new."""
        found: dict[str, dict[str, float]] = {}
        for name, value in metrics.items():
            if name not in self._looking:
                self._looking[name] = self._rules_of(name, metrics)
            for rule in self._looking[name]:
                if rule.name in self._told:
                    continue
                recent = self._recent.setdefault((rule.name, name), deque(maxlen=rule.lasts))
                recent.append(value)
                if len(recent) == rule.lasts and rule.bad(recent):
                    found.setdefault(rule.name, {})[name] = value
        self._told.update(found)
        return [
            Sign(rule=rule, iteration=iteration, values=found[rule.name])
            for rule in RULES
            if rule.name in found
        ]

    def forget(self) -> None:
        """Tell again what was told."""
        self._told.clear()

    def _rules_of(self, name: str, metrics: Collection[str]) -> tuple[_Rule, ...]:
        node = name.rpartition("/")[0]
        exempt = {"all truncated"} if node in self.fixed else set()
        return tuple(r for r in RULES if r.name not in exempt and r.looks_at(name, metrics))


def review(
    lines: Iterable[tuple[int, Mapping[str, float]]], fixed: Collection[str] = ()
) -> list[Sign]:
    """All signs of a run, in the order in which they came up, from (iteration, metrics)."""
    health = Health(fixed=fixed)
    return [sign for iteration, metrics in lines for sign in health.see(iteration, metrics)]
