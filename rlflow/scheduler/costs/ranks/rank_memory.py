"""Bytes of forwards, updates and rollouts of one model on the ranks that share it.

What a pass holds beside the model, by name, where it holds most. Knows no seconds, no graph and
no plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from rlflow.graph.op import Use
from rlflow.graph.placement import ContextBy, Recompute
from rlflow.modelfiles.chunks import PLAIN, PRODUCT, chunk_bytes
from rlflow.modelfiles.kernels.attention import AttentionChoice
from rlflow.modelfiles.layouts.stages import under_way, weights_behind
from rlflow.modelfiles.paging import MOST_ROWS
from rlflow.scheduler.costs.lengths import Load
from rlflow.scheduler.costs.ranks.attending import attention_there
from rlflow.scheduler.costs.ranks.row_share import RowShare
from rlflow.scheduler.costs.ranks.tower_bytes import left_bytes, passing_bytes
from rlflow.scheduler.costs.serving import Serving
from rlflow.scheduler.devices.collectives import ALONE, Group
from rlflow.scheduler.devices.hardware import Kind
from rlflow.scheduler.models.activations import LayerBytes
from rlflow.scheduler.models.gradients import WholeGradients
from rlflow.scheduler.models.mixtures import Experts
from rlflow.scheduler.models.shapes import Shape
from rlflow.scheduler.models.stages import stage_shapes
from rlflow.scheduler.plan.plan import MICRO_TOKENS

LAYERS_GATHERED = 2
SCORE_BYTES = 8

CACHE, ACTIVATIONS, GRAPHS = "KV cache", "activations", "graphs"
EMBEDDED = "gradient of the embedding"
SUMMED = "sum of the head's gradient"
REDUCED = "gradients on their way to the ranks"
SEEN = "activations of the tower"
EXCHANGED = "tokens on their way to other ranks"
Holds = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One model on its ranks: `tp` of them share each layer, `fsdp` the parameters.

    `size` is bytes of a number; `predicts` says whether there is a head over the vocabulary;
    `gathers` whether parameters have to be made whole before a layer computes; `streamed`
    whether layers come from the host. Of the `fsdp` ranks `ep` have different experts, and those
    that share the same ones are a `shard`; `cp` have parts of the same rows, and attend `cp_by`
    heads or round a ring. With `serving` keys and values lie in a pool of its own,
    prompts are read some at a time, and rows wait for room. A pass sees at most `micro_tokens`
    tokens, or one row. With `trains_vocabulary` a backward has a gradient of the embedding. A
    `paged` rollout has a pool of blocks for `rows_at_once` rows, and graphs unless layers are
    `streamed`. A rank holds `spared` bytes fewer of weights than it computes with. What an update
    keeps of its layers goes to the host and comes back where it `hosts_activations`. Ranks of `tp`
    share the `sequence` in forwards and updates, or add up all tokens. Where it `reduces_last`
    gradients are whole until the last pass of an update. Products of float32 numbers go by `tf32`,
    where the device has it. Kernels read each logit once where the head goes `by_rows`. Of `pp`
    stages, which send each other by `hop`, each has other layers; what is held is that of one
    `stage`, or of the fullest. A rank may have several `virtual` stages. Of its micro-batches
    `in_flight` are under way at once, which may be through some of its stages. Where it `splits`
    backwards, what makes gradients of weights is kept of up to `behind` others.
    """

    kind: Kind
    shape: Shape
    size: int
    predicts: bool = True
    gathers: bool = False
    streamed: bool = False
    kept_whole: bool = False
    sequence: bool = False
    reduces_last: bool = False
    hosts_activations: bool = False
    serving: Serving | None = None
    micro_tokens: int = MICRO_TOKENS
    trains_vocabulary: bool = False
    paged: bool = False
    rows_at_once: int = MOST_ROWS
    spared: int = 0
    tf32: bool = False
    by_rows: bool = False
    tp: Group = ALONE
    fsdp: Group = ALONE
    ep: Group = ALONE
    shard: Group = ALONE
    cp: Group = ALONE
    cp_by: ContextBy | None = None
    replicas: Group = ALONE
    pp: int = 1
    virtual: int = 1
    stage: int | None = None
    hop: Group = ALONE
    in_flight: float = 1
    splits: bool = False
    behind: int = 0

    @property
    def stages(self) -> tuple[tuple[Self, int], ...]:
        """Each stage as if it were a model of its own; of equal ones the first, and how many.

        The first of them has the most micro-batches under way.
        """
        kinds = self._kinds
        each = ((self._of(kind, kinds.index(kind)), n) for kind, n in Counter(kinds).items())
        return tuple(each)

    def stage_at(self, place: int) -> Self:
        """The stage at a place along pp, as if it were a model of its own."""
        return self._of(self._kinds[place], place)

    def _held_stages(self) -> Iterator[RankMemory]:
        """Those of which the fullest is what is held."""
        if self.pp == 1:
            yield self
        elif self.stage is not None:
            yield self.stage_at(self.stage)
        else:  # Equal stages hold alike, or the first one most, where backwards are whole.
            places = range(len(self._kinds)) if self.splits else ()
            yield from map(self.stage_at, places) if places else (s for s, _ in self.stages)

    @property
    def _kinds(self) -> list[tuple[Shape, bool]]:
        """The shape of the stages at each place, and whether they predict tokens."""
        shapes = stage_shapes(self.shape, self.pp, virtual=self.virtual, predicts=self.predicts)
        last = len(shapes) - 1
        return [(shape, self.predicts and place == last) for place, shape in enumerate(shapes)]

    def _of(self, kind: tuple[Shape, bool], place: int) -> Self:
        ahead = under_way(place, min(self.pp, self.shape.layers), self.virtual)
        behind, (shape, predicts) = weights_behind(place) if self.splits else 0, kind
        one = replace(self, shape=shape, predicts=predicts, replicas=ALONE, pp=1)
        return replace(one, in_flight=ahead, behind=behind)

    @property
    def weights(self) -> float:
        """Bytes of the parameters that a rank computes with."""
        return self.share_of(self.shape.parameters) + self.seeing - self.elsewhere

    @property
    def seeing(self) -> float:
        """Bytes of a tower beyond an equal share of it, which each rank along `tp` has whole."""
        return self.shape.tower * self.size * (1 - 1 / self.tp.ranks)

    def share_of(self, parameters: float) -> float:
        """Bytes on a rank of so many parameters, and of the keys and values that ranks repeat."""
        repeated = self.shape.repeated_keys(self.tp.ranks) * self.size
        return parameters * self.size / self.tp.ranks + repeated

    @property
    def experts(self) -> Experts:
        """The experts of a rank."""
        return Experts(shape=self.shape, tp=self.tp.ranks, ep=self.ep.ranks)

    @property
    def elsewhere(self) -> float:
        """Bytes of experts that tokens go to, which other ranks compute with."""
        return self.experts.elsewhere * self.size

    @property
    def attention(self) -> AttentionChoice:
        """What computes attention on its devices."""
        shape, chip = self.shape, self.kind.chip
        return attention_there(self.on_cpu, self.size, shape.head_dim, shape.softcap, chip)

    @property
    def on_cpu(self) -> bool:
        """Whether its device is a processor of the host."""
        return self.kind.name == "cpu"

    @property
    def apart(self) -> float:
        """Bytes of a rank's experts where those lie apart, and are gathered by themselves."""
        return self.experts.held * self.size if self.ep.ranks > 1 else 0.0

    def holds(
        self, use: Use | None, load: Load, *, recompute: Recompute, numbers: int = PLAIN
    ) -> Holds:
        """What a use holds beside the model, by name, in bytes; `numbers` as of `predicted`."""
        if use == "rollout":
            return self.rollout_holds(load)
        train = use == "train"
        each = (
            stage.pass_holds(load, train=train, recompute=recompute, numbers=numbers)
            for stage in self._held_stages()
        )
        return max(each, key=lambda held: sum(size for _, size in held))

    @property
    def replays(self) -> bool:
        """Whether the embedded engine replays its steps from graphs."""
        return self.paged and not self.streamed

    @property
    def cache_bytes(self) -> float:
        """Bytes of keys and values of one token on each rank; latents are whole on all of them."""
        return self.shape.cached_on_each(self.tp.ranks) * self.size

    @property
    def layers(self) -> LayerBytes:
        """What its layers hold on a rank."""
        return LayerBytes(
            shape=self.shape,
            size=self.size,
            ranks=self.tp.ranks,
            sequence=self.tp.ranks if self.sequence else 1,
            ep=self.ep.ranks,
            exchanged=self.rows.kept,
            hosted=self.hosts_activations,
            keeps_attention=self.attention.by != "flex",
        )

    @property
    def rows(self) -> RowShare:
        """The ranks that have parts of the same rows."""
        return RowShare(
            shape=self.shape, size=self.size, by=self.cp_by, group=self.cp, tp=self.tp.ranks
        )

    @property
    def in_chunks(self) -> bool:
        """Whether forwards and updates make distributions for a few tokens at a time."""
        return self.predicts and not self.on_cpu

    def predicted(self, predictions: float, numbers: int = PLAIN) -> int:
        """Bytes of the distributions that a forward or an update holds at a time.

        Of each logit so many `numbers` are alive (`rlflow.modelfiles.chunks`), none but the product
        where kernels go by its rows.

        A head that an adapter changes is not computed in chunks, which is not counted.
        """
        if not self.in_chunks:
            return self.scores(predictions)
        numbers = PRODUCT if self.by_rows else numbers
        return chunk_bytes(predictions, self.own_vocabulary, self.size, numbers)

    @property
    def own_vocabulary(self) -> int:
        """Of the vocabulary, what a rank has."""
        return math.ceil(self.shape.vocab / self.tp.ranks)

    def scores(self, predictions: float) -> int:
        """Bytes of logits and of their float32 log-probs, before and after the temperature."""
        if not self.predicts:
            return 0
        return int(predictions * self.shape.vocab * (self.size + SCORE_BYTES))

    def held_whole(self, *, twice: bool = False) -> int:
        """Bytes of parameters made whole for a pass: embedding, head, and two layers.

        As a forward begins, embedding and head are there `twice`: as they came, and as they are
        used.
        """
        if not self.gathers:
            return 0
        count = self.shape.embedding + self.shape.tower + LAYERS_GATHERED * self.shape.layer
        count = min(count, self.shape.parameters) + twice * self.shape.embedding
        apart = LAYERS_GATHERED * self.elsewhere / self.shape.layers
        return int(count * self.size / self.tp.ranks + self.seeing - apart)

    def pass_holds(
        self, load: Load, *, train: bool, recompute: Recompute, numbers: int = PLAIN
    ) -> Holds:
        """What a forward, or a forward and a backward, of one micro-batch holds at the most."""
        tokens = self.most_tokens(load)
        logits = self.predicted(min(load.rows * load.lengths.longest, tokens), numbers)
        if train:
            count = max(1, math.ceil(load.most_tokens / tokens))
            begun, behind = min(self.in_flight, count), min(self.behind, count - 1)
            found = self._update_holds(tokens, logits, recompute, begun, behind)
            seen = left_bytes(self.shape, self.size, load, tokens)
            return _largest_first(*found, (SEEN, int(begun * seen)))
        activations = self._passing(load, tokens)
        whole = self.held_whole()
        if self.in_chunks:  # Layers are done before the head begins.
            activations, logits = max((activations, 0), (0, logits), key=sum)
        if not self.on_cpu:
            whole = max(whole, self.held_whole(twice=True) - activations - logits)
        return _largest_first(
            (ACTIVATIONS, activations),
            ("logits", logits),
            ("gathered weights", whole),
            (EXCHANGED, int(self.rows.working * tokens)),
        )

    def _passing(self, load: Load, tokens: float) -> int:
        """Bytes of the activations of a pass that leaves none: a layer's, before it the tower's."""
        seen = passing_bytes(self.shape, self.size, load, tokens)
        return max(int(self.layers.passing * tokens), seen)

    def _update_holds(
        self, tokens: float, logits: int, recompute: Recompute, under_way: float, behind: int
    ) -> Holds:
        """What an update holds as its backward begins, at the head, or in a layer, if that is more.

        On a CPU, where distributions are whole, both at once. What other micro-batches that are
        under way have left is there in any case.
        """
        made, whole, waiting = self.gradients, self.held_whole(), 0
        summed, left = made.summed, int(self.layers.left(tokens, recompute))
        late = int(self.layers.for_weights * self.shape.layers * tokens) if self.behind else 0
        others = int((under_way - 1) * left) + behind * late
        activations = max(int(self.layers.worked_on(tokens, recompute)), late) + others
        if not self.on_cpu:
            first = left + others
            layer, waiting = activations + int(self.layers.gated * tokens), made.reduced
            if first + logits + summed >= layer + waiting:
                activations, waiting = first, 0
            else:
                activations, logits, summed = layer, 0, 0
        gradients = whole if self.on_cpu else max(whole - activations, 0)
        gathered = whole + gradients
        if self.kept_whole:  # And the last layer as it came; layers go as their gradients come.
            apart = self.elsewhere / self.shape.layers
            kept = int(self.weights + self.shape.layer * self.size / self.tp.ranks - apart)
            gathered = kept + gradients if self.on_cpu else max(kept, gathered)
        return _largest_first(
            (ACTIVATIONS, activations),
            ("logits", logits),
            ("gathered weights", gathered),
            (EMBEDDED, made.embedded),
            (SUMMED, summed),
            (REDUCED, waiting),
            (EXCHANGED, int(self.rows.working * tokens)),
        )

    def pass_tokens(self, load: Load) -> float:
        """The most tokens of a micro-batch, on all ranks that have parts of its rows."""
        return max(self.micro_tokens * self.cp.ranks, load.longest_row)

    def most_tokens(self, load: Load) -> float:
        """The most tokens of a micro-batch that a rank has."""
        return min(load.most_tokens, self.pass_tokens(load)) / self.cp.ranks

    @property
    def gradients(self) -> WholeGradients:
        """Gradients that are whole on a device beside the sums that an optimizer reads."""
        return WholeGradients(
            shape=self.shape,
            size=self.size,
            ranks=self.tp.ranks,
            gathered=self.gathers,
            predicts=self.predicts,
            trains_vocabulary=self.trains_vocabulary,
            in_chunks=self.in_chunks,
            elsewhere=int(self.experts.elsewhere / self.shape.layers),
        )

    def rollout_holds(self, load: Load) -> Holds:
        """What a rollout holds with every row at its longest.

        What a recorded step makes stays its own, beside that of steps that are not.
        """
        rows = load.most or load.rows
        prompts = rows if load.most else load.prompts
        tokens, carried = max(prompts * load.prompt, rows), self.shape.carried(self.size)
        cache = int(rows * load.longest_row * self.cache_bytes) + int(rows * carried)
        if self.serving is not None:
            tokens, cache, rows = min(tokens, self.serving.prefill), 0, self.serving.rows(rows)
        graphs = 0
        if self.paged:
            blocks = load.in_blocks(self.rows_at_once)
            tokens = min(tokens, max(blocks.at_once // blocks.n * load.prompt, blocks.at_once))
            # States have a line for every row, and one that is nobody's.
            states = int((load.rows + 1) * carried)
            cache, rows = int(blocks.pool * self.cache_bytes) + states, blocks.slots
            graphs = int(self.scores(rows) + self.layers.passing * rows) if self.replays else 0
        activations = self._passing(load, tokens)
        return _largest_first(
            (CACHE, cache),
            (ACTIVATIONS, activations),
            ("logits", self.scores(rows)),
            (GRAPHS, graphs),
            (
                "gathered weights",
                int(self.weights + self.elsewhere + self.apart) if self.gathers else 0,
            ),
        )


def _largest_first(*parts: tuple[str, int]) -> Holds:
    """The parts that hold anything, the largest first."""
    return tuple(sorted((part for part in parts if part[1]), key=lambda part: -part[1]))
