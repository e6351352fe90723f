"""How many parameters a model has, as far as the sizes of its parts tell.

A size in bytes of a rank's equal share says the whole count up to rounding, so a count is an
interval. No size of a model is known from elsewhere; what is asked is whether all parts agree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil

from rlflow.graph.model import AdamW, Model, Muon
from rlflow.scheduler.plan.plan import Instance, Part
from rlflow.scheduler.verify.happens_before import Facts

Span = tuple[int, int]

# Bytes of a number. An optimizer step is taken in float32 at least.
NUMBER = {"float64": 8, "float32": 4, "bfloat16": 2}
FULL = NUMBER["float32"]
# How much more than an equal share a rank may have, for each rank beside it, and at the most: of
# norms each `tp` rank has all, and a vocabulary need not divide.
UNEVEN, MOST_UNEVEN = Fraction(1, 32), Fraction(1, 2)
# And on a rank of an engine, which has a whole head of keys and values where ranks are more than
# those: 2 of the 5 widths of a head, of queries, output and a feed-forward layer as wide as the
# queries, less the share of it that the rank has in any case.
REPEATED = Fraction(2, 5)
ALIKE = Fraction(1)
# The most of a model that is beside its layers: most of a small one with many words.
BESIDE = Fraction(3, 4)


@dataclass(frozen=True, kw_only=True)
class TrainedBytes:
    """Bytes of a trained number: of its weight, its gradient with the sum, and its moments.

    Of numbers in matrices Muon has `spared` bytes less of moments, AdamW in 8 bits as many but
    for scales; nothing here knows how many there are.
    Below float32 a process has gradients and their sums, and AdamW's moments beside a float32 copy
    of the weights. Ranks that train a model together have all in float32, and no copy.
    """

    weight: int
    gradient: int
    moments: int
    spared: int = 0

    @classmethod
    def of(cls, instance: Instance, model: Model) -> TrainedBytes:
        """Those of an instance of a model; as it is where nothing trains it."""
        size = NUMBER[model.dtype]
        spared = max(size, FULL) if isinstance(model.optimizer, Muon) and instance.trained else 0
        if isinstance(model.optimizer, AdamW) and model.optimizer.moments == "int8":
            spared = 2 * (max(size, FULL) - 1) if instance.trained else 0
        low = isinstance(model.optimizer, AdamW) and model.optimizer.moments == "bfloat16"
        both = 2 * (NUMBER["bfloat16"] if low else max(size, FULL))
        if not instance.trained or size >= FULL:
            moments = both if instance.trained else 2 * size
            return cls(weight=size, gradient=size, moments=moments, spared=spared)
        if instance.sharded:
            return cls(weight=FULL, gradient=FULL, moments=both, spared=spared)
        return cls(weight=size, gradient=size + FULL, moments=both + FULL, spared=spared)

    def are_moments(self, kept: int | None, trained: int) -> bool:
        """Whether so many bytes are the moments of so many numbers; of Muon within its bounds."""
        most = trained * self.moments
        if not self.spared:
            return kept == most
        unit = 2 if self.spared % FULL else self.spared
        whole = kept is not None and not kept % unit
        return whole and most - trained * self.spared < (kept or 0) < most


def lent(part: Part) -> int:
    """Bytes of what a part has from its model: the first of what it holds, or all."""
    return part.holds[0][1] if part.holds else part.size or 0


def holds_bytes(instance: Instance) -> bool:
    """Whether an engine holds some of its numbers in a byte each, so that its bytes count none."""
    return getattr(instance.options, "quantization", None) == "fp8"


def fewest_bytes(instance: Instance, span: Span, model: Model) -> Span:
    """The bytes that a model may take in an instance, where `span` is what its numbers do."""
    least = span[0] // NUMBER[model.dtype] if holds_bytes(instance) else span[0]
    return least, span[1]


def most_of_share(ranks: int, *, engine: bool = False, deep: Fraction = ALIKE) -> Fraction:
    """How much of an equal share the largest of some ranks may have, 1 or a little more.

    Where they are of stages the fullest of those may have `deep` times an equal share.
    """
    repeated = REPEATED * Fraction(ranks - 1, ranks) if engine else 0
    return deep * (1 + min((ranks - 1) * UNEVEN, MOST_UNEVEN) + repeated)


def fullest_stage(instance: Instance) -> Fraction:
    """How many times an equal share of a model the fullest stage may have, with what is beside.

    It has so many of all layers; of the embedding and the head nobody knows how much of the model
    they are, so that it may have all of them.
    """
    layers = instance.stages or (1,) * (instance.pp * instance.virtual)
    most = max(sum(layers[place :: instance.pp]) for place in range(instance.pp))
    return instance.pp * (BESIDE + (1 - BESIDE) * Fraction(most, sum(layers)))


def trained_tower(instance: Instance, frozen: Collection[str]) -> int:
    """How many parameters of a tower that each rank along tp has whole are trained."""
    parts = zip(("vision", "projector"), instance.seeing, strict=bool(instance.seeing))
    return sum(size for part, size in parts if part not in frozen)


def without_tower(instance: Instance, share: Span, tower: int) -> Span:
    """A rank's share without so many parameters, which each rank along tp of a stage has whole.

    They are at the first stage, which may be another than the fullest.
    """
    own = ceil(Fraction(tower, instance.shards))
    return share[0] - own, share[1] - (own if instance.pp == 1 else 0)


def whole_of(share: Span, ranks: int, *, engine: bool = False, deep: Fraction = ALIKE) -> Span:
    """How many there are in all, where the largest of some ranks has so many of them."""
    least = ((share[0] - 1) * ranks + 1) / most_of_share(ranks, engine=engine, deep=deep)
    return ceil(least), (share[1] + 1) * ranks - 1


def share_of(whole: Span, ranks: int, *, engine: bool = False, deep: Fraction = ALIKE) -> Span:
    """How many the largest of some ranks has of so many in all."""
    most = most_of_share(ranks, engine=engine, deep=deep)
    return whole[0] // ranks, ceil(whole[1] * most / ranks)


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """The counts that the parts of a plan tell, and where they contradict each other."""

    facts: Facts

    def model(self, instance: Instance) -> Model:
        """The model of an instance."""
        return self.facts.plan.graph.model(instance.model)

    def trained(self, instance: Instance) -> TrainedBytes:
        """Bytes of a trained number of an instance."""
        return TrainedBytes.of(instance, self.model(instance))

    @cached_property
    def known(self) -> dict[str, tuple[Part, Instance]]:
        """The weights of instances that have a size, by instance."""
        pairs = ((self.facts.parts.get(i.weights), i) for i in self.facts.plan.instances)
        return {i.name: (part, i) for part, i in pairs if part is not None and part.size}

    @cached_property
    def changed(self) -> dict[tuple[object, ...], Span]:
        """What training changes of each model that it changes in part, as gradients tell.

        Every `tp` rank has adapters whole, and its share of a model that has frozen parts.
        """
        found: dict[tuple[object, ...], Span] = {}
        for i in self.facts.plan.instances:
            part = self.facts.parts.get(i.gradients)
            if i.trained and part is not None and part.size:
                each = part.size // self.trained(i).gradient
                ranks = i.ranks if self.model(i).lora is None else i.pp * i.shards
                frozen = self.model(i).freeze
                seeing = trained_tower(i, frozen) if self.model(i).lora is None else 0
                share = without_tower(i, (each, each), seeing)
                least, most = whole_of(share, ranks, deep=fullest_stage(i))
                found[self._part(i)] = least + seeing, most + seeing
        return found

    def _part(self, instance: Instance) -> tuple[object, ...]:
        model = self.model(instance)
        return model.path, model.head, model.lora, model.freeze

    def changed_of(self, instance: Instance) -> Span | None:
        """What training changes of an instance's model in all; None where nothing tells it."""
        model = self.model(instance)
        if not model.trained_in_part:
            return self.wholes.get(which_weights(model))
        return self.changed.get(self._part(instance))

    def adapters_of(self, instance: Instance) -> Span | None:
        """The adapters of an instance's model in all; None where no gradients tell them."""
        if self.model(instance).lora is None:
            return 0, 0
        return self.changed.get(self._part(instance))

    @cached_property
    def evidence(self) -> list[tuple[str, str, Span]]:
        """For weights that one model fills: which they are, the part, and the parameters' count.

        Without adapters. Layers that come and go say nothing but that there are as many.
        """
        found = []
        for part, i in self.known.values():
            adapters = self.adapters_of(i)
            engine = i.options is not None
            more = engine and (i.drafter or getattr(i.options, "speculative", None) is not None)
            more = more or holds_bytes(i)
            if i.offload == "layers" or more or i.inside is not None or adapters is None:
                continue
            number = NUMBER[self.model(i).dtype]
            in_part = self.model(i).trained_in_part
            weight = number if in_part else self.trained(i).weight
            deep = fullest_stage(i)
            spread = share_of(adapters, i.pp * i.shards, deep=deep)
            beside = [each * self.trained(i).weight for each in spread]
            beside = [each + self._widened(i) for each in beside]
            base = (lent(part) - beside[1]) // weight, -(-(lent(part) - beside[0]) // weight)
            seeing = sum(i.seeing)
            base = without_tower(i, base, seeing)
            least, most = whole_of(base, i.ranks, engine=engine, deep=deep)
            span = least + seeing, most + seeing
            found.append((which_weights(self.model(i)), part.name, span))
        return found

    def _widened(self, instance: Instance) -> int:
        """Bytes by which trained numbers on a rank are wider than the frozen ones beside them."""
        part, each = self.facts.parts.get(instance.gradients), self.trained(instance)
        model = self.model(instance)
        if not (model.freeze and instance.trained and part is not None and part.size):
            return 0
        return part.size // each.gradient * (each.weight - NUMBER[model.dtype])

    @cached_property
    def wholes(self) -> dict[str, Span]:
        """Parameters by `which_weights`, as far as weights tell; they may be no count at all."""
        found: dict[str, Span] = {}
        for path, _, (least, most) in self.evidence:
            known = found.get(path, (least, most))
            found[path] = max(known[0], least), min(known[1], most)
        return found

    def on_rank(self, instance: Instance, ranks: int) -> Span | None:
        """Bytes of an instance's model on each of so many ranks; None where it is not known."""
        whole, adapters = (
            self.wholes.get(which_weights(self.model(instance))),
            self.adapters_of(instance),
        )
        if whole is None or adapters is None:
            return None
        model, engine = self.model(instance), (instance.options or instance.inside) is not None
        least, most = share_of(whole, ranks, engine=engine)
        number = NUMBER[model.dtype]
        span = (least + adapters[0]) * number, (most + adapters[1]) * number
        return fewest_bytes(instance, span, model)

    def contradictions(self) -> Iterator[str]:
        """Two weights of one path for which there is no common count."""
        for at, (path, name, span) in enumerate(self.evidence):
            for other, known, its in self.evidence[:at]:
                if other == path and (span[1] < its[0] or its[1] < span[0]):
                    yield f"{name} and {known} are of {path}, and not of as many parameters"


def which_weights(model: Model) -> str:
    """Which weights a model has: those of its path, with a head over the vocabulary or without."""
    return f"{model.path} with a value head" if model.head == "value" else model.path


def counts_of(facts: Facts) -> ParameterCounts:
    """The counts of a plan, made once for all rules."""
    found: ParameterCounts = facts.derived.setdefault("parameters", ParameterCounts(facts=facts))
    return found
