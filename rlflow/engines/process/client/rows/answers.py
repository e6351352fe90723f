"""The rows of one generation as an engine answers them, in any order, over at most two engines.

Which rows a piece has follows from their tokens alone: the shortest first, of equal ones the
first. A row's place is settled once no row that still grows can come before it. This file knows
neither models nor how an engine is asked.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import ragged
from rlflow.contract.values import Generation, Reach
from rlflow.engines.process.client.link import LostError, PendingRequest
from rlflow.graph.rules.completion_order import ended_rows

# A log-prob is above 0 by so much at most, where it was rounded.
ROUNDING = 1e-2
# What is answered for a row that was not made.
NOTHING: dict[str, Any] = {
    "tokens": b"",
    "log_probs": b"",
    "reason": "abort",
    "cached": 0,
    "versions": (),
}


class WrongAnswerError(Exception):
    """An answer that no engine can mean; the text says of which row and what it has."""


class Rows:
    """What has come of `count` rows; `ask(rows)` asks the engine for some of them.

    `stopped` says whether the generation was aborted, `give_up(reason)` makes the error of a
    second loss. Tokens are numbers below `vocabulary`, and a row has `most` of them at most.
    """

    def __init__(
        self,
        count: int,
        ask: Callable[[list[int]], PendingRequest],
        *,
        stopped: Callable[[], bool],
        give_up: Callable[[str], Exception],
        vocabulary: int,
        most: Callable[[int], int],
    ) -> None:
        self.count = count
        self.tokens: dict[int, array[int]] = {}
        self.log_probs: dict[int, array[float]] = {}
        self.finished: dict[int, bool] = {}
        self.experts: dict[int, bytes] = {}
        self.cached = 0
        self.drafted = 0
        self.accepted = 0
        self.versions: set[str] = set()
        self.leaving: set[int] = set()
        self._grown = dict.fromkeys(range(count), 0)
        self._given: set[int] = set()
        self._ask = ask
        self._stopped = stopped
        self._give_up = give_up
        self._vocabulary = vocabulary
        self._most = most
        self._losses = 0
        self._call: PendingRequest | None = None

    def piece(self, reach: Reach, n: int) -> Tensor:
        """The rows of a piece, int64 ascending; waits until they are settled.

        Of `n` rows of each prompt, one after the other, all where it is a piece of whole prompts.
        """
        if reach.groups:
            return self._groups(reach, n)
        first, last = (ended_rows(self.count, reach.piece + end, reach.pieces) for end in (0, 1))
        while not self.settled(last - first):
            self.advance()
        made = self.ended()[: last - first]
        self._given.update(made)
        return torch.tensor(sorted(made), dtype=torch.int64)

    def _groups(self, reach: Reach, n: int) -> Tensor:
        """All rows of the prompts that are complete next."""
        prompts = self.count // n
        first, last = (ended_rows(prompts, reach.piece + end, reach.pieces) for end in (0, 1))
        while len(found := self.complete(n)) < last - first:
            self.advance()
        rows = [row for p in found[: last - first] for row in range(p * n, (p + 1) * n)]
        self._given.update(rows)
        return torch.tensor(sorted(rows), dtype=torch.int64)

    def complete(self, n: int) -> list[int]:
        """The prompts whose `n` rows have all ended and are in no piece yet, if that is settled.

        The one whose longest row is shortest comes first, of equal ones the first prompt.
        """
        ends = [self._end_of(range(p * n, (p + 1) * n)) for p in range(self.count // n)]
        going = [(end, prompt) for prompt, (end, over) in enumerate(ends) if not over]
        bound = min(going, default=(math.inf, 0))
        found = [(end, prompt) for prompt, (end, over) in enumerate(ends) if over]
        free = (each for each in found if each[1] * n not in self._given)
        return [prompt for _, prompt in sorted(each for each in free if each < bound)]

    def _end_of(self, rows: range) -> tuple[float, bool]:
        """How long the longest of some rows is, or will be at the least, and if all are over."""
        longest = max(
            len(self.tokens[row]) if row in self.tokens else self._grown[row] + 1 for row in rows
        )
        return longest, all(row in self.tokens for row in rows)

    def run(self) -> None:
        """Wait until every row has ended."""
        while self._grown:
            self.advance()

    @property
    def growing(self) -> bool:
        """Whether any row has not come back yet."""
        return bool(self._grown)

    def is_over(self, row: int) -> bool:
        """Whether a row has ended for good: by itself, or with as many tokens as it may have."""
        full = row in self.tokens and len(self.tokens[row]) >= self._most(row)
        return full or self.finished.get(row, False)

    def got(self, row: int) -> int:
        """How many tokens a row has got, as far as that is known."""
        return len(self.tokens[row]) if row in self.tokens else self._grown[row]

    def end(self, rows: Iterable[int]) -> None:
        """Have rows that have a token come back with what they have; until then they are `leaving`.

        Where the engine is lost before, they stay, and are asked for again with the others.
        """
        wanted = sorted(row for row in rows if self._grown.get(row))
        if wanted and self._call is not None:
            self.leaving.update(wanted)
            with suppress(LostError):
                self._call.about("end_rows", {"rows": wanted})

    def settled(self, rows: int) -> bool:
        """Whether the next so many rows, in the order of their ends, are known."""
        if rows == 0 or not self._grown:
            return True
        ended = self.ended()
        if len(ended) < rows:
            return False
        last = ended[rows - 1]
        end = (len(self.tokens[last]), last)
        return all(end < (count + 1, row) for row, count in self._grown.items())

    def ended(self) -> list[int]:
        """The rows that have ended and are in no piece yet, the shortest first, then by number."""
        rows = self.tokens.keys() - self._given
        return sorted(rows, key=lambda row: (len(self.tokens[row]), row))

    def advance(self) -> None:
        """Take one message, and ask another engine for what is left of one that is lost."""
        try:
            message = self._asked().next()
        except LostError as error:
            self._lost(str(error))
        else:
            self._note(message)

    def look(self) -> bool:
        """The same if one is there; whether one was."""
        try:
            message = self._asked().poll()
        except LostError as error:
            self._lost(str(error))
            return True
        if message is not None:
            self._note(message)
        return message is not None

    def _asked(self) -> PendingRequest:
        """What is asked for all rows that have not come back."""
        if self._call is None:
            self._call = self._ask(sorted(self._grown))
        return self._call

    def _note(self, message: Mapping[str, Any]) -> None:
        if "counts" in message:
            for row, count in message["counts"].items():
                if row in self._grown:
                    self._grown[row] = count
        elif "row" in message:
            self._take(message)

    def _take(self, message: Mapping[str, Any]) -> None:
        row = message["row"]
        if row not in self._grown:
            again = "a second time" if row in self.tokens else "that nobody has asked for"
            raise WrongAnswerError(f"row {row} {again}")
        tokens, log_probs = array("q", message["tokens"]), array("f", message["log_probs"])
        made = message.get("made", len(tokens))
        most, reason = self._most(row), message["reason"]
        wrong = wrong_row(tokens, log_probs, made, self._vocabulary, most)
        wrong = wrong or wrong_end(len(tokens), reason, most)
        if wrong:
            raise WrongAnswerError(f"row {row}: {wrong}")
        self.tokens[row], self.log_probs[row] = tokens, log_probs
        self.finished[row] = reason == "stop"
        self.experts[row] = message.get("experts", b"")
        self.cached += message["cached"]
        self.drafted += message.get("drafted", 0)
        self.accepted += message.get("accepted", 0)
        self.versions.update(message["versions"])
        del self._grown[row]
        self.leaving.discard(row)

    def _lost(self, reason: str) -> None:
        self._call = None
        self.leaving.clear()
        self._losses += 1
        self._grown = dict.fromkeys(self._grown, 0)
        if self._stopped():
            for row in list(self._grown):
                self._take({"row": row, **NOTHING})
        elif self._losses > 1:
            raise self._give_up(reason)

    def result(self, rows: Tensor | None) -> Generation:
        """All rows, or those of int64 `rows`, as ragged fields on the CPU."""
        chosen = list(range(self.count)) if rows is None else rows.tolist()
        return as_generation(self.tokens, self.log_probs, self.finished, chosen, rows)


def wrong_row(
    tokens: array[int], log_probs: array[float], made: int, vocabulary: int, most: int
) -> str:
    """What cannot be of a row, in words; nothing where it can.

    Log-probs that are not finite are left to whoever reads them and names the token. `made` is how
    many tokens the engine has counted.
    """
    if made != len(tokens):
        return f"{made} tokens were made, and the numbers of {len(tokens)} came"
    if len(log_probs) != len(tokens):
        return f"{len(tokens)} tokens with {len(log_probs)} log-probs"
    if len(tokens) > most:
        return f"{len(tokens)} tokens, and {most} at most were asked for"
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        far = next(each for each in tokens if not 0 <= each < vocabulary)
        return f"token {far} of a vocabulary of {vocabulary}"
    if any(each > ROUNDING for each in log_probs):
        return f"a log-prob of {max(log_probs):.3g}"
    return ""


def wrong_end(tokens: int, reason: str, most: int) -> str:
    """Why a row of so many tokens cannot have ended for a reason, in words; nothing where it can.

    Text without ids has no tokens: a row that a token stops has that token.
    """
    least = {"stop": 1, "length": most}.get(reason, 0)
    return f"{tokens} tokens, and {reason!r} ends {least} at least" if tokens < least else ""


class CompleteGroups:
    """Which groups have all their rows, the earliest first; `groups` has the group of each row."""

    def __init__(self, groups: Sequence[int]) -> None:
        self.all = frozenset(groups)
        self.complete: list[int] = []
        self._groups = groups
        self._left = Counter(groups)
        self._known: set[int] = set()

    def note(self, rows: Iterable[int]) -> None:
        """Take note of rows that are over, however often they are named."""
        for row in rows:
            if row in self._known:
                continue
            self._known.add(row)
            group = self._groups[row]
            self._left[group] -= 1
            if not self._left[group]:
                self.complete.append(group)


def as_generation(
    tokens: Mapping[int, array[int]],
    log_probs: Mapping[int, array[float]],
    finished: Mapping[int, bool],
    chosen: Sequence[int],
    rows: Tensor | None = None,
) -> Generation:
    """Some of the rows by number, one after the other; one that is not there has no tokens."""
    none: tuple[array[int], array[float]] = array("q"), array("f")
    sizes = torch.tensor([len(tokens.get(row, none[0])) for row in chosen], dtype=torch.int64)
    ids = _concatenated([tokens.get(row, none[0]) for row in chosen], "q")
    scores = _concatenated([log_probs.get(row, none[1]) for row in chosen], "f")
    return Generation(
        response_tokens=ragged(ids, sizes),
        log_probs=ragged(scores, sizes),
        finished=torch.tensor([finished.get(row, False) for row in chosen], dtype=torch.bool),
        rows=rows,
    )


def _concatenated(parts: list[array[Any]], code: str) -> Tensor:
    """Arrays of one type, one after the other: int64 for "q", float32 for "f"."""
    whole = array(code, b"".join(part.tobytes() for part in parts))
    dtype = torch.int64 if code == "q" else torch.float32
    return torch.frombuffer(whole, dtype=dtype) if whole else torch.empty(0, dtype=dtype)
