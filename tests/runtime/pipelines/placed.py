"""The shipped tiny model, and placements that whole runs compare: one device, or one a role."""

from __future__ import annotations

from pathlib import Path

import rlflow as rf

TINY = str(Path(__file__).resolve().parents[3] / "pipelines" / "assets" / "arith-tiny")


def together(devices: int = 1, **options: object) -> rf.Placement:
    """Everything on the same devices."""
    return rf.Placement(pools={"all": devices}, assign={"*": rf.on("all")}, **options)


def apart(*beside: str, train: int = 1, gen: int = 1, **options: object) -> rf.Placement:
    """The actor's rollout, and what is named, on devices of their own."""
    assign = {name: rf.on("gen") for name in ("actor.rollout", *beside)}
    pools = {"train": train, "gen": gen}
    return rf.Placement(pools=pools, assign={"*": rf.on("train"), **assign}, **options)
