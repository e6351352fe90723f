"""What the passes look things up in: the placement asked for, the devices, the estimates.

Frozen, and the same for every pass but for the graph of the estimates, which is the plan's.
It knows no plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlflow.graph.placement import Placement
from rlflow.scheduler.costs.estimate import Costs
from rlflow.scheduler.devices.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the passes look things up in, and do not change.

    `chunks` is into how many chunks `stream` cuts: of complete `groups` where updates then follow,
    of rows, or of what is estimated to be shorter where that is None. A `rough` plan is one of many
    that are compared: less work is spent on its order. The layers of instances that are
    `kept_whole` stay so from an update's forward to its backward, and gradients of those that
    `reduces_last` names are whole until the last micro-batch, though no placement says it. Nodes
    that have `rooms` may need so many bytes of a device, as others leave no more.
    """

    placement: Placement
    cluster: Cluster
    costs: Costs
    optimize: float = 0.0
    chunks: int = 1
    groups: bool | None = None
    rough: bool = False
    kept_whole: frozenset[str] = frozenset()
    reduces_last: frozenset[str] = frozenset()
    rooms: Mapping[str, int] = field(default_factory=dict)
