"""Lets torchvision be imported beside a CPU torch, wherever this directory is on the path.

The wheel of torchvision is built for CUDA: its library does not load here, and registering what
its operators return then fails. Their schemas are defined first; the operators are never called.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from types import ModuleType

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class SchemasFirst(importlib.abc.MetaPathFinder):
    """Finds nothing, but defines the schemas when torchvision is looked for."""

    kept: object = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Called for every import; this finder leaves with the first of torchvision."""
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for schema in SCHEMAS:
            library.define(schema)
        SchemasFirst.kept = library


sys.meta_path.insert(0, SchemasFirst())
