"""Speculative decoding: a small model proposes tokens, of which the policy reads several at once.

Every token is the one that the policy draws with the sample's own number of its position. The
drafter draws with the same number from its own distribution, so that the two often choose alike;
a wrong proposal costs time alone, for the tokens do not depend on the drafter (Daliri, Musco and
Suresh 2024, arXiv:2408.07978, call that drafter-invariant). Rounding does: a pass of another
shape adds in another order, which matters where a number lies as close to a bound of the
distribution function. This file knows neither engines nor how good a drafter is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from rlflow.batch import select_field
from rlflow.contract.engines import ModelConfig
from rlflow.contract.values import Reach, Sampling
from rlflow.engines.hf.forward.packed import pack_prompts
from rlflow.engines.hf.generate.attention import RaggedAttention
from rlflow.engines.hf.generate.cache import RaggedCache
from rlflow.engines.hf.generate.decoding import DRAWN, Decoding, Responses, prefill
from rlflow.engines.hf.models import TorchModel
from rlflow.errors import Finding, RunError

# A drafter that begins late reads so many tokens of each row at a time.
READ = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Who proposes tokens, and how many a turn; none at all where `tokens` is 0.

    `model` has the tokenizer of the policy and lies on its device. It proposes in turns of at
    most so many live `rows`; None: in all.
    """

    model: TorchModel
    tokens: int
    rows: int | None = None


class Reader:
    """A model that reads tokens of live rows on a cache of its own, rows of any lengths."""

    def __init__(self, model: TorchModel, sizes: Tensor, n: int, columns: int) -> None:
        self.model = model
        self.cache = RaggedCache(sizes, n, columns, model.device)
        self.attention = RaggedAttention(self.cache)

    def read(self, tokens: Tensor, starts: Tensor, furthest: int, last: bool = False) -> Tensor:
        """Logits `[live, span, vocabulary]` after `tokens [live, span]`, of `last` the last alone.

        They become the new tokens `starts [live]` and on of their rows, `furthest` of the row
        that has most. Positions beyond the context, of tokens nobody keeps, are its last.
        """
        rows, span = tokens.shape
        missing = self.cache.rows - rows
        tokens = nn.functional.pad(tokens, (0, 0, 0, missing))
        starts = nn.functional.pad(starts, (0, missing))
        self.cache.open(starts, span, furthest)
        column = torch.arange(span, device=tokens.device)
        positions = (self.cache.lengths + starts)[:, None] + column
        if self.model.context is not None:
            positions = positions.clamp(max=self.model.context - 1)
        kept = torch.arange(rows * span, device=tokens.device).view(rows, span)
        kept = kept[:, -1:] if last else kept
        logits = self.model.logits(
            tokens.flatten(), positions.flatten(), self.attention, kept.flatten()
        )
        return logits.view(*kept.shape, -1)


