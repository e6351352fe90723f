"""The shard store: what nodes made, kept until the last reader has run.

Keys are (node, iteration). This file knows neither models nor time.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rlflow.graph.graph import Graph

if TYPE_CHECKING:
    from torch import Tensor

Key = tuple[str, int]


class ShardStore:
    """Fields by node and iteration, freed when every reader of that iteration has run."""

    def __init__(self, graph: Graph) -> None:
        self._readers: dict[str, int] = dict.fromkeys((node.name for node in graph.nodes), 0)
        for node in graph.nodes:
            for source in node.sources:
                self._readers[source] += 1
        self._fields: dict[Key, dict[str, Tensor]] = {}
        self._left: dict[Key, int] = {}
        self._lock = threading.Lock()

    def put(self, node: str, iteration: int, fields: dict[str, Tensor]) -> None:
        """Keep what a node made, if anybody reads it."""
        readers = self._readers[node]
        if readers:
            with self._lock:
                self._fields[node, iteration] = fields
                self._left[node, iteration] = readers

    def get(self, node: str, iteration: int) -> dict[str, Tensor]:
        """What a node made in an iteration; KeyError once its last reader has run."""
        return self._fields[node, iteration]

    def release(self, node: str, iteration: int) -> None:
        """Note that one reader has run; the last one frees the fields."""
        key = (node, iteration)
        with self._lock:
            self._left[key] -= 1
            if self._left[key] == 0:
                del self._fields[key], self._left[key]

    def __len__(self) -> int:
        return len(self._fields)
