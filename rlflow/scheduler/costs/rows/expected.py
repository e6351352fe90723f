"""The rows that a node is expected to work on: how many, of how long prompts and responses.

Said by the user, measured in earlier runs, counted in data that is here, or assumed. Knows graphs
and records; no seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import fmean

from rlflow.graph.graph import Node
from rlflow.graph.roles import Drawn, Oversampled, Paused, Resumed, SamplingOptions
from rlflow.graph.rules.check import longest_response, most_rows, num_prompts
from rlflow.graph.rules.steps import mini_batches, sample_pieces
from rlflow.scheduler.costs import measurement_keys as keys
from rlflow.scheduler.costs.lengths import (
    Load,
    ResponseLengths,
    assumed,
    before,
    between,
    fitted_lengths,
    full_lengths,
    joined_lengths,
    scaled_lengths,
)
from rlflow.scheduler.costs.origins import Prompts, origins, response_tokens, sees_pictures
from rlflow.scheduler.costs.pieces import WHOLE, Piece
from rlflow.scheduler.costs.rows.given import given_lengths
from rlflow.scheduler.costs.rows.oversampled import of_complete, of_first
from rlflow.scheduler.costs.rows.uneven import most_prompts
from rlflow.scheduler.costs.sizes import Sizes
from rlflow.scheduler.devices.measured import Record
from rlflow.scheduler.models.prompts import PictureTokens, PromptTokens
from rlflow.scheduler.plan.row_layout import deals


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRows(Sizes):
    """Rows of one graph on one cluster, as far as seconds and bytes depend on them."""

    prompts: Prompts = field(default_factory=Prompts, compare=False, repr=False)
    off: tuple[float, float] = (1.0, 1.0)
    """What mean and spread of responses' lengths are multiplied by, for ranges; (1, 1) as known."""

    def rows(self, node: Node) -> int:
        """Rows that a node works on in one iteration; those of its data for an evaluation."""
        if node.op.name == "evaluate":
            drawn = node.as_a(Drawn)
            return int(drawn.limit or drawn.data.size() or 1)
        return most_rows(self.graph, node) or 1

    def tokens(self, node: Node) -> tuple[int, int]:
        """Prompt and response tokens of a row, at their longest, wherever rows come from.

        Of prompts what is said, what a tokenizer counts in a sample of local data, or as many as
        that has characters (on CPU devices always these), or an assumed number.
        """
        found = origins(self.graph, node)
        prompt = max(self.prompt_tokens(origin).longest for origin in found)
        return prompt, int(longest_response(self.graph, node) or max(map(response_tokens, found)))

    def prompt_tokens(self, origin: Node) -> PromptTokens:
        """Tokens of the prompts of rows that a node has made: said, counted, or assumed."""
        here = self.prompts.tokens(self.graph, origin, counted=not self.cluster.is_cpu)
        said = None if self.graph.lengths is None else self.graph.lengths.prompts
        if said is None:
            return here
        longest = math.ceil(said.max or said.mean)
        source = self.graph.lengths.source if self.graph.lengths else ""
        return PromptTokens(longest=longest, mean=said.mean, how=source, pictures=here.pictures)

    def usual_prompt(self, node: Node) -> float | None:
        """Tokens of a prompt in the mean; None where it counts as long as the longest."""
        found = [self.prompt_tokens(origin).mean for origin in origins(self.graph, node)]
        known = [mean for mean in found if mean is not None]
        return fmean(known) if len(known) == len(found) else None

    def lengths(self, node: Node) -> ResponseLengths:
        """How long the responses of a node's rows get: as said, measured before, or assumed."""
        known = self._lengths_known(node)
        return known if self.off == (1.0, 1.0) else scaled_lengths(known, *self.off)

    def _lengths_known(self, node: Node) -> ResponseLengths:
        if (paused := node.role(Paused)) is not None:
            return before(self._lengths_known(node.without(Paused)), paused.until)
        _, longest = self.tokens(node)
        found = origins(self.graph, node)
        if len(found) > 1:
            kinds = [(self.rows(one), self._lengths_known(one)) for one in found]
            return joined_lengths(kinds, longest)
        (origin,) = found
        if (sampling := origin.role(SamplingOptions)) is not None and sampling.ignore_eos:
            return full_lengths(longest)
        return self._of_origin(node, origin, longest)

    def _of_origin(self, node: Node, origin: Node, longest: int) -> ResponseLengths:
        """Lengths of a node's rows, whose responses one node has made."""
        drops, own = origin.role(Oversampled) is not None, node.name == origin.name
        said = None if self.graph.lengths is None else self.graph.lengths.responses
        record = None if said else self.lengths_seen(origin, longest)
        if record is not None:
            last = record.chosen[-1]
            kept = fitted_lengths(longest, last.length, last.longest, self.rows(origin))
            if not (drops and own):
                return kept
            # What was measured is of the rows that were kept, which lack the longest.
            return scaled_lengths(kept, kept.mean / self.of_batch(origin, kept).mean, 1.0)
        if drops:
            plain = origin.without(Oversampled)
            known = self._of_origin(plain, plain, longest)
            return known if own else self.of_batch(origin, known)
        return given_lengths(said, longest, self.rows(origin)) if said else assumed(longest)

    def lengths_seen(self, origin: Node, longest: int) -> Record | None:
        """What runs of this pipeline have measured of the responses that a node has made."""
        found = self.record_of(keys.lengths_key(self.graph, origin, longest))
        return found if found is not None and found.setting.pipeline == self.graph.name else None

    def lengths_from(self, origin: Node) -> Record | None:
        """What its lengths follow from: those that it has made, or has made when it kept all."""
        _, longest = self.tokens(origin)
        found = self.lengths_seen(origin, longest)
        return found or self.lengths_seen(origin.without(Oversampled), longest)

    def of_batch(self, node: Node, known: ResponseLengths) -> ResponseLengths:
        """Lengths of the rows that a rollout keeps, of those that it samples."""
        begun, wanted = self.begun(node), node.as_a(Oversampled).first_groups
        return of_first(known, begun, int(node.as_a(SamplingOptions).n or 1), wanted)

    def begun(self, node: Node) -> int:
        """How many groups a rollout begins in an iteration: of each prompt that it reads."""
        return num_prompts(self.graph, self.graph.node(node.sources[0])) or 1

    def load(self, node: Node, parts: int, piece: Piece = WHOLE) -> Load:
        """The rows of one pass: of an update those of a mini-batch, in whichever piece it is.

        The legs of a rollout have all rows; those of a rollout that goes on are prompts.
        """
        if node.op.use == "train" and not piece.groups:
            return self._load(node, parts * mini_batches(node), parts)
        load = self._load(node, parts, parts, 1.0 if piece.leg else piece.share)
        if (resumed := node.role(Resumed)) is not None:
            return load.going_on(resumed.first)
        if node.op.name == "act":
            return load.later_turn(int(node.as_a(SamplingOptions).max_new_tokens or 0))
        if piece.loose and piece.groups:
            n = max(load.rows / load.prompts, 1.0)
            return replace(load, lengths=of_complete(load.lengths, n, *piece.bounds))
        if piece.loose:
            prompts = min(load.prompts / piece.share, load.rows)
            return replace(load, prompts=prompts, lengths=between(load.lengths, *piece.bounds))
        return load

    def _load(self, node: Node, cuts: int, parts: int, share: float = 1.0) -> Load:
        """The rows of one of so many cuts of an iteration, or a share of it; whole rows at least.

        `parts` of them end together. Where those are engines of an accelerator, which decode what
        they were dealt, it is the one with the most prompts.
        """
        rows = self.rows(node)
        prompts = num_prompts(self.graph, node) or rows
        if node.role(Oversampled) is not None:
            rows, prompts = rows // prompts * self.begun(node), self.begun(node)
        prompts *= sample_pieces(node, prompts, parts)
        prompt, _ = self.tokens(node)
        dealt = most = prompts / cuts
        if node.op.use == "rollout" and not (self.cluster.is_cpu or deals(node)):
            most = float(most_prompts(dealt))
        return Load(
            rows=max(rows / prompts * most * share, 1.0),
            prompts=max(most * share, 1.0),
            prompt=prompt,
            lengths=self.lengths(node),
            peers=parts,
            usual=self.usual_prompt(node),
            pictures=self.pictures(node),
            dealt=dealt,
        )

    def pictures(self, node: Node) -> PictureTokens | None:
        """Tokens of the pictures that a node's model sees in a prompt; None where it sees none."""
        if not sees_pictures(node):
            return None
        found = (self.prompt_tokens(origin).pictures for origin in origins(self.graph, node))
        return next((seen for seen in found if seen is not None), None)

    def record_of(self, key: str) -> Record | None:
        """What was measured under a key, in a setting like this one."""
        return self.cluster.measured.find(key, self.setting)
