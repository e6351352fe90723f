"""Actions that do nothing, in a chain, and that sleep, side by side: for `ray_overhead.py`."""

from __future__ import annotations

import rlflow as rf
from rlflow.graph.fields import row
from rlflow.graph.op import Input, Op
from rlflow.graph.trace import add_node

LENGTH = 10
ROWS = 2
LINKS = {f"link_{number}": rf.on("all") for number in range(LENGTH)}
START = Op(
    name="start",
    body="empty_bodies:start",
    inputs=(),
    outputs=(row("link"),),
    per="row",
    rows="new",
)
LINK = Op(
    name="link",
    body="empty_bodies:link",
    inputs=(Input(name="link", dtype="float32", levels=("row",)),),
    outputs=(row("link"),),
    per="row",
    effect="effectful",
)
DOZE = Op(
    name="doze",
    body="empty_bodies:doze",
    inputs=(),
    outputs=(),
    per="batch",
    rows="none",
    effect="effectful",
)


class Naps(rf.Config):
    """What `--set` may change."""

    seconds: float = 0.2


@rf.pipeline(
    placements={
        "one": rf.Placement(pools={"all": 1}, assign={"start": rf.on("all"), **LINKS}),
        "two": rf.Placement(pools={"all": 2}, assign={"start": rf.on("all"), **LINKS}),
    }
)
def chain(cfg: rf.Config) -> None:
    handle = add_node(START, (), params={"rows": ROWS})
    for number in range(LENGTH):
        handle = add_node(LINK, (handle,), name=f"link_{number}")


@rf.pipeline(
    placements={
        "apart": rf.Placement(
            pools={"left": 1, "right": 1}, assign={"nap": rf.on("left"), "doze": rf.on("right")}
        ),
    }
)
def naps(cfg: Naps) -> None:
    add_node(DOZE, (), params={"seconds": cfg.seconds}, name="nap")
    add_node(DOZE, (), params={"seconds": cfg.seconds}, name="doze")
