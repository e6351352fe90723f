"""SGLang on a CPU, where this directory is found: what it has for GPUs alone in plain torch.

The wheel of torchvision is built for CUDA: its library does not load here, and registering what
its operators return then fails. Their schemas are defined first; the operators are never called.
SGLang's adapters and its notes of routed experts pin memory, for copies to an accelerator; where
there is none torch refuses that. Norms and shared experts with a gate have kernels of triton alone.
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


class Mended(importlib.abc.MetaPathFinder):
    """Finds modules of SGLang that need a GPU, and mends each once it was run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Called for every import."""
        mend = MENDED.get(name)
        if mend is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run: Callable[[ModuleType], None] = spec.loader.exec_module

            def run_mended(module: ModuleType) -> None:
                run(module)
                mend(vars(module))

            vars(spec.loader)["exec_module"] = run_mended
        return spec


def pin_nothing(names: dict[str, Any]) -> None:
    """Torch, but that nothing is pinned: no tensor, and none of those that it makes here."""
    import torch

    class Unpinned(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    def maker(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

    names["torch"] = found = Unpinned("torch")
    for name in ("tensor", "zeros"):
        setattr(found, name, maker(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[assignment]


def register_nothing(names: dict[str, Any]) -> None:
    """Memory of the host is not told to a driver that is not there."""
    names["_cuda_host_register"] = lambda buffer, granularity=None: None


def norm_plainly(names: dict[str, Any]) -> None:
    """A root-mean-square norm whose outcome is multiplied by what a gate becomes."""
    import torch

    gates = {"swish": torch.nn.functional.silu, "silu": torch.nn.functional.silu}
    gates["sigmoid"] = torch.sigmoid

    def rms_norm_gated(
        x: Any, g: Any, weight: Any, bias: Any, activation: str, *, eps: float, **more: Any
    ) -> Any:
        if bias is not None or any(more.values()):
            raise RuntimeError("a gated norm with a bias or a residual: not on this CPU")
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        normed = normed if weight is None else normed * weight.float()
        return (normed * gates[activation](g.float())).to(x.dtype)

    names["rms_norm_gated"] = rms_norm_gated


def gate_plainly(names: dict[str, Any]) -> None:
    """What a shared expert has made, times the share that a gate of each token lets through."""

    def launch(hidden: Any, gate: Any, shared: Any, output: Any, *, do_add: bool) -> None:
        share = (hidden.float() @ gate.float()).sigmoid()[:, None]
        made = share * shared.float() + (output.float() if do_add else 0.0)
        output.copy_(made.to(output.dtype))

    names["_launch_fused_gate_sigmoid_mul"] = launch


MENDED: dict[str, Callable[[dict[str, Any]], None]] = {
    "sglang.srt.lora.layers": pin_nothing,
    "sglang.srt.lora.backend.torch_backend": pin_nothing,
    "sglang.srt.mem_cache.pool_host.common": register_nothing,
    "sglang.kernels.ops.attention.fla.fused_norm_gate": norm_plainly,
    "sglang.kernels.ops.elementwise.elementwise": gate_plainly,
}


def set_start_method(method: str | None, force: bool = False) -> None:
    """In the place of `multiprocessing`'s: processes that would be spawned are forked."""
    chosen = "fork" if method == "spawn" else method
    multiprocessing.context._default_context.set_start_method(chosen, force=force)


vars(multiprocessing)["set_start_method"] = set_start_method
sys.meta_path[:0] = [SchemasFirst(), Mended()]
