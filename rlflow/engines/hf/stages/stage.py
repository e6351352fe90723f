"""The stages of a pipeline that a rank has: some layers of a model, and what passes to others.

The module stays what it was, by every name. Layers of other stages let hidden states through; the
one before a stage's first layer takes what the stage before has sent, the one after its last sends
on (Huang et al., "GPipe", arXiv:1811.06965). A rank with several stages passes through one at a
time, in which the layers of its others are as if they were elsewhere. All ranks see the same rows,
so that each knows the shape of what comes: torch's `PipelineStage` takes tensors of one shape
alone, and packed micro-batches have as many shapes. This file knows neither rows nor the order of
passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlflow.contract.engines import ModelConfig
from rlflow.engines.hf.recompute import text_layers
from rlflow.engines.hf.routing.routers import find_routers
from rlflow.engines.hf.sharded.mesh import PAIRS, Axis, MeshRanks
from rlflow.engines.hf.stages.elsewhere import Elsewhere, PlaceWithin, Unread
from rlflow.modelfiles.families import family_of
from rlflow.modelfiles.layouts.stages import stage_layers
from rlflow.modelfiles.pictures.sights import GIVEN
from rlflow.modelfiles.pictures.towers import TOWERS, is_tower

Output = TypeVar("Output")


class LayerStage:
    """What this rank has of stages of so many `layers`: those of numbers `place`, + `count`, ...

    There are `count` ranks along `pp`, with `virtual` stages each, and it is in the one of turn
    `turn` (Narayanan et al., arXiv:2104.04473, section 2.2: virtual stages).
    `entered` is what the last pass began with here and `left` what it ended with, `[1, tokens,
    size]`; both are None before a pass, and where this is the first stage, or the last. What goes
    on and what comes back have groups of their own, for NCCL sends in the order of one queue, and
    so has what goes from the last rank to the first one.
    The first and the last rank both hold weights of names that are `repeated`; of its parts a
    rank has some `unread`, by their forwards, for their weights alone. The embedding is `blank` in
    turns that do not begin with it. Each stage has so many `routers` of experts.
    """

    def __init__(self, ranks: MeshRanks, layers: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.place, self.count = ranks.place("pp"), ranks.sizes["pp"]
        assert len(layers) % self.count == 0, (layers, self.count)
        self.of_stages = layers
        self.virtual = len(layers) // self.count
        self.turn = 0
        self.layers = tuple(_own(layers, n) for n in range(self.place, len(layers), self.count))
        self.routers = (0,) * len(layers)
        self.group = ranks.groups["pp"]
        self._onward = [self.group] + [self._group() for _ in range(self.virtual > 1)]
        self._returning = [self._group() for _ in self._onward]
        self.entered: Tensor | None = None
        self.left: Tensor | None = None
        self.repeated: frozenset[str] = frozenset()
        self.unread: frozenset[nn.Module] = frozenset()
        self.blank: Unread | None = None
        self._put: list[tuple[PlaceWithin, ...]] = [()] * self.virtual
        self._within = False
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def _group(self) -> dist.ProcessGroup:
        """Another group of the same ranks."""
        members = dist.get_process_group_ranks(self.group)
        made: dist.ProcessGroup = dist.new_group(
            members, use_local_synchronization=True, group_desc=f"{PAIRS}stages"
        )
        return made

    @property
    def router_places(self) -> tuple[int, ...]:
        """Where its routers are among those of the whole model."""
        return self._routers_of(self.place)

    @property
    def routers_now(self) -> slice:
        """Which of its routers the pass goes through that is in progress."""
        if not self._within:
            return slice(None)
        counts = self.routers[self.place :: self.count]
        return slice(sum(counts[: self.turn]), sum(counts[: self.turn + 1]))

    def _routers_of(self, place: int) -> tuple[int, ...]:
        """Where the routers are that a rank has, in the order of its turns."""
        stages = range(place, len(self.routers), self.count)
        return tuple(n for stage in stages for n in _own(self.routers, stage))

    @property
    def number(self) -> int:
        """Which stage of all it is in."""
        return self.turn * self.count + self.place

    @property
    def first(self) -> bool:
        """Whether it is in the stage with the embedding."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it is in the stage with the head, and what is made of it."""
        return self.number == len(self.of_stages) - 1

    @property
    def has_first(self) -> bool:
        """Whether one of its stages has the embedding."""
        return self.place == 0

    @property
    def has_last(self) -> bool:
        """Whether one of its stages has the head."""
        return self.place == self.count - 1

    def put_in(self, turn: int, spots: Sequence[PlaceWithin]) -> None:
        """What lies elsewhere in a turn: for ever where there is one, else within it."""
        if self.virtual > 1:
            self._put[turn] = tuple(spots)
            return
        for spot in spots:
            spot.put(spot.within)

    @contextmanager
    def in_turn(self, turn: int) -> Iterator[None]:
        """Pass through one of its stages within the block; the others are as if elsewhere."""
        self.turn, self._within = turn, True
        self.entered = self.left = None
        for spot in self._put[turn]:
            spot.put(spot.within)
        try:
            yield
        finally:
            for spot in self._put[turn]:
                spot.put(spot.part)
            self._within = False

    def through_all(self, forward: Callable[..., Output]) -> Callable[..., Output]:
        """A forward that passes through all of its stages, or within a turn through that one.

        Pictures are for the stage that embeds; others are sent what was made of them.
        """

        def through(*args: Any, **kwargs: Any) -> Output:
            given = kwargs if self.first else {n: v for n, v in kwargs.items() if n not in GIVEN}
            return forward(*args, **given)

        def call(*args: Any, **kwargs: Any) -> Output:
            if self._within:
                return through(*args, **kwargs)
            for turn in range(self.virtual):
                with self.in_turn(turn):
                    output = through(*args, **kwargs)
            return output

        return call

    def take(self, like: Tensor) -> Tensor:
        """What the stage before sends of this pass, as a leaf of this stage's graph."""
        came = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        before = (self.place - 1) % self.count
        dist.recv(came, group=self._onward[-(self.place == 0)], group_src=before)
        self.entered = came.requires_grad_(torch.is_grad_enabled())
        return self.entered

    def leave(self, hidden: Tensor) -> Tensor:
        """Send to the stage after this one what this one has made."""
        self.left = hidden
        self._send(hidden.detach(), self._onward[-self.has_last], (self.place + 1) % self.count)
        return hidden.detach()

    def passed(self) -> tuple[Tensor | None, Tensor | None]:
        """What the last pass began and ended with; the stage lets go of it."""
        found = self.entered, self.left
        self.entered = self.left = None
        return found

    def gradient(self, left: Tensor) -> Tensor:
        """What the stage after this one sends back of a pass: the gradient of its end here."""
        came = torch.empty_like(left, memory_format=torch.contiguous_format)
        after = (self.place + 1) % self.count
        dist.recv(came, group=self._returning[-self.has_last], group_src=after)
        return came

    def give_back(self, entered: Tensor) -> None:
        """Send to the stage before this one the gradient of what it sent."""
        found = torch.zeros_like(entered) if entered.grad is None else entered.grad
        before = (self.place - 1) % self.count
        self._send(found, self._returning[-self.has_first], before)

    def flush(self) -> None:
        """Wait until all that was sent is with the others."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _send(self, values: Tensor, group: dist.ProcessGroup, place: int) -> None:
        """Send without waiting; values are kept until they have gone."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        sent = values.contiguous()
        work = dist.isend(sent, group=group, group_dst=place)
        assert work is not None
        self._sent.append((work, sent))

    def add_repeated(self, gradient: Tensor) -> None:
        """Add up, in place, the gradient of a weight that the first and the last rank hold.

        Called by these two.
        """
        returning = self._returning[0]
        if self.has_last:
            dist.send(gradient.contiguous(), group=returning, group_dst=0)
            total = torch.empty_like(gradient, memory_format=torch.contiguous_format)
            dist.recv(total, group=self.group, group_src=0)
            gradient.copy_(total)
            return
        other = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.recv(other, group=returning, group_src=self.count - 1)
        gradient.add_(other)
        dist.send(gradient.contiguous(), group=self.group, group_dst=self.count - 1)

    def last_says(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the last stage has found, on the CPU, on all: these have tensors of its shapes."""
        made: dict[str, Tensor] = {}
        for name in sorted(found):
            here = found[name].to(self.ranks.device).contiguous()
            dist.broadcast(here, group=self.group, group_src=self.count - 1)
            made[name] = here.cpu()
        return made

    def joined(self, own: Tensor) -> Tensor:
        """What ranks have found of their routers `[tokens, routers * k]`, in the model's order."""
        axes: tuple[Axis] = ("pp",)
        k = self.ranks.most(own.shape[1] // max(1, len(self.router_places)), axes)
        found = torch.empty((len(own), sum(self.routers), k), dtype=own.dtype)
        for place in range(self.count):
            routers = self._routers_of(place)
            here = own if place == self.place else own.new_empty((len(own), len(routers) * k))
            sent = here.to(self.ranks.device).contiguous()
            # Neither gloo nor NCCL knows numbers of 16 bits.
            dist.broadcast(sent.view(torch.uint8), group=self.group, group_src=place)
            found[:, list(routers)] = sent.cpu().view(len(own), len(routers), k)
        return found.flatten(1)


def stage_of(
    ranks: MeshRanks, config: ModelConfig, stages: tuple[int, ...] | int = 1
) -> LayerStage | None:
    """The stages of this rank, of so many layers each or so many of them; None where there is one.

    The layers are those of a model of that `config`.
    """
    count = ranks.sizes["pp"]
    if count == 1:
        return None
    known = isinstance(stages, tuple) and stages
    layers, count = config.get_text_config().num_hidden_layers, count * stages_each(stages, count)
    least = max(1, family_of(config.to_dict()).deep)
    return LayerStage(ranks, known or stage_layers(layers, count, least=least))


def stages_each(stages: tuple[int, ...] | int, count: int) -> int:
    """How many stages each of `count` ranks has, of `stages` of so many layers, or so many."""
    return stages if isinstance(stages, int) else max(1, len(stages) // count)


def _own(counts: Sequence[int], place: int) -> range:
    """Which of things a stage has, of which each has so many."""
    start = sum(counts[:place])
    return range(start, start + counts[place])


class Entrance(Elsewhere):
    """In the place of the layer before a stage's first one."""

    def __init__(self, layer: nn.Module, stage: LayerStage) -> None:
        super().__init__(layer)
        self.stage = stage

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """What comes from the stage before; `hidden_states` has its shape alone."""
        return self.stage.take(hidden_states)


class Exit(Elsewhere):
    """In the place of the layer after a stage's last one."""

    def __init__(self, layer: nn.Module, stage: LayerStage) -> None:
        super().__init__(layer)
        self.stage = stage

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Send them to the stage after this one."""
        return self.stage.leave(hidden_states)


def cut_stage(module: nn.Module, stage: LayerStage, dtype: torch.dtype) -> None:
    """Leave of a module on the meta device a rank's stages, computed with in `dtype`, and its ends.

    The first stage has the embedding and what sees, the last all else beside layers. An embedding
    that is the head's weight as well stays on both of their ranks.
    """
    layers = text_layers(module)
    _count_routers(module, list(layers.values()), stage)
    beside, embedding = _cut_ends(module, layers, stage, dtype)
    for number, (name, layer) in enumerate(layers.items()):
        if not any(number in own for own in stage.layers):
            _put(module, name, Elsewhere(layer))
    for turn, own in enumerate(stage.layers):
        stage.turn = turn
        spots = [
            PlaceWithin(module, name, _beyond(layer, number, own, stage))
            for number, (name, layer) in enumerate(layers.items())
            if number not in own
        ]
        if stage.has_last and not stage.last:
            spots += [PlaceWithin(module, name, Elsewhere(part)) for name, part in beside]
        if stage.has_first and not stage.first:
            stage.blank = stage.blank or Unread(embedding[1].embedding_dim, dtype)
            spots.append(PlaceWithin(module, embedding[0], stage.blank))
        stage.put_in(turn, spots)
    stage.turn = 0
    module.forward = stage.through_all(module.forward)


def _count_routers(module: nn.Module, layers: Sequence[nn.Module], stage: LayerStage) -> None:
    routers = set(find_routers(module))
    held = [len(routers.intersection(layer.modules())) for layer in layers]
    numbers = range(len(stage.of_stages))
    stage.routers = tuple(sum(held[n] for n in _own(stage.of_stages, each)) for each in numbers)


def _cut_ends(
    module: nn.Module, layers: dict[str, nn.Module], stage: LayerStage, dtype: torch.dtype
) -> tuple[list[tuple[str, nn.Module]], tuple[str, Any]]:
    """Leave what is beside layers where it belongs; those parts, and the embedding, by name."""
    inner: Any = getattr(module, "body", module)
    embedding = inner.get_input_embeddings()
    names = {part: known for known, part in module.named_modules()}
    own = {id(p) for layer in layers.values() for p in layer.parameters()}
    tied = {id(p) for p in embedding.parameters()} & {
        id(p)
        for part, name in names.items()
        if part is not embedding and not list(part.children())
        for p in part.parameters()
    }
    beside = [
        (names[part], part)
        for part in module.modules()
        if part is not embedding and any(id(p) not in own for p in part.parameters(recurse=False))
        if not is_tower(names[part])
    ]
    if not stage.has_first:
        for part, name in names.items():
            if name.rpartition(".")[2] in TOWERS:
                _put(module, name, Elsewhere(part))
    if not stage.has_last:
        for name, part in beside:
            _put(module, name, Elsewhere(part))
    unread = Unread(embedding.embedding_dim, dtype)
    if not stage.has_first and tied:
        embedding.forward = unread.forward if stage.has_last else embedding.forward
        stage.unread = frozenset({embedding})
    if not stage.has_first and not (tied and stage.has_last):
        _put(module, names[embedding], unread)
    if tied and (stage.has_first or stage.has_last):
        stage.repeated = frozenset(
            f"{names[embedding]}.{n}" for n, _ in embedding.named_parameters()
        )
    return beside, (names[embedding], embedding)


def _beyond(layer: nn.Module, number: int, own: range, stage: LayerStage) -> Elsewhere:
    """What is in the place of a layer in the turn of a rank's `own` ones."""
    if number == own.start - 1:
        return Entrance(layer, stage)
    return Exit(layer, stage) if number == own.stop else Elsewhere(layer)


def _put(module: nn.Module, name: str, part: nn.Module) -> None:
    """Put a module in the place of the one of that name."""
    above, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(above), leaf, part)
