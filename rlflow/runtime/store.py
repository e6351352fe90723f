"""The shard store: the rows that actions leave in this process, kept until the last reader.

Keys are (action, iteration): a node's run, or the transfer that brought a copy of its rows.
This file knows neither models nor time.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Key = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Fields of the rows that this process holds.

    `rows` int64 `[rows held]` numbers them within the batch's `total` rows; None for all of them.
    """

    fields: dict[str, Tensor]
    total: int
    rows: Tensor | None = None


class ShardStore:
    """Rows by action and iteration, freed when everybody that reads them has."""

    def __init__(self) -> None:
        self._held: dict[Key, Stored] = {}
        self._left: dict[Key, int] = {}
        self._lock = threading.Lock()

    def put(self, action: str, iteration: int, stored: Stored, readers: int) -> None:
        """Keep what an action made until `readers` have released it; nothing for no reader."""
        if readers:
            with self._lock:
                self._held[action, iteration] = stored
                self._left[action, iteration] = readers

    def get(self, action: str, iteration: int) -> Stored:
        """What an action made in an iteration; KeyError once its last reader has run."""
        return self._held[action, iteration]

    def release(self, action: str, iteration: int) -> None:
        """Note that one reader has run; the last one frees the rows."""
        key = (action, iteration)
        with self._lock:
            self._left[key] -= 1
            if self._left[key] == 0:
                del self._held[key], self._left[key]

    def __len__(self) -> int:
        return len(self._held)