class SpeculativeDecoding(Decoding):
    """Every live row draws as many tokens a turn as the drafter has foreseen, and one more.

    Ragged int64 `prompts [prompts, j]` have lengths `sizes`. Rows draw their first token of what
    follows the prompts. In a turn the policy reads the last token of each row and the drafts
    after it; row r has `counts[r]` tokens, of which its cache has all but the last.

    While more rows go on than the drafter is asked for, each draws one token a turn, and all are
    equally long. The drafter then reads what the rows have that are left, once.
    """

    def __init__(
        self,
        model: TorchModel,
        draft: Draft,
        prompts: Tensor,
        sizes: Tensor,
        responses: Responses,
        stopped: Callable[[], bool],
    ) -> None:
        super().__init__(responses, stopped)
        self.draft, self.prompts, self.prompt_sizes = draft, prompts, sizes
        self.width = responses.tokens.shape[1]
        n, columns = responses.sampling.n, self.width + draft.tokens
        self.reader: Reader | None = Reader(model, sizes, n, columns)
        self.drafter: Reader | None = None
        layout = pack_prompts(prompts, model.device)
        if self.drafts():
            self.drafter = Reader(draft.model, sizes, n, columns)
            prefill(draft.model, self.drafter.cache, layout, layout.targets[:1])
        logits = prefill(model, self.reader.cache, layout, layout.targets)
        self.first = logits[: layout.predictions].repeat_interleave(n, 0)
        self.vocabulary = self.first.shape[1]
        self.numbers = torch.empty(0, 0, dtype=torch.float64, device=model.device)
        self.counts = torch.zeros_like(responses.live)
        # The fewest and the most tokens of a live row, and how many the drafter has to read.
        self.least = self.most = 0
        self.unread = 1
        self.tally = self.counts.new_zeros(2)

    def step(self) -> bool:
        """Draw one token or more of every live row; whether any goes on."""
        if self.reader is None:
            return False
        if self.least:
            drafts = self.propose() if self.drafts() else self.none()
            logits = self.verify(self.reader, drafts)
        else:
            drafts, logits = self.none(), self.first[:, None]
            self.first = self.first[:0]
        going, foreseen = self.take(drafts, logits)
        if self.stopped() or not bool(going.any()):
            return self._end()
        if not bool(going.all()):
            places = self.reader.cache.keep(going)
            if self.drafter is not None:
                self.drafter.cache.keep(going)
            self.responses.live = self.responses.live[places]
            self.counts, foreseen = self.counts[places], foreseen[places]
        bounds = torch.stack([self.counts.min(), self.counts.max(), foreseen.any().long()])
        self.least, self.most, behind = bounds.tolist()
        self.unread = 1 + behind
        return True

    def drafts(self) -> bool:
        """Whether so few rows go on that the drafter proposes."""
        most = self.draft.rows
        return most is None or len(self.responses.live) <= most

    def none(self) -> Tensor:
        """No drafts of the live rows, int64 `[live, 0]`."""
        return self.counts.new_empty(len(self.counts), 0)

    def caught_up(self) -> Reader:
        """The drafter with all that the live rows have, equally long ones, but their last token."""
        live, draft = self.responses.live, self.draft
        which = (live // self.responses.sampling.n).cpu()
        prompts, sizes = select_field(self.prompts, which), self.prompt_sizes[which]
        drafter = Reader(draft.model, sizes, 1, self.width + draft.tokens)
        layout = pack_prompts(prompts, live.device)
        prefill(draft.model, drafter.cache, layout, layout.targets[:1])
        read = self.least - 1
        for start in range(0, read, READ):
            tokens = self.responses.tokens[live, start : min(start + READ, read)]
            drafter.read(tokens, torch.full_like(live, start), start, last=True)
        return drafter

    def propose(self) -> Tensor:
        """The drafter's tokens for the next columns of the live rows, int64 `[live, drafts]`."""
        if self.drafter is None:
            self.drafter = self.caught_up()
        drafter, drafts = self.drafter, list[Tensor]()
        last = torch.arange(-self.unread, 0, device=self.counts.device)
        tokens = self.responses.tokens[self.responses.live[:, None], self.counts[:, None] + last]
        before = -self.unread
        for column in range(min(self.draft.tokens, self.width - self.least - 1)):
            logits = drafter.read(tokens, self.counts + before, self.most + before, last=True)
            uniform = self.uniform(self.counts[:, None] + column, self.most + column)
            drawn, _ = self.responses.choose(logits[:, 0, : self.vocabulary], uniform[:, 0])
            drafts.append(drawn)
            tokens, before = drawn[:, None], column
        return torch.stack(drafts, 1) if drafts else self.none()

    def verify(self, reader: Reader, drafts: Tensor) -> Tensor:
        """The policy's logits for the columns of the drafts and the one after."""
        latest = self.responses.tokens[self.responses.live, self.counts - 1]
        self.passes += 1
        tokens = torch.cat([latest[:, None], drafts], 1)
        return reader.read(tokens, self.counts - 1, self.most - 1)

    def take(self, drafts: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw of `logits [live, span, vocabulary]`, and keep what follows right drafts alone.

        Returns bool `[live]`: which rows go on, and of which every draft was right, one or more.
        """
        responses, span = self.responses, logits.shape[1]
        columns = self.counts[:, None] + torch.arange(span, device=drafts.device)
        uniform = self.uniform(columns, self.most + span - 1)
        drawn, probs = responses.choose(logits.flatten(0, 1), uniform.flatten())
        tokens, log_probs = drawn.view(-1, span), probs.view(-1, span)
        stops = (tokens[:, :, None] == responses.stops).any(-1)
        right = (drafts == tokens[:, :-1]).long().cumprod(1).bool()
        kept = torch.cat([torch.ones_like(stops[:, :1]), right & ~stops[:, :-1]], 1)
        kept = kept.long().cumprod(1).bool() & (columns < self.width)
        row, place = kept.nonzero(as_tuple=True)
        where = (responses.live[row], columns[row, place])
        responses.tokens[where] = tokens[row, place]
        responses.log_probs[where] = log_probs[row, place]
        self.counts = self.counts + kept.sum(1)
        responses.sizes[responses.live] = self.counts
        finished = (stops & kept).any(1)
        responses.finished[responses.live] = finished
        self.count(drafts, right, columns[:, :-1])
        foreseen = right.all(1) if drafts.shape[1] else torch.zeros_like(finished)
        return ~finished & (self.counts < self.width), foreseen

    def count(self, drafts: Tensor, right: Tensor, columns: Tensor) -> None:
        """Tally the drafts that a row could take, and those that it took.

        Those are up to the first stop token, and not for its last column, which the logits
        after the draft before it fill.
        """
        stops = (drafts[:, :, None] == self.responses.stops).any(-1).long()
        useful = (stops.cumsum(1) == stops) & (columns < self.width - 1)
        self.tally += torch.stack([useful.sum(), (useful & right).sum()])

    def uniform(self, columns: Tensor, furthest: int) -> Tensor:
        """The live rows' numbers for int64 `columns [live, span]`, the highest `furthest`.

        Float64 of that shape; a column beyond the last has the number of the last.
        """
        if self.responses.sampling.temperature == 0:
            return self.numbers.new_zeros(columns.shape)
        furthest = min(furthest, self.width - 1)
        for start in range(self.numbers.shape[1], furthest + 1, DRAWN):
            more = self.responses.numbers(start)
            self.numbers = torch.cat([self.numbers, more], 1) if start else more
        return self.numbers[self.responses.live[:, None], columns.clamp(max=self.width - 1)]

    def settled(self) -> int:
        """The rows that have ended and are no longer than the shortest that goes on."""
        ended = torch.ones_like(self.responses.finished)
        ended[self.responses.live] = False
        if len(self.responses.live):
            ended &= self.responses.sizes <= self.least
        return int(ended.sum())

    def spent(self) -> dict[str, float]:
        """Passes of the policy, drafts that a row could have taken, and drafts it took."""
        drafted, accepted = self.tally.tolist()
        self.tally = torch.zeros_like(self.tally)
        return {**super().spent(), "drafted": float(drafted), "accepted": float(accepted)}

    def _end(self) -> bool:
        """No row goes on; the memory of the caches is given back."""
        self.responses.live = self.responses.live[:0]
        self.reader = self.drafter = None
        del self.numbers
        return False


class Reads(Protocol):
    """A model that reads tokens: its config has its vocabulary."""

    name: str
    config: ModelConfig

    @property
    def context(self) -> int | None:
        """How many tokens it reads at the most; None where it says nothing."""


def require_drafter(
    drafter: Reads, policy: Reads, sizes: Tensor, sampling: Sampling, reach: Reach
) -> None:
    """Raise RunError for a drafter that cannot read what the policy may write.

    `sizes` int64 `[prompts]` are the lengths of the prompts.
    """
    mine, known = (int(model.config.get_text_config().vocab_size) for model in (policy, drafter))
    if known < mine:
        raise RunError(
            Finding(
                code="E596",
                what=f"drafter {drafter.name!r} does not know all tokens of {policy.name!r}",
                got=f"a vocabulary of {known}",
                expected=f"at least {mine}, the policy's",
                fix="a drafter with the tokenizer of the policy, its vocabulary as large",
            )
        )
    context = drafter.context
    needed = (int(sizes.max()) if len(sizes) else 0) - reach.first + sampling.max_new_tokens
    if context is not None and needed > context:
        raise RunError(
            Finding(
                code="E597",
                what=f"the context of drafter {drafter.name!r} is too short",
                got=f"{context} tokens",
                expected=f"at least {needed}: the longest prompt and "
                f"{sampling.max_new_tokens} new tokens",
                fix="shorten the prompts, lower max_new_tokens, or draft with another model",
            )
        )
