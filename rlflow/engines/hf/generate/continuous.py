"""Rows that enter and leave a generation at any time: each row stands at a token of its own.

Every live row draws a token a turn, a row that has ended leaves, and the next group begins as soon
as a replica has room for its rows. A sample's tokens depend on the weights, what it has seen and
its own random numbers, never on who is beside it. Replicas make their turns together, and each
knows what the others' rows do; those of other processes tell. This file knows neither engines nor
iterations.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rlflow.batch import joined_rows, ragged, select_field, split_rows
from rlflow.contract.progress import advance
from rlflow.contract.values import Advanced, InFlight, Moving, SampleKey, Sampling
from rlflow.engines.hf.generate.decoding import DRAWN
from rlflow.engines.hf.generate.entered import LiveRows
from rlflow.engines.hf.generate.rng import uniforms
from rlflow.engines.hf.generate.sampling import draw_tokens, require_finite
from rlflow.engines.hf.models import TorchModel
from rlflow.graph.rules.in_flight import STOP, Dealing


class ContinuousDecoding:
    """The rows in flight of one model, turn by turn."""

    def __init__(
        self,
        model: TorchModel,
        rows: InFlight,
        sampling: Sampling,
        key: SampleKey,
        stopped: Callable[[], bool],
    ) -> None:
        self.model, self.rows, self.key, self.stopped = model, rows, key, stopped
        self.sampling = sampling
        device = model.device
        count = len(rows.ids)
        self.made = rows.made.cpu().numpy().astype(np.int64)
        self.ids = rows.ids.cpu().numpy().astype(np.int64)
        self.draws = rows.draws.cpu().numpy().astype(np.int64)
        self.groups = rows.groups.cpu().numpy().astype(np.int64)
        self.begun = set(rows.begun)
        self.ended: list[int] = []
        self.got = np.zeros(count, dtype=np.int64)
        # Of rows that move: who has each, in which turn it began, and what it has brought here.
        self.home = np.full(count, -1, dtype=np.int64)
        self.began = np.zeros(count, dtype=np.int64)
        self.brought: dict[int, Tensor] = {}
        self.moved = 0
        self.untold: list[int] = []
        self.numbers = np.zeros((count, DRAWN))
        # Of each turn: the rows that were live, how many tokens they had, and what they drew.
        self.taken: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
        self.places: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
        self.live: list[int] = []
        self.tokens = [torch.zeros(0, dtype=torch.int64, device=device)]
        self.log_probs = [torch.zeros(0, dtype=torch.float32, device=device)]
        self.finished = np.zeros(count, dtype=bool)
        self.over = np.zeros(count, dtype=bool)
        self.stops = np.array(sampling.stop_tokens, dtype=np.int64)
        self.left = Counter(self.groups.tolist())
        names, first = np.unique(self.groups, return_index=True)
        places = dict(zip(names.tolist(), np.split(np.arange(count), first[1:]), strict=True))
        self.waiting = deque((group, where) for group, where in places.items() if len(where))
        self.dealing = Dealing(rows.replicas, rows.at_once)
        self.dealing.go_on({g: len(places[g]) for g in rows.begun if g in places})
        share, group = -(-rows.at_once // rows.replicas), max(map(len, places.values()), default=0)
        room = share + (group if rows.replicas > 1 else max(group - share, 0))
        self.part = LiveRows(model, rows, max(room, *self.dealing.live))
        self.halted = False
        self.turns = 0

    def run(self) -> Advanced:
        """Make turns until enough groups are complete and as many as asked, or nothing is left."""
        with torch.inference_mode():
            known, met = -1, False
            while True:
                if not met and known != len(self.ended):
                    met, known = self.rows.met(self.begun, self.ended), len(self.ended)
                if (met and self.turns >= self.rows.least) or not self._begin():
                    break
                if met and self.dealing.total < self.rows.few:
                    break
                self._turn()
                advance(1, "turns of tokens")
                if (moving := self.rows.moving) and self.turns % moving.every == 0:
                    self._even(moving)
        return self._result()

    def _begin(self) -> bool:
        """Let rows begin; whether any are live, and none has asked to stop."""
        entering: list[np.ndarray] = []
        while self.waiting:
            group, where = self.waiting[0]
            if group not in self.begun and not self.dealing.begins(group, len(where)):
                break
            self.waiting.popleft()
            self.begun.add(group)
            self.home[where], self.began[where] = self.dealing.homes[group], self.turns
            if self.dealing.homes[group] == self.rows.own:
                entering.append(where)
        self.part.enter(entering)
        return self.dealing.total > 0 and not self.halted

    def _turn(self) -> None:
        """Draw a token of every live row."""
        drawn = self._draw(self.part) if len(self.part.live) else None
        self.live.append(len(self.part.live))
        self.untold += [] if drawn is None else self.part.live[~drawn[1]].tolist()
        self.turns += 1
        if self.turns % self.rows.tells == 0:
            self._note(self.rows.told([*self.untold, *([STOP] if self.stopped() else [])]))
            self.untold = []
        if drawn is not None:
            self.part.follow(*drawn)

    def _even(self, moving: Moving) -> None:
        """Move rows until no replica has two more than another: of the fullest the shortest."""
        found: dict[tuple[int, int], list[int]] = {}
        waiting: dict[int, list[int]] = {}
        context = self.part.sizes.numpy() + self.turns - self.began
        for source, target in self.dealing.evened():
            if source not in waiting:
                rows = np.flatnonzero((self.home == source) & ~self.over)
                order = np.argsort(context[rows], kind="stable")
                waiting[source] = rows[order[::-1]].tolist()
            row = waiting[source].pop()
            self.home[row] = target
            found.setdefault((source, target), []).append(row)
        for (source, target), chosen in found.items():
            self.moved += len(chosen)
            if self.rows.own in (source, target):
                self._move(np.array(sorted(chosen)), source, target, moving)

    def _move(self, rows: np.ndarray, source: int, target: int, moving: Moving) -> None:
        """Have rows go from here, or come here, with the tokens that they have got."""
        device = self.model.device
        if self.rows.own == source:
            made = torch.cat([self._tokens(row) for row in rows.tolist()])
            states = {} if moving.reread else self.part.states_of(rows)
            self.part.leave(rows)
            moving.pass_on({("tokens",): made, **states}, source, target, device)
            return
        named = moving.pass_on({}, source, target, device)
        self.got[rows] = self.turns - self.began[rows]
        sizes = torch.from_numpy(self.got[rows])
        tokens = ragged(named["tokens",].cpu(), sizes)
        self.brought |= dict(zip(rows.tolist(), split_rows(tokens), strict=True))
        if self.sampling.temperature:
            self._draw_numbers(rows)
        if moving.reread:
            seen = select_field(self.rows.seen, torch.from_numpy(rows))
            self.part.come(rows, joined_rows(seen, tokens))
        else:
            self.part.come(rows, named)

    def _tokens(self, row: int) -> Tensor:
        """All tokens that a row has got, int64, those that it has brought along first."""
        before = self.brought.get(row, self.tokens[0])
        got = [before.to(self.model.device)]
        for live, places, tokens in zip(self.taken, self.places, self.tokens, strict=True):
            here = np.flatnonzero((live == row) & (places >= len(before)))
            got += [tokens[here[0], None]] if len(here) else []
        return torch.cat(got)

    def _note(self, ended: Sequence[int]) -> None:
        """Rows have ended, of whichever replica; groups are complete with the last of theirs."""
        for row in ended:
            if row == STOP:
                self.halted = True
                continue
            self.over[row] = True
            group = int(self.groups[row])
            self.dealing.ends(group, int(self.home[row]))
            self.left[group] -= 1
            if not self.left[group]:
                self.ended.append(group)

    def _draw(self, part: LiveRows) -> tuple[Tensor, np.ndarray]:
        """A token of every live row, int64 `[live]`; which of them go on, bool `[live]`."""
        assert part.logits is not None
        live = part.live
        uniform = torch.from_numpy(self._uniform(live)).to(self.model.device)
        tokens, log_probs = draw_tokens(part.logits, uniform, self.sampling)
        self.taken.append(live)
        self.places.append(self.got[live])
        self.tokens.append(tokens)
        self.log_probs.append(log_probs)
        self.got[live] += 1
        finished = (tokens.cpu().numpy()[:, None] == self.stops).any(-1)
        full = self.made[live] + self.got[live] >= self.sampling.max_new_tokens
        self.finished[live] = finished
        return tokens, ~(finished | full)

    def _uniform(self, live: np.ndarray) -> np.ndarray:
        """The random numbers of the live rows for their next tokens, float64 `[live]`."""
        if self.sampling.temperature == 0:
            return np.zeros(len(live))
        place = self.got[live] % DRAWN
        lacking = live[place == 0]
        if len(lacking):
            self._draw_numbers(lacking)
        found: np.ndarray = self.numbers[live, place]
        return found

    def _draw_numbers(self, rows: np.ndarray) -> None:
        """The random numbers of rows for the DRAWN tokens among which their next ones are."""
        first = self.made[rows] + self.got[rows] // DRAWN * DRAWN
        key, draws = self.key, self.draws[rows]
        self.numbers[rows] = uniforms(
            key.seed, draws, key.stream, self.ids[rows], DRAWN, first=first
        )

    def _result(self) -> Advanced:
        """What all rows have got, on the CPU; raises NumericsError E652 for logits not finite."""
        taken = np.concatenate(self.taken)
        sizes = torch.from_numpy(np.bincount(taken, minlength=len(self.got)))
        order = np.argsort(taken, kind="stable")
        by_row = torch.from_numpy(order)
        log_probs = torch.cat(self.log_probs).cpu()[by_row]
        require_finite(log_probs)
        return Advanced(
            response_tokens=ragged(torch.cat(self.tokens).cpu()[by_row], sizes),
            log_probs=ragged(log_probs, sizes),
            finished=torch.from_numpy(self.finished),
            over=torch.from_numpy(self.over),
            begun=frozenset(self.begun),
            ended=tuple(self.ended),
            turns=self.turns,
            places=torch.from_numpy(np.concatenate(self.places)[order]),
            moved=self.moved,
            live=tuple(self.live),
        )
