"""Temporary."""

from __future__ import annotations

import ctypes
import signal

import ray


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Session:
    embedded = True

    @classmethod
    def start(cls, *, address, cpus, gpus=0, deadline=30.0):
        ray.init(
            address=address,
            num_cpus=None if address else cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
            object_store_memory=512 << 20,
        )
        made = cls()
        made.embedded = address is None
        return made

    def close(self):
        ray.shutdown()
