"""Rows in flight of engines in processes of their own, whose turns nobody counts.

The one that is alone has all rows from the beginning, and lets begin what it has room for. Several
are dealt groups as rows end, and tell each other which: in rounds, since their clocks are their
own. What ended in a round has ended at once, so all agree on the order, which is by time and stands
in the memory of the rollout. Where rows move between them, a round is as many turns as the row has
got tokens that has got most in it; the fullest ends as many rows as have to go, and who is given
them reads all that they have seen. This file knows neither processes nor requests.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rlflow.batch import lengths, ragged, split_rows
from rlflow.contract.values import Advanced, InFlight, Moving, Named
from rlflow.engines.process.client.rows.answers import CompleteGroups, Rows, as_generation
from rlflow.graph.rules.in_flight import STOP, Dealing

# A round ends with the first news of any row here, or after so long.
ROUND_SECONDS, LOOK_SECONDS = 0.05, 0.005
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What rows in flight want of an engine.

    `begin` asks for some of the rows in flight, which come as they end; some have brought tokens
    along, after which they go on. `runs` says whether it answers: one that was lost does again once
    another is there. `stopped` says whether it was told to end, and `abort` has all rows end.
    """

    begin: Callable[[Sequence[int], Mapping[int, array[int]]], Rows]
    runs: Callable[[], bool]
    stopped: Callable[[], bool]
    abort: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Stay:
    """What is made here of a `row` that has `brought` some tokens: row `place` of those `asked`."""

    row: int
    asked: Rows
    place: int
    brought: array[int] = field(default_factory=lambda: array("q"))

    @property
    def over(self) -> bool:
        """Whether the row has ended for good."""
        return self.asked.is_over(self.place)

    @property
    def back(self) -> bool:
        """Whether it has come back from the engine."""
        return self.place in self.asked.tokens

    @property
    def got(self) -> int:
        """How many tokens the row has got, wherever it was."""
        return len(self.brought) + self.asked.got(self.place)

    @property
    def tokens(self) -> array[int]:
        """All tokens of a row that has come back."""
        return self.brought + self.asked.tokens[self.place]


