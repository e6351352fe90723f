"""A slow cable to node1 of `two_hosts.sh`: `wire.py MILLISECONDS MEGABITS`, until it is ended.

The host's interface becomes one end of it, and the bridge has the other; each frame arrives so many
milliseconds after it was sent, behind all before it, at so many megabits a second. Needs no kernel
that can delay by itself.
"""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import subprocess
import sys
import threading
import time

TUNSETIFF, TAP, PLAIN = 0x400454CA, 0x0002, 0x1000
# Frames on their way; one more is lost, as in a router.
ROOM = 1000
IN_NODE = ("ip", "netns", "exec", "node1")


def end(name: str) -> int:
    """A network interface of this name whose frames are read and written here."""
    made = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(made, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | PLAIN))
    return made


def carry(source: int, target: int, delay: float, rate: float) -> None:
    """Bring frames from one end to the other, in seconds and bytes a second."""
    under_way: queue.Queue[tuple[float, bytes]] = queue.Queue(ROOM)

    def read() -> None:
        free = 0.0
        while True:
            frame = os.read(source, 65536)
            free = max(free, time.monotonic()) + len(frame) / rate
            if not under_way.full():
                under_way.put((free + delay, frame))

    def write() -> None:
        while True:
            due, frame = under_way.get()
            time.sleep(max(0.0, due - time.monotonic()))
            os.write(target, frame)

    for each in (read, write):
        threading.Thread(target=each, daemon=True).start()


def main(milliseconds: str, megabits: str) -> None:
    """Put the cable where the quick one was, say so, and carry."""
    here, there = end("here"), end("there")
    for words in (
        ("ip", "link", "set", "here", "master", "bridge", "up"),
        ("ip", "link", "set", "there", "netns", "node1"),
        (*IN_NODE, "ip", "link", "del", "eth0"),
        (*IN_NODE, "ip", "link", "set", "there", "name", "eth0"),
        (*IN_NODE, "ip", "addr", "add", "10.77.0.2/24", "dev", "eth0"),
        (*IN_NODE, "ip", "link", "set", "eth0", "up"),
    ):
        subprocess.run(words, check=True)
    delay, rate = float(milliseconds) / 1e3, float(megabits) * 1e6 / 8
    carry(here, there, delay, rate)
    carry(there, here, delay, rate)
    sys.stdout.write("made\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
