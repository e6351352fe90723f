"""What the ranks of a world do in the tests of families."""

from __future__ import annotations

import torch

from rlflow.engines.hf.sharded.build import load_sharded
from rlflow.errors import UsageError
from tests.engines.sharded_checks import meshes

SHAPES = {"fsdp": (1, 2, 1), "tp": (1, 1, 2), "sequence": (1, 1, 2), "ep": (1, 2, 1, 2)}
SHAPES |= {"ulysses": (1, 2, 1, 1, 2), "ring": (1, 2, 1, 1, 2), "pp": (1, 1, 1)}


def refusal(rank, path, layout):
    """The code of the refusal to load a model over ranks, empty where it loads."""
    how = {"dtype": torch.float32, "device": "cpu", "trained": False}
    how["sequence"] = layout == "sequence"
    how |= {"cp_by": layout} if layout in ("ulysses", "ring") else {}
    apart = meshes(SHAPES[layout], 2 if layout == "pp" else 1)
    return refused(lambda: load_sharded(path, **apart, **how))


def refused(load):
    """The code of the first finding of a refusal, empty where there is none."""
    try:
        load()
    except UsageError as error:
        return error.findings[0].code
    return ""
