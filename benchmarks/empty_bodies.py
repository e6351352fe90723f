"""The bodies of `pipelines/empty.py`: nothing, and nothing for a while.

Worker processes import this file by its name, so its folder has to be on their path.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rlflow.ops.body import Output

if TYPE_CHECKING:
    from rlflow.ops.body import Call


def start(call: Call) -> Output:
    """Make the field of a chain, one number a row."""
    import torch

    rows = call.params["rows"]
    return Output(fields={"link": torch.zeros(rows)}, rows=rows)


def link(call: Call) -> Output:
    """Hand on the field that was read."""
    assert call.inputs is not None
    field = call.inputs["link"]
    return Output(fields={"link": field}, rows=len(field))


def doze(call: Call) -> Output:
    """Keep a device busy for some seconds without a processor."""
    time.sleep(call.params["seconds"])
    return Output()
