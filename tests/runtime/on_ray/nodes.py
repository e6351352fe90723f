"""Nodes of one Ray cluster on loopback addresses of this machine, until standard input closes.

`python nodes.py SESSION DIRECTORY ADDRESS...`: the first is the head's. Prints where the
cluster can be joined. Each line read is `start ADDRESS` or `kill ADDRESS`, and is answered.
"""

from __future__ import annotations

import os
import signal
import sys

from ray._private.node import Node
from ray._private.parameter import RayParams

from rlflow.runtime.ray.cluster.clusters import lean, marks
from rlflow.runtime.ray.cluster.environment import variables
from rlflow.runtime.ray.cluster.process_lifetime import die_with_parent


def main(session: str, directory: str, *addresses: str) -> None:
    """Start the nodes in the order given, and do what is asked until nobody asks any more."""
    die_with_parent()
    nodes: dict[str, Node] = {}
    with lean(), variables(marks(session)):
        for address in addresses:
            nodes[address] = node(address, directory, nodes.get(addresses[0]))
        say(nodes[addresses[0]].gcs_address)
        for line in sys.stdin:
            verb, address = line.split()
            if verb == "start":
                nodes[address] = node(address, directory, nodes[addresses[0]])
            else:
                raylet = nodes[address].all_processes["raylet"][0].process
                os.kill(raylet.pid, signal.SIGKILL)
                raylet.wait()
            say("done")
    for started in reversed(nodes.values()):
        started.kill_all_processes(check_alive=False, allow_graceful=False)


def say(line: str) -> None:
    """Answer whoever keeps this process."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def node(address: str, directory: str, head: Node | None) -> Node:
    """Two CPUs at an address, and a small object store."""
    where = {"temp_dir": directory} if head is None else {"gcs_address": head.gcs_address}
    parameters = RayParams(
        node_ip_address=address,
        num_cpus=2,
        num_gpus=0,
        object_store_memory=200_000_000,
        include_dashboard=False,
        dashboard_host="127.0.0.1",
        **where,
    )
    return Node(parameters, head=head is None, shutdown_at_exit=False, spawn_reaper=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
