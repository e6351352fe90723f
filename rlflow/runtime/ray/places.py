"""The order of places: nodes by address, devices by number. Pure; knows no cluster."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import re
import socket
import struct

Key = tuple[int, int, str]


# The request of an interface's address, of Linux.
SIOCGIFADDR = 0x8915


def address_key(address: str) -> Key:
    """Sorts IPv4 before IPv6, each by number, and host names after both.

    An IPv4 address written as IPv6 (RFC 4291, 2.5.5.2) is the IPv4 address.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return (9, 0, address)
    mapped = getattr(found, "ipv4_mapped", None) or found
    return (mapped.version, int(mapped), getattr(mapped, "scope_id", None) or "")


def device_key(device: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts device ids such as `3` or `0,1` by number, and names such as `GPU-8f3a` after."""
    return tuple(
        (0, int(part), "") if re.fullmatch("[0-9]+", part) else (1, 0, part)
        for part in (piece.strip() for piece in device.split(","))
        if part
    )


def interface_of(address: str) -> str:
    """The network interface of this host that has an address of IPv4; empty where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""
