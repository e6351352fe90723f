"""Where the ranks of an engine are that lie on several hosts, as one of the hosts sees it.

This file knows no engine.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from rlflow.engines.process.client.group import family


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Host number `rank` of `count` that share a replica; its ranks meet at `address`, `port`.

    `address` is that of the first host, whose worker holds the rows and brings the weights.
    """

    address: str
    port: int
    rank: int
    count: int

    @property
    def meeting(self) -> str:
        """Address and port in one."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


def free_port(address: str) -> int:
    """A port that nobody uses at the moment, of an address of this host."""
    with socket.socket(family(address), socket.SOCK_STREAM) as found:
        found.bind((address, 0))
        return int(found.getsockname()[1])
