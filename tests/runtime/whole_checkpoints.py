"""A whole checkpoint read back, every component in memory, as tests compare it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from rlflow.runtime.record.checkpoint import Found, find_checkpoint

READERS = {"pt": "safetensors.torch", "np": "safetensors.numpy"}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    found: Found
    components: dict

    def __getattr__(self, name):
        return getattr(self.found, name)


def load_checkpoint(root, *, identity=None, framework="pt"):
    """The newest checkpoint that verifies, with tensors of torch or numpy; None without one."""
    found = find_checkpoint(root, identity=identity)
    if found is None:
        return None
    load = import_module(READERS[framework]).load_file
    return Loaded(found=found, components={name: load(f) for name, f in found.files.items()})