class InRounds:
    """The rows in flight, of which row r may have `left[r]` tokens more, and who decodes them."""

    def __init__(self, rows: InFlight, engine: Engine) -> None:
        self.rows, self.engine = rows, engine
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
        # What was asked for; what of it is made of which row; of those here that are not over.
        self.asked: list[Rows] = []
        self.stays: list[Stay] = []
        self.here: dict[int, Stay] = {}
        self.halted = False
        # Of rows that move: who has each, and how many tokens it had in the last round; the turns
        # here; how often rows had to move by the turns of all, and how often they have.
        self.home = [-1] * len(groups)
        self.had: dict[int, int] = {}
        self.turns = self.due = self.evened = self.moved = 0

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
            if (moving := self.rows.moving) and self.due > self.evened and not self.halted:
                self.evened = self.due
                self._even(moving)
        if self._growing():
            self.engine.abort()
            for asked in self.asked:
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
            for row in rows:
                self.home[row] = self.dealing.homes[group]
            if self.dealing.homes[group] == self.rows.own:
                here += rows
        if here:
            self._ask(here, {})
        return self.dealing.total > 0

    def _ask(self, rows: Sequence[int], brought: Mapping[int, array[int]]) -> None:
        """Have the engine make rows, after what they have brought along."""
        asked = self.engine.begin(rows, brought)
        self.asked.append(asked)
        none: array[int] = array("q")
        stays = [Stay(row, asked, at, brought.get(row, none)) for at, row in enumerate(rows)]
        self.stays += stays
        self.here |= {stay.row: stay for stay in stays}

    def _growing(self) -> list[Rows]:
        """What was asked for and has not come back in full."""
        return [asked for asked in self.asked if asked.growing]

    def _look(self) -> None:
        """Take what has come, or wait a moment."""
        if not (self.engine.runs() and sum(asked.look() for asked in self._growing())):
            time.sleep(LOOK_SECONDS)

    def _wait(self) -> None:
        """Until a row has come back here, or a round is over."""
        before, end = self._came(), time.monotonic() + ROUND_SECONDS
        while self._came() == before and not self.engine.stopped():
            if time.monotonic() > end if self.rows.replicas > 1 else not self._growing():
                return
            self._look()

    def _came(self) -> int:
        """How many rows have come back."""
        return sum(len(asked.tokens) for asked in self.asked)

    def _tell(self) -> None:
        """Tell the others what has ended here since, and hear the same of them.

        An engine that gives rows back before they are over would be waited for in vain. Where rows
        move they also tell how often the turns have passed after which they do.
        """
        mine = [row for row, stay in self.here.items() if stay.over]
        given_back = len(mine) < len(self.here) and not self._growing()
        said = [*mine, *([STOP] if given_back or self.engine.stopped() else [])]
        if (moving := self.rows.moving) is not None:
            said.append(STOP - 1 - self._counted() // moving.every)
        for number in self.rows.told(said):
            if number == STOP:
                self.halted = True
            elif number < STOP:
                self.due = max(self.due, STOP - 1 - number)
            else:
                self.over[number] = True
                self.here.pop(number, None)
                self.dealing.ends(self.group_of[number], self.home[number])
                self.ended.note([number])

    def _counted(self) -> int:
        """The turns that were made here, those since the last round among them."""
        now = {row: stay.got for row, stay in self.here.items()}
        more = (got - self.had.get(row, len(self.here[row].brought)) for row, got in now.items())
        self.turns, self.had = self.turns + max([0, *more]), now
        return self.turns

    def _even(self, moving: Moving) -> None:
        """Move rows until no replica has two more than another; what ends before it goes, stays."""
        wanted = Counter(self.dealing.evened())
        if not wanted:
            return
        mine = {pair: many for pair, many in wanted.items() if pair[0] == self.rows.own}
        targets = [target for (_, target), many in mine.items() for _ in range(many)]
        going = zip(self._taken_back(len(targets)), targets, strict=False)
        count = self.rows.replicas
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number in self.rows.told([row * count + target for row, target in going]):
            row, target = divmod(number, count)
            found[self.home[row], target].append(row)
            self.home[row] = target
        for (source, target), many in wanted.items():
            chosen = found[source, target]
            self.dealing.move(target, source, many - len(chosen))
            self.moved += len(chosen)
            if chosen and self.rows.own in (source, target):
                self._move(chosen, source, target, moving)

    def _taken_back(self, count: int) -> list[int]:
        """So many rows that the engine has ended: the shortest first, that have a token at least.

        Fewer where some ended by themselves meanwhile, and none where the engine is lost.
        """
        sizes = lengths(self.rows.seen).tolist()
        live = [stay for stay in self.here.values() if not stay.back and stay.asked.got(stay.place)]
        live.sort(key=lambda stay: (sizes[stay.row] + stay.got, stay.row))
        for asked in self.asked:
            asked.end([stay.place for stay in live[:count] if stay.asked is asked])
        while any(asked.leaving for asked in self.asked) and self.engine.runs():
            self._look()
        for asked in self.asked:
            asked.leaving.clear()
        back = [stay.row for stay in live[:count] if stay.back and not stay.over]
        return [] if self.engine.stopped() else back

    def _move(self, rows: Sequence[int], source: int, target: int, moving: Moving) -> None:
        """Have rows go from here, or come here, with all tokens that they have got."""
        if self.rows.own == source:
            made = [torch.tensor(self.here.pop(row).tokens) for row in rows]
            sizes = torch.tensor([len(tokens) for tokens in made])
            sent: Named = {("tokens",): torch.cat(made), ("sizes",): sizes}
            moving.pass_on(sent, source, target, HOST)
            return
        came = moving.pass_on({}, source, target, HOST)
        tokens = ragged(came["tokens",], came["sizes",])
        brought = zip(rows, split_rows(tokens), strict=True)
        self._ask(rows, {row: array("q", had.tolist()) for row, had in brought})

    def _result(self) -> Advanced:
        """What the rows here have got; of one engine alone a group without tokens waits still."""
        tokens: dict[int, array[int]] = defaultdict(lambda: array("q"))
        log_probs: dict[int, array[float]] = defaultdict(lambda: array("f"))
        places: dict[int, list[int]] = defaultdict(list)
        finished: dict[int, bool] = {}
        for stay in self.stays:
            row, got, first = stay.row, stay.asked.tokens[stay.place], len(stay.brought)
            places[row] += range(first, first + len(got))
            tokens[row] += got
            log_probs[row] += stay.asked.log_probs[stay.place]
            finished[row] = stay.asked.finished[stay.place]
        count = len(self.over)
        made = as_generation(tokens, log_probs, finished, range(count))
        begun = frozenset(self.begun)
        if self.rows.replicas == 1:
            begun = self.rows.begun | {self.group_of[row] for row, has in tokens.items() if has}
        at = [place for row in range(count) for place in places[row]]
        return Advanced(
            response_tokens=made.response_tokens,
            log_probs=made.log_probs,
            finished=made.finished,
            over=torch.tensor(self.over, dtype=torch.bool),
            begun=begun,
            ended=tuple(self.ended.complete),
            places=torch.tensor(at, dtype=torch.int64) if self.rows.moving is not None else None,
            moved=self.moved,
        )
