"""A user's own program that runs the small pipeline: in a loop, or in a `with` block."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import rlflow as rf
from tests.chaos.faulted import faulted

if __name__ == "__main__":
    how, directory = sys.argv[1:]
    run = rf.run(
        faulted,
        placement="one",
        threads=1,
        save_every=2,
        devices="cpu:1",
        iterations=5,
        run_dir=directory,
    )
    with run if how == "with" else nullcontext():
        for done in run:
            print(done.iteration, flush=True)  # noqa: T201
