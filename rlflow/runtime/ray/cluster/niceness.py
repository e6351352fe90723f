"""The priority of Ray's workers on clusters that rlflow starts, said where Ray is not imported.

Ray's own 15 leaves a worker a thirtieth of a core beside an ordinary process of the machine, say
an engine. At 5 Ray's daemons still go before the workers.
"""

from __future__ import annotations

VARIABLE = "RAY_worker_niceness"
NICENESS = "5"
