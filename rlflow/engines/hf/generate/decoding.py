"""One generation as it grows: rows that draw a token at a time, and leave when they end.

A sample's tokens depend on the weights, its prompt and its own random numbers, which come of
(seed, iteration, stream, sample id, position). This file knows neither engines nor how long
a generation is asked for, nor how a row may draw several tokens at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from rlflow.batch import flat, ragged, select_field
from rlflow.contract.pictures import Pictures
from rlflow.contract.progress import advance
from rlflow.contract.values import Generation, Reach, SampleKey, Sampling
from rlflow.engines.hf.forward.attention import PackedAttention, PromptCache
from rlflow.engines.hf.forward.packed import PackedLayout, pack_prompts
from rlflow.engines.hf.generate.attention import DecodeAttention
from rlflow.engines.hf.generate.cache import KeyValueCache
from rlflow.engines.hf.generate.rng import uniforms
from rlflow.engines.hf.generate.sampling import draw_tokens, require_finite
from rlflow.engines.hf.models import TorchModel
from rlflow.engines.hf.pictures.passes import SeenPictures, with_pictures_in
from rlflow.engines.hf.routing.passes import Pass
from rlflow.engines.hf.routing.replays import NONE, flat_experts, prompts_of
from rlflow.graph.rules.completion_order import ended_rows

# Random numbers are drawn for this many positions at a time.
DRAWN = 64


class Responses:
    """The rows of one generation as they grow; live rows stand in the cache's order.

    Columns are the positions `reach.first` to `reach.until` - 1 of the responses.
    """

    def __init__(
        self,
        sampling: Sampling,
        key: SampleKey,
        ids: Tensor,
        reach: Reach,
        device: torch.device,
    ) -> None:
        rows = len(ids)
        self.sampling = sampling
        self.key = key
        self.first = reach.first
        self.end = sampling.max_new_tokens
        if reach.until is not None:
            self.end = min(self.end, reach.until)
        self.ids = ids.cpu().numpy().astype(np.int64)
        self.stops = torch.tensor(sampling.stop_tokens, dtype=torch.int64, device=device)
        width = self.end - self.first
        self.tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
        self.log_probs = torch.zeros(self.tokens.shape, dtype=torch.float32, device=device)
        self.sizes = torch.zeros(rows, dtype=torch.int64, device=device)
        self.finished = torch.zeros(rows, dtype=torch.bool, device=device)
        self.live = torch.arange(rows, device=device)
        self.drawn = torch.zeros(rows, 0, dtype=torch.float64, device=device)
        # Which experts each token chose, -1 of one that nothing has read, and those of prompts.
        self.experts: Tensor | None = None
        self.prompt_experts: Tensor | None = None

    def read(self, column: int, chosen: Tensor) -> None:
        """Take note of the experts, int16 `[live, layers * k]`, of a column's tokens."""
        if self.experts is None:
            shape = (*self.tokens.shape, chosen.shape[1])
            self.experts = torch.full(shape, NONE, dtype=torch.int16, device=chosen.device)
        self.experts[self.live, column] = chosen

    def prompts_chosen(self, rows: Tensor) -> Tensor | None:
        """The experts of the prompts of some rows, ragged; None where nothing was recorded."""
        if self.prompt_experts is None:
            return None
        return select_field(self.prompt_experts, rows // self.sampling.n)

    def chosen(self, rows: Tensor, used: Tensor, sizes: Tensor) -> Tensor | None:
        """The experts of all tokens of some rows, ragged; None where nothing was recorded."""
        if self.prompt_experts is None:
            return None
        width = flat(self.prompt_experts).shape[1]
        if self.experts is None:
            none = torch.full((int(sizes.sum()), width), NONE, dtype=torch.int16)
            return ragged(none, sizes)
        return ragged(self.experts.cpu()[rows][used], sizes)

    def uniform(self, column: int) -> Tensor:
        """The random numbers of the live rows for a column, float64 `[live]`."""
        if self.sampling.temperature == 0:
            return self.drawn.new_zeros(len(self.live))
        if column % DRAWN == 0:
            self.drawn = self.numbers(column)
        return self.drawn[self.live, column % DRAWN]

    def numbers(self, column: int) -> Tensor:
        """The random numbers of all rows for up to DRAWN columns, float64 `[rows, columns]`."""
        count = min(DRAWN, self.tokens.shape[1] - column)
        key, first = self.key, self.first + column
        drawn = uniforms(key.seed, key.iteration, key.stream, self.ids, count, first=first)
        return torch.from_numpy(drawn).to(self.live.device)

    def add(self, column: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next token of every live row; the tokens and which rows go on."""
        tokens, log_probs = self.choose(logits, self.uniform(column))
        self.tokens[self.live, column] = tokens
        self.log_probs[self.live, column] = log_probs
        self.sizes[self.live] = column + 1
        ended = (tokens[:, None] == self.stops).any(-1)
        self.finished[self.live] = ended
        return tokens, ~ended

    def choose(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of the live rows and their log-probs; see `sampling.choose`."""
        return draw_tokens(logits, uniform, self.sampling)

    def agreed(self, tokens: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """What is kept of a draw of `[rows]` tokens, of those of several ranks that draw it."""
        return tokens, log_probs

    def stop_said(self) -> Tensor | None:
        """Whether to stop, int64 `[1]` on the device, where one rank decides that for several."""
        return None

    def heard(self, stop: bool) -> None:
        """Take note of what `stop_said` has said."""

    def ended(self) -> Tensor:
        """The rows that have ended, int64: the shortest first, of equal ones the first."""
        going = torch.zeros(len(self.sizes), dtype=torch.bool, device=self.live.device)
        going[self.live] = True
        order = torch.argsort(self.sizes, stable=True)
        return order[~going[order]]

    def complete(self, settled: int) -> Tensor:
        """The prompts of which all rows are among the first `settled` that have ended, int64.

        In the order of their last rows: the one whose longest row is shortest first.
        """
        n = self.sampling.n
        prompts = self.ended()[:settled] // n
        last = torch.full((len(self.sizes) // n,), -1, device=prompts.device)
        places = torch.arange(len(prompts), device=prompts.device)
        last = last.scatter_reduce(0, prompts, places, "amax")
        whole = (prompts.bincount(minlength=len(last)) == n).nonzero()[:, 0]
        return whole[torch.argsort(last[whole])]

    def result(self, rows: Tensor | None = None) -> Generation:
        """All rows, or those of int64 `rows`, as ragged fields on the CPU.

        Called outside inference mode, so that the fields may go into a graph of gradients. Raises
        NumericsError E652 where the logits of a token were not finite.
        """
        chosen = torch.arange(len(self.sizes)) if rows is None else rows.cpu().clone()
        sizes = self.sizes.cpu()[chosen]
        columns = torch.arange(self.tokens.shape[1])
        used = columns[None, :] < sizes[:, None]
        log_probs = self.log_probs.cpu()[chosen][used]
        require_finite(log_probs)
        return Generation(
            response_tokens=ragged(self.tokens.cpu()[chosen][used], sizes),
            log_probs=ragged(log_probs, sizes),
            finished=self.finished.cpu()[chosen],
            rows=None if rows is None else chosen,
            prompt_experts=self.prompts_chosen(chosen),
            experts=self.chosen(chosen, used, sizes),
        )


class Decoding(ABC):
    """A generation that goes on turn by turn: in each, every live row draws a token or more.

    `stopped` is asked after every turn; then no row goes on.
    """

    def __init__(self, responses: Responses, stopped: Callable[[], bool]) -> None:
        self.responses = responses
        self.stopped = stopped
        self.passes = 0

    @abstractmethod
    def step(self) -> bool:
        """Make a turn; whether any row goes on."""

    @abstractmethod
    def settled(self) -> int:
        """How many rows have ended that are shorter than every row which goes on will be."""

    def spent(self) -> dict[str, float]:
        """Counters since this was last asked, by the name of the statistic."""
        passes, self.passes = self.passes, 0
        return {"decode_passes": float(passes)}

    def run(self) -> None:
        """Go on until every row has ended or is at its limit."""
        while self.step():
            advance(1, "turns of tokens")

    def piece(self, reach: Reach) -> Tensor:
        """Go on until the rows of a piece have ended; which they are, int64, ascending.

        How many rows, or prompts with all their rows, a piece has, `ended_rows` says.
        """
        n = self.responses.sampling.n if reach.groups else 1
        whole = len(self.responses.sizes) // n
        first, last = (ended_rows(whole, reach.piece + end, reach.pieces) for end in (0, 1))
        while self.settled() < last * n and self.step():
            advance(1, "turns of tokens")
        if not reach.groups:
            return self.responses.ended()[first:last].sort().values
        while len(found := self.responses.complete(self.settled())) < last:
            self.step()
            advance(1, "turns of tokens")
        rows = found[first:last].sort().values[:, None] * n
        return (rows + torch.arange(n, device=rows.device)).flatten()


class PlainDecoding(Decoding):
    """Every live row draws one token a turn; the cache lives as long as the generation does.

    Samples of a prompt are computed once as long as their tokens are the same: `nodes` int64
    `[live]` has the place of each row in the cache, ascending, and no two rows share one once all
    differ (`apart`). `prompts` is ragged int64 `[prompts, j]` with lengths `sizes`, with their
    `pictures` if there are any.
    """

    def __init__(
        self,
        model: TorchModel,
        prompts: Tensor,
        sizes: Tensor,
        responses: Responses,
        stopped: Callable[[], bool],
        pictures: Pictures | None = None,
    ) -> None:
        super().__init__(responses, stopped)
        self.model = model
        self.column = 0
        width = responses.tokens.shape[1]
        n = responses.sampling.n
        layout, seen = packed_prompts(model, prompts, pictures)
        self.cache: KeyValueCache | None = KeyValueCache(sizes, 1, width, model.device, n)
        led = Pass(records=True) if responses.sampling.routing else None
        logits = prefill(model, self.cache, layout, layout.targets, led, seen)
        if seen is not None and seen.shifts is not None:
            self.cache.shifts = seen.shifts
        if led is not None:
            responses.prompt_experts = prompts_of(led, layout, prompts)
        self.nodes = torch.arange(len(sizes), device=model.device).repeat_interleave(n)
        self.apart = n == 1
        self.logits = logits[self.nodes]
        self.attention = DecodeAttention(self.cache)

    def step(self) -> bool:
        """Draw a token of every live row; whether any goes on."""
        responses, cache, column = self.responses, self.cache, self.column
        if cache is None:
            return False
        tokens, going = responses.add(column, self.logits)
        if column + 1 == responses.tokens.shape[1] or self.stopped():
            return self._end()
        if not (self.apart and bool(going.all())):
            tokens = self.branch(cache, tokens, going)
        if not len(tokens):
            return self._end()
        cache.advance()
        filled = tokens.new_zeros(cache.rows)
        filled[self.nodes] = tokens
        led = Pass(records=True) if responses.sampling.routing else None
        self.attention.routing = led
        logits = self.model.logits(filled, cache.positions(column), self.attention, None)
        if led is not None:
            responses.read(column, flat_experts(led)[self.nodes])
        self.logits = logits[: len(tokens)] if self.apart else logits[self.nodes]
        self.column = column + 1
        self.passes += 1
        return True

    def branch(self, cache: KeyValueCache, tokens: Tensor, going: Tensor) -> Tensor:
        """Drop rows that ended, part those that drew different tokens; the tokens of the rest."""
        kept = going.nonzero()[:, 0]
        nodes, tokens = self.nodes[kept], tokens[kept]
        live = self.responses.live[kept]
        if self.apart:
            places = cache.branch(nodes)
        else:
            vocabulary = self.logits.shape[1]
            drawn, which = torch.unique(nodes * vocabulary + tokens, return_inverse=True)
            places = cache.branch(drawn // vocabulary)[which]
            self.apart = len(drawn) == len(kept)
        order = torch.argsort(places, stable=True)
        self.nodes, self.responses.live = places[order], live[order]
        return tokens[order]

    def _end(self) -> bool:
        """No row goes on; the memory of the cache is given back."""
        self.responses.live = self.responses.live[:0]
        self.cache = None
        del self.attention, self.logits, self.nodes
        return False

    def settled(self) -> int:
        """All that have ended, as live rows are equally long."""
        return len(self.responses.sizes) - len(self.responses.live)


def packed_prompts(
    model: TorchModel, prompts: Tensor, pictures: Pictures | None
) -> tuple[PackedLayout, SeenPictures | None]:
    """Prompts laid out one after the other, each by itself, and their pictures."""
    if pictures is None:
        return pack_prompts(prompts, model.device), None
    sight = model.sight
    assert sight is not None
    dense = True if sight.sees == "soft" else None
    layout = pack_prompts(prompts, model.device, dense=dense)
    return with_pictures_in(sight, layout, prompts, pictures.pixels, pictures.shapes)


def prefill(
    model: TorchModel,
    cache: PromptCache,
    layout: PackedLayout,
    keep: Tensor,
    routing: Pass | None = None,
    seen: SeenPictures | None = None,
) -> Tensor:
    """Read the prompts into a cache; logits of the flat tokens that int64 `keep` names."""
    state = PackedAttention(layout, cache, routing)
    state.pictures = seen
    return model.logits(layout.tokens, layout.positions, state, keep)
