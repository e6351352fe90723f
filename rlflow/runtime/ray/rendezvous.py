"""Where ranks meet: a store on the first rank's node, at a port that is held from the start.

A port that is looked for, told to others and bound later may be taken in between. Here the
first rank binds it at once, on its node's address alone. Torch's store asks nobody who he is, so it
listens on the loopback, and the port is a gate to it for those who know the run's token. Knows
torch's store and no process group.
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlflow.errors import DeviceLostError, Finding
from rlflow.runtime.ray.cluster.gate import LOOPBACK, open_gate, passage

BACKLOG = 1024
_held: dict[int, socket.socket] = {}


def hold_port(address: str) -> int:
    """Bind a free port on one of this node's addresses, and keep it for `meet`."""
    family = socket.AF_INET6 if _is_ipv6(address) else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.bind((address, 0))
        holder.listen(BACKLOG)
    except OSError as error:
        holder.close()
        raise _no_meeting(f"{address} cannot be bound: {error.strerror}", address, 0) from error
    port: int = holder.getsockname()[1]
    _held[port] = holder
    return port


def meet(address: str, port: int, *, token: str, seconds: float) -> Any:
    """The store at the meeting point: served by the process that holds the port, else joined.

    Raises DeviceLostError where it is not reached within so many seconds, or with another token.
    """
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    limit = timedelta(seconds=seconds)
    holder = _held.pop(port, None)
    try:
        if holder is None:
            way = passage(address, port, token.encode(), seconds=seconds)
            return store(LOOPBACK, way, is_master=False, timeout=limit)
        inner = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        way = int(inner.getsockname()[1])
        made = store(
            LOOPBACK,
            way,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=inner.detach(),
        )
        open_gate(holder, token.encode(), way)
    except (dist.DistNetworkError, dist.DistStoreError, ValueError, OSError) as error:
        raise _no_meeting(str(error).splitlines()[0], address, port) from error
    return made


def _is_ipv6(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False


def _no_meeting(got: str, address: str, port: int) -> DeviceLostError:
    return DeviceLostError(
        Finding(
            code="E778",
            what="the ranks cannot meet",
            got=got,
            expected=f"a store at {address}:{port}, served by the first rank",
        )
    )
