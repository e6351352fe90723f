"""What SGLang is told besides where its ranks lie on several hosts, of one part of it.

This file knows the names of SGLang's options, and no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlflow.engines.process.nodes import Nodes
from rlflow.engines.process.sglang.arguments import cores


def helps(nodes: Nodes | None) -> bool:
    """Whether this host's part answers nothing: the first host's does."""
    return nodes is not None and nodes.rank > 0


def node_arguments(nodes: Nodes | None) -> dict[str, Any]:
    """The arguments of `sglang.Engine` that tell it of the other hosts."""
    if nodes is None:
        return {}
    return {
        "nnodes": nodes.count,
        "node_rank": nodes.rank,
        "dist_init_addr": nodes.meeting,
    }


def node_variables(
    nodes: Nodes | None, device: torch.device, places: Sequence[int]
) -> dict[str, str]:
    """What a part of an engine has in its environment for the ranks at its host's `places`.

    A part that helps does not wait inside SGLang for its end, so that it can say it has begun.
    On a CPU each rank needs cores of its own, also where a host has one rank.
    """
    if nodes is None:
        return {}
    made = {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"}
    if device.type == "cpu":
        made["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores(places))
    return made
