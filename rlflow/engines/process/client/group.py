"""A process group of a worker and the ranks of an engine, through which weights are sent.

It stands beside the default group of torch.distributed and needs none. Its bytes go from the
host's memory, by gloo: worker and engine may share a GPU, which NCCL does not allow. This file
knows no weights and no engine.
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Where the ranks of a group of this name look for each other in a store: SGLang puts the name
# before every key, torch does it once more, and then the kind of device.
KEYS = ("rlflow", "rlflow/", "cpu/")


class EngineGroup:
    """Rank 0 of a group with `ranks` others, who find it at `address` and `port`.

    Whatever is done in it fails after so many seconds.
    """

    def __init__(self, address: str, ranks: int, *, seconds: float) -> None:
        self._ranks = ranks
        self._limit = timedelta(seconds=seconds)
        holder = socket.socket(family(address), socket.SOCK_STREAM)
        holder.bind((address, 0))
        holder.listen()
        self.port = int(holder.getsockname()[1])
        store: Any = dist.TCPStore  # type: ignore[attr-defined]
        self._store = store(
            address,
            self.port,
            is_master=True,
            timeout=self._limit,
            wait_for_workers=False,
            master_listen_fd=holder.detach(),
        )
        self._group: Any = None

    def meet(self) -> None:
        """Wait until all ranks are there; raises RuntimeError where they are not in time."""
        store: Any = self._store
        for prefix in KEYS:
            store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        gloo: Any = dist.ProcessGroupGloo
        self._group = gloo(store, 0, 1 + self._ranks, self._limit)

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor to all ranks; raises RuntimeError where one is gone or takes too long."""
        self._group.broadcast(tensor, 0).wait()


def family(address: str) -> socket.AddressFamily:
    """The family of sockets that an address needs; a host name is taken as one of IPv4."""
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        return socket.AF_INET
    return socket.AF_INET6 if version == 6 else socket.AF_INET
