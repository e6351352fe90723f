"""SGLang on a CPU, where this directory is found: with torchvision and adapters, started quickly.

The wheel of torchvision is built for CUDA: its library does not load here, and registering what
its operators return then fails. Their schemas are defined first; the operators are never called.
SGLang's adapters pin memory, for copies to an accelerator; where there is none torch refuses that.
SGLang spawns its processes, since CUDA survives no fork, and each imports for ten seconds of a core
what its parent has; without CUDA they are forked.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import multiprocessing.context
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

PINNING = ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend")
MAKERS = ("tensor", "zeros")


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


class NothingPinned(importlib.abc.MetaPathFinder):
    """Finds SGLang's adapters, and has them pin no memory."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Called for every import; what is found is given another torch once it was run."""
        if name not in PINNING:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run: Callable[[ModuleType], None] = spec.loader.exec_module

            def run_unpinned(module: ModuleType) -> None:
                run(module)
                vars(module)["torch"] = unpinned()

            vars(spec.loader)["exec_module"] = run_unpinned
        return spec


def unpinned() -> ModuleType:
    """Torch, but that nothing is pinned: no tensor, and none of those that it makes here."""
    import torch

    class Unpinned(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    def maker(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    found = Unpinned("torch")
    for name in MAKERS:
        setattr(found, name, maker(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[assignment]
    return found


def set_start_method(method: str | None, force: bool = False) -> None:
    """In the place of `multiprocessing`'s: processes that would be spawned are forked."""
    chosen = "fork" if method == "spawn" else method
    multiprocessing.context._default_context.set_start_method(chosen, force=force)


vars(multiprocessing)["set_start_method"] = set_start_method
sys.meta_path[:0] = [SchemasFirst(), NothingPinned()]
