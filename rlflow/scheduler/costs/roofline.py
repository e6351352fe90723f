"""Seconds of forwards, updates and rollouts of one model on the ranks that share it.

The larger of compute time and memory time (Williams et al. 2009), no less than the launches
of the kernels, and beside it what ranks send each other. Knows no graph and no plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rlflow.graph.placement import Recompute
from rlflow.graph.rules.completion_order import ended_share
from rlflow.modelfiles.chunks import WIDE_BYTES
from rlflow.scheduler.costs.lengths import Load, attended_pairs, stages
from rlflow.scheduler.costs.ranks.draft_turns import DraftTurn
from rlflow.scheduler.costs.ranks.operators import operators
from rlflow.scheduler.costs.ranks.tower_seconds import TowerSeconds
from rlflow.scheduler.costs.rows.uneven import Step, fullest, slowest_replica
from rlflow.scheduler.devices import efficiency
from rlflow.scheduler.devices.collectives import ALONE
from rlflow.scheduler.models.flops import product_sizes, recomputed_layers
from rlflow.scheduler.models.mixtures import THERE_AND_BACK

# Operators of a decoding step of the embedded engine: a Qwen2 in bfloat16 on the meta device.
STEP_KERNELS_PER_LAYER, STEP_KERNELS_BESIDE = 48, 101
KERNELS_PER_LAYER, BESIDE_LAYERS = 12, 2
GRADIENT_COPIES = 4
# Bytes that are read and written to make two moments wide and round them: 36 numbers for each.
ROUNDED = 2 * 36 * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline(TowerSeconds):
    """Seconds of a model on its ranks; what they are and hold, `RankMemory` says.

    Its rollouts go by `turn`, where they draft: by n-grams, or by the model `proposer`.
    """

    turn: DraftTurn | None = None
    proposer: Roofline | None = None

    @property
    def kernels(self) -> int:
        """Kernels of one pass over all layers."""
        return (self.shape.layers + BESIDE_LAYERS) * KERNELS_PER_LAYER

    @property
    def overhead(self) -> float:
        """Seconds to launch the kernels of one pass over all layers."""
        return self.kernels * self.kind.launch

    def computed(self, tokens: float, predictions: float, pairs: float) -> float:
        """Seconds of the products of a forward; see `models/flops.py` for what is counted."""
        sizes = product_sizes(self.shape, predicts=self.predicts, ranks=self.tp.ranks)
        rate = self.kind.rate(self.size, tf32=self.tf32) * self.tp.ranks
        if self.on_cpu:
            return sizes.forward(tokens, predictions, pairs) / (rate * self.kind.sustained)
        row = 2 * pairs / max(tokens, 1.0)
        attention = self.attending_rate(rate, max(row, 1.0))
        products = rate * self.kind.sustained
        if not pairs:
            return sizes.forward(tokens, predictions, 0) / products
        return (
            sizes.forward(tokens, predictions, 0) / products
            + sizes.forward(0, 0, pairs) / (attention * self.attention_share)
            + self.scores_in_blocks(pairs)
        )

    def scores_in_blocks(self, pairs: float) -> float:
        """Seconds to read and write all scores, of whole squares, where blocks are multiplied."""
        if self.attention.by != "blocks":
            return 0.0
        scores = 2 * pairs * self.shape.heads * self.shape.layers / self.tp.ranks
        return self.read(scores * efficiency.BLOCK_BYTES)

    def passed(self, tokens: float, predictions: float, pairs: float) -> float:
        """Seconds of a forward's products and of all that layers compute between them.

        An accelerator does one kernel after the other. Those between products read and write.
        """
        computed = self.computed(tokens, predictions, pairs) + self.waited(tokens)
        computed /= self.filled(min(tokens, float(self.micro_tokens)))
        return computed if self.on_cpu else computed + self.read(tokens * self.between)

    def waited(self, tokens: float) -> float:
        """Seconds that products of experts take beyond those of one matrix with all their rows.

        The fullest rank has more than the mean; each expert's last tile of rows is half empty.
        """
        experts = self.experts
        rows = experts.rows(min(tokens, float(self.micro_tokens)))
        tiles = 0.0 if self.on_cpu or not rows else efficiency.TILE_ROWS / 2 / rows
        more = experts.uneven * (1 + tiles) - 1
        rate = self.kind.rate(self.size) * self.tp.ranks * self.kind.sustained
        return more * 2 * experts.active * tokens / rate if more else 0.0

    def dispatched(self, tokens: float) -> float:
        """Seconds in which a forward's tokens go to the ranks of their experts and come back.

        Two all-to-alls a layer, that of the fullest rank, and one of how many tokens there are.
        """
        if self.ep.ranks < 2:
            return 0.0
        size = self.experts.sent * self.experts.uneven * tokens * self.size
        one = THERE_AND_BACK * self.ep.all_to_all(size) + self.ep.all_to_all(0)
        return self.shape.expert_layers * one

    def exchanged(self, tokens: float, pairs: float, forwards: float, back: int = 0) -> float:
        """Seconds that ranks with parts of the same rows wait for what others have of these."""
        attended = 0.0 if self.on_cpu or self.cp.ranks < 2 else self.computed(0, 0, pairs)
        return self.rows.waited(tokens, attended, forwards, back)

    @property
    def between(self) -> float:
        """Bytes of a token that kernels between products read and write, in all layers.

        Norms those of a rank's own tokens, where ranks share the sequence. And experts'.
        """
        shape, ranks, wide = self.shape, self.tp.ranks, self.size / 2
        heads = shape.heads + shape.kv_heads + ranks * shape.repeated_heads(ranks)
        turned = heads * shape.head_dim * efficiency.ROTARY_BYTES
        gated = shape.ffn * efficiency.GATED_BYTES
        norms = 2 * self.layers.between * efficiency.NORM_BYTES
        routed = self.experts.picked * efficiency.ROUTED_BYTES
        routed += self.experts.met * shape.hidden * efficiency.SENT_BYTES
        layers = shape.layers * (norms + (turned + gated) / ranks)
        return wide * (layers + shape.expert_layers * routed)

    def multiplied(self, computed: float, size: float) -> float:
        """Seconds of products that read so many bytes of weights: both on a CPU, else the larger.

        The threads of a CPU that multiply are those that read.
        """
        if self.kind.weights:
            return computed + size / self.kind.weights
        return max(computed, self.read(size))

    def ending(self, load: Load) -> tuple[float, float, float]:
        """Tokens, predictions and pairs of attention of the part that is done last.

        Of ranks that share its rows one may have all predictions that its tokens can make.
        """
        more = 1.0 if self.on_cpu else fullest(load)
        pairs = load.pairs if self.on_cpu else more**2 * attended_pairs(load)
        tokens, predictions = more * load.tokens, more * (load.rows * load.lengths.mean)
        if self.cp.ranks == 1:
            return tokens, predictions, pairs
        part = tokens / self.cp.ranks
        return part, min(predictions, part), pairs / self.cp.ranks

    def brought(self) -> float:
        """Seconds to bring every layer from the host once."""
        if not self.streamed:
            return 0.0
        return self.weights / (self.kind.host_link * self.kind.reached)

    def launched(self, seconds: float, times: float = 1) -> float:
        """So many passes with their launches: a device runs beside them, a CPU does both."""
        overhead = times * self.overhead
        return seconds + overhead if self.on_cpu else max(seconds, overhead)

    def launched_by_torch(self, seconds: float, times: float = 1) -> float:
        """The same of forwards and updates: of three passes two are a backward.

        An accelerator waits for launches of torch's operators, some of which engines have fused.
        """
        if self.on_cpu:
            return self.launched(seconds, times)
        count = operators(self.shape, times, apart=self.ep.ranks > 1)
        return max(seconds, count * self.kind.launch)

    def beside(self, computed: float, sent: float) -> float:
        """Computing while the next layer's parameters come; on a CPU one after the other.

        Of two stages that each layer goes through, one layer of the shorter one is beside nothing:
        it comes before the first is computed, or leaves after the last.
        """
        if self.on_cpu:
            return computed + sent
        return max(computed, sent) + min(computed, sent) / (self.shape.layers + 1)

    def passes(self, load: Load) -> int:
        """Micro-batches that rows are cut into."""
        return max(1, math.ceil(load.tokens / self.pass_tokens(load)))

    def forward(self, load: Load) -> float:
        """Seconds of a forward over the rows of a part."""
        count, (tokens, predictions, pairs) = self.passes(load), self.ending(load)
        computed = self.passed(tokens, predictions, pairs)
        one = max(self.multiplied(computed / count, self.weights), self.brought())
        one = self.launched_by_torch(one)
        beside = self.agreed_passing(tokens) + self.dispatched(tokens) + self.scored(predictions)
        beside += self.exchanged(tokens, pairs, 1)
        return count * self.beside(one, self.gathered()) + beside + self.seen(load, count)

    def update(self, load: Load, trained: float, *, recompute: Recompute) -> float:
        """Seconds of one optimizer step on the rows of a part.

        A backward computes twice as much as a forward and gathers again; recomputing adds a
        forward of its layers (Chen et al. 2016), "selective" one without attention, and scores in
        chunks one of the head. Gradients are summed in every pass over `fsdp`, or in the last one,
        and there over replicas, `trained` bytes a rank. The step itself reads and writes what it
        keeps.
        """
        count, (tokens, predictions, pairs) = self.passes(load), self.ending(load)
        share = recomputed_layers(recompute, self.shape.layers) / self.shape.layers
        times = 3 + share
        whole = recompute is True
        computed = (4 if whole else 3) * self.passed(tokens, predictions, pairs) / count
        if self.in_chunks and not whole:
            computed += self.computed(0, predictions, 0) / count
        if share and not whole:
            again = 0 if recompute == "selective" and self.layers.keeps_attention else pairs
            computed += share * self.passed(tokens, 0, again) / count
        one = self.launched_by_torch(self.multiplied(computed, times * self.weights), times)
        one = self.beside_copies(one, times, self.layers.sent(tokens / count, recompute))
        gathered = (1 if self.kept_whole else 2) * self.gathered()
        agreed = (times - 1) * (self.agreed_passing(tokens) + self.dispatched(tokens))
        agreed += self.exchanged(tokens, pairs, 1 + share, 1)
        last = self.beside(one, gathered + self.shared_out(trained)) + self.added(trained)
        passed = count * last
        if self.reduces_last:
            added = self.added(trained * self.fsdp.ranks)
            passed = last + (count - 1) * (self.beside(one, gathered) + added)
        learned = self.learned(predictions) + count * self.summed(predictions / count)
        seen = self.seen(load, count, learning=True)
        return passed + agreed + learned + seen + self.replicas.all_reduce(trained)

    def beside_copies(self, computed: float, times: float, moved: float) -> float:
        """A forward while bytes leave, and a backward of the other `times` while they come."""
        if not moved:
            return computed
        copied, one = moved / (self.kind.host_link * self.kind.reached), computed / times
        if self.on_cpu:
            return computed + 2 * copied
        return max(one, copied) + max(computed - one, copied)

    def added(self, trained: float) -> float:
        """Seconds to add the gradients of a pass, `trained` bytes as they are summed, to their sum.

        On a CPU they are written, read again, and the sum is read and written; on an accelerator
        that is not counted.
        """
        return self.read(GRADIENT_COPIES * trained) if self.kind.weights else 0.0

    def step(self, trained: float, hosted: float = 0, *, rounded: bool = False) -> float:
        """Seconds of AdamW on `trained` parameters, of which `hosted` bytes come and go meanwhile.

        Weights and two moments are read and written, the gradient is read, as float32 or wider;
        the gradient is read once more for its norm. Moments that are `rounded` are made wide first,
        and hashed.
        """
        each = 8 * max(self.size, WIDE_BYTES) + (ROUNDED if rounded else 0)
        read = self.read(each * trained)
        copied = hosted / (self.kind.host_link * self.kind.reached)
        return read + 2 * copied if self.on_cpu else max(read, copied)

    def rollout(self, load: Load, leg: int = 0, legs: int = 1, n: float = 1) -> float:
        """Seconds to prefill the prompts and decode until the longest of all rows has ended.

        A step computes for the rows that are left, reads the weights and their keys and values.
        Of `legs` rows end in each as `ended_share` says, or groups of `n`; the prompts are of the
        first, and all that is done while rows wait: one of those may be the shortest. A drafter
        reads the prompts then, or what few enough rows that are left have so far.
        """
        if self.ep.ranks > 1:  # The experts of all ranks come to each first.
            layers = self.shape.layers
            moved = layers * self.ep.all_gather((self.apart + self.elsewhere) / layers)
            whole = replace(self, ep=ALONE, shard=ALONE, gathers=False)
            return self.gathered() + moved + whole.rollout(load, leg, legs, n)
        total = self.gathered() if self.gathers else 0.0
        room = self.at_once(load)
        found = stages(load.lengths, load.rows, load.peers, room)
        begins = 0 if self.turn is None else self.turn.begins(found)
        if not leg:
            for read in (self, None if begins else self.proposer):
                if read is not None:
                    total += read.agreed(load.prompts * load.mean_prompt) + read.prefill(load)
        # A group of n rows is complete with probability F^n where a row has ended with F.
        since, step = ended_share(leg, legs) ** (1 / n), self.stepping()
        until = 2.0 if leg + 1 == legs else ended_share(leg + 1, legs) ** (1 / n)
        taken = [step(stage.live, load.mean_prompt + stage.age) for stage in found]
        slower = 1.0 if self.on_cpu else slowest_replica(load, found, taken, step, room)
        for number, stage in enumerate(found):
            if since <= stage.ended < until:
                total += slower * stage.tokens * stage.goes_on * taken[number]
                if number == begins and begins and self.proposer is not None:
                    left = load.with_prompt(int(stage.age))
                    left = replace(left, rows=stage.live, prompts=stage.live)
                    total += stage.goes_on * self.proposer.prefill(left)
        return total

    def prefill(self, load: Load) -> float:
        """Seconds to read the prompts, each once: at once, or in the passes of an engine."""
        prompt, each = load.prompts * load.mean_prompt, load.mean_prompt
        each_pass = math.inf if self.serving is None else self.serving.prefill
        passes = max(1, math.ceil(prompt / each_pass))
        computed = self.passed(prompt, load.prompts, load.prompts * each**2 / 2)
        one = max(self.multiplied(computed / passes, self.weights), self.brought())
        return passes * self.launched(one) + self.seen(load, passes)

    def at_once(self, load: Load) -> float:
        """Rows that are computed at once: each has its response and its share of its prompt."""
        if self.serving is None:
            room = load.in_blocks(self.rows_at_once).at_once if self.paged else load.rows
            return min(load.rows, room)
        tokens = load.lengths.mean + load.prompts * load.mean_prompt / load.rows
        return self.serving.at_once(load.rows, tokens)

    def stepping(self) -> Step:
        """Seconds of one more token for each row, in expectation where several come at a time.

        The drafter passes once for each token that it proposes, then the policy reads them all.
        """
        turn, proposer = self.turn, self.proposer
        if turn is None:
            return self.decoding()
        policy, plain = self.decoding(turn.read), self.decoding()
        spans = (1, *(turn.beams for _ in range(turn.drafted - 1))) if turn.drafted else ()
        drafts = [proposer.passing(span) for span in spans] if proposer else []

        def step(rows: float, context: float) -> float:
            if rows > turn.rows:
                return plain(rows, context)
            drafted = sum(draft(rows, context) for draft in drafts)
            return (policy(rows, context) + drafted) / turn.tokens

        return step

    def decoding(self, span: int = 1) -> Step:
        """Seconds of a step in which each row reads `span` tokens after its context.

        An engine in a process of its own then schedules the next step.
        """
        one, serving, rate = self.passing(span), self.serving, self.kind.host
        if serving is None or self.on_cpu:
            return one
        return lambda rows, context: one(rows, context) + serving.scheduled(rows) * rate

    def passing(self, span: int = 1) -> Step:
        """Seconds of the model alone in such a step.

        An accelerator reads weights, then what is cached, and is idle as each kernel begins and
        ends. Of the embedded engine the host launches every kernel where graphs do not replay it.
        """
        reading, brought = self._reading(), self.brought()
        launch, replayed = self.kind.launch, self.kind.replayed
        stepped, captured = self.step_kernels, -1 if self.serving is None else self.serving.captured
        embedded = self.serving is None and not self.on_cpu

        def seconds(rows: float, context: float) -> float:
            tokens = rows * span
            found = reading(tokens, rows, context)
            if embedded:
                found += launch + stepped * replayed
                found = found if self.replays else max(found, stepped * launch)
            elif rows <= captured:
                found += launch + self.kernels * replayed
            else:
                found = self.launched(found)
            found = max(found, brought)
            return found + self.agreed(tokens)

        return seconds

    def _reading(self) -> Callable[[float, float, float], float]:
        """Seconds to read weights and what is cached, and to compute; of tokens, rows, context."""
        carried, cached = 2 * self.shape.carried(self.size), self.cache_bytes
        logit = self.logit(self.kind.drawn, efficiency.DRAWN_BYTES)
        ramps = self.kernels * efficiency.RAMP
        products = self.kind.rate(self.size, tf32=self.tf32) * self.tp.ranks * self.kind.sustained
        sizes = product_sizes(self.shape, predicts=self.predicts, ranks=self.tp.ranks)
        of_cache = self.kind.bandwidth * efficiency.CACHE_READ

        def seconds(tokens: float, rows: float, context: float) -> float:
            weights = self.share_of(self.shape.touched(tokens)) - self.spared
            # What a row carries is read and written.
            cache = rows * (context * cached + carried)
            drawn = self.over_vocabulary(tokens, logit)
            if self.on_cpu:
                computed = self.computed(tokens, tokens, tokens * context)
                if self.kind.weights:
                    return self.multiplied(computed, weights) + self.read(cache) + drawn
                return max(computed, self.read(weights + cache))
            computed = sizes.forward(tokens, tokens, 0) / products
            if self.kind.weights:
                return self.multiplied(computed, weights) + self.read(cache) + drawn
            return max(computed, self.read(weights)) + cache / of_cache + drawn + ramps

        return seconds

    @property
    def step_kernels(self) -> int:
        """Kernels of a decoding step of the embedded engine, as it was counted of one."""
        return self.shape.layers * STEP_KERNELS_PER_LAYER + STEP_KERNELS_BESIDE
