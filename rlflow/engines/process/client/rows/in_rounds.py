"""Rows in flight of engines in processes of their own, whose turns nobody counts.

The one that is alone has all rows from the beginning, and lets begin what it has room for. Several
are dealt groups as rows end, and tell each other which: in rounds, since their clocks are their
own. What ended in a round has ended at once, so all agree on the order, which is by time and stands
in the memory of the rollout. This file knows neither processes nor requests.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlflow.contract.values import Advanced, InFlight
from rlflow.engines.process.client.rows.answers import CompleteGroups, Rows, as_generation
from rlflow.graph.rules.in_flight import STOP, Dealing

# A round ends with the first news of any row here, or after so long.
ROUND_SECONDS, LOOK_SECONDS = 0.05, 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What rows in flight want of an engine.

    `begin` asks for some of the rows in flight, which come as they end. `runs` says whether it
    answers: one that was lost does again once another is there. `stopped` says whether it was told
    to end, and `abort` has all rows end.
    """

    begin: Callable[[Sequence[int]], Rows]
    runs: Callable[[], bool]
    stopped: Callable[[], bool]
    abort: Callable[[], None]


class InRounds:
    """The rows in flight, of which row r may have `left[r]` tokens more, and who decodes them."""

    def __init__(self, rows: InFlight, left: Sequence[int], engine: Engine) -> None:
        self.rows, self.left, self.engine = rows, left, engine
        groups = rows.groups.tolist()
        self.group_of: list[int] = groups
        places: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            places.setdefault(group, []).append(row)
        self.ended = CompleteGroups(groups)
        self.over = [False] * len(groups)
        self.begun = set(rows.begun)
        self.waiting = deque(places.items())
        self.dealing = Dealing(rows.replicas, rows.at_once if rows.replicas > 1 else len(groups))
        self.dealing.go_on({g: len(places[g]) for g in sorted(rows.begun) if g in places})
        # What was asked for, and the rows that it is of.
        self.asked: list[tuple[list[int], Rows]] = []
        self.halted = False

    def run(self) -> Advanced:
        """Let rows begin and end until enough groups are complete, or nothing is left."""
        known = -1
        while not self.halted:
            if known != len(self.ended.complete):
                known = len(self.ended.complete)
                if self.rows.met(self.begun, self.ended.complete):
                    break
            if not self._begin():
                break
            self._wait()
            self._tell()
        if any(asked.growing for _, asked in self.asked):
            self.engine.abort()
            for _, asked in self.asked:
                asked.run()
        self._tell()
        return self._result()

    def _begin(self) -> bool:
        """Deal the groups that there is room for; whether any row is live."""
        here: list[int] = []
        while self.waiting:
            group, rows = self.waiting[0]
            if group not in self.rows.begun and not self.dealing.begins(group, len(rows)):
                break
            self.waiting.popleft()
            self.begun.add(group)
            if self.dealing.homes[group] == self.rows.own:
                here += rows
        if here:
            self.asked.append((here, self.engine.begin(here)))
        return self.dealing.total > 0

    def _wait(self) -> None:
        """Until a row has come back here, or a round is over."""
        before, end = self._here(), time.monotonic() + ROUND_SECONDS
        while self._here() == before and not self.engine.stopped():
            growing = [asked for _, asked in self.asked if asked.growing]
            if time.monotonic() > end if self.rows.replicas > 1 else not growing:
                return
            if not (self.engine.runs() and sum(asked.look() for asked in growing)):
                time.sleep(LOOK_SECONDS)

    def _here(self) -> int:
        """How many rows have come back."""
        return sum(len(asked.tokens) for _, asked in self.asked)

    def _tell(self) -> None:
        """Tell the others what has ended here since, and hear the same of them.

        An engine that gives rows back before they are over would be waited for in vain.
        """
        open_rows = [
            (row, asked.is_over(place, self.left[row]))
            for rows, asked in self.asked
            for place, row in enumerate(rows)
            if not self.over[row]
        ]
        mine = [row for row, over in open_rows if over]
        growing = any(asked.growing for _, asked in self.asked)
        given_back = len(mine) < len(open_rows) and not growing
        stop = [STOP] if given_back or self.engine.stopped() else []
        for row in self.rows.told([*mine, *stop]):
            if row == STOP:
                self.halted = True
                continue
            self.over[row] = True
            self.dealing.ends(self.group_of[row])
            self.ended.note([row])

    def _result(self) -> Advanced:
        """What the rows here have got; of one engine alone a group without tokens waits still."""
        tokens: dict[int, array[int]] = {}
        log_probs: dict[int, array[float]] = {}
        finished: dict[int, bool] = {}
        for rows, asked in self.asked:
            for place, row in enumerate(rows):
                tokens[row], log_probs[row] = asked.tokens[place], asked.log_probs[place]
                finished[row] = asked.finished[place]
        made = as_generation(tokens, log_probs, finished, range(len(self.left)))
        begun = frozenset(self.begun)
        if self.rows.replicas == 1:
            begun = self.rows.begun | {self.group_of[row] for row, has in tokens.items() if has}
        return Advanced(
            response_tokens=made.response_tokens,
            log_probs=made.log_probs,
            finished=made.finished,
            over=torch.tensor(self.over, dtype=torch.bool),
            begun=begun,
            ended=tuple(self.ended.complete),
        )
