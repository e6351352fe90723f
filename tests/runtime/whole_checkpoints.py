"""A whole checkpoint read back, every component in memory, as tests compare it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rlflow.runtime.record.checkpoint import Found, find_checkpoint, stored_files
from rlflow.runtime.record.manifest import read_manifest
from rlflow.runtime.record.shards.reading import open_component

READERS = {"pt": "safetensors.torch", "np": "safetensors.numpy"}


@dataclass(frozen=True, kw_only=True)
class Loaded:
    found: Found
    components: dict

    def __getattr__(self, name):
        return getattr(self.found, name)


def load_checkpoint(root, *, identity=None, framework="pt"):
    """The newest checkpoint that verifies, with tensors of torch or numpy; None without one.

    Of components that are one file each.
    """
    found = find_checkpoint(root, identity=identity)
    if found is None:
        return None
    load = import_module(READERS[framework]).load_file
    whole = {name: load(file.path) for name, (file,) in found.files.items()}
    return Loaded(found=found, components=whole)


def joined(checkpoint: Path) -> dict:
    """The tensors of a checkpoint directory by component and name, whole in any layout."""
    tensors = {}
    for component, files in stored_files(checkpoint, read_manifest(checkpoint)).items():
        with open_component(files) as stored:
            tensors |= {f"{component}/{name}": each[...] for name, each in stored.items()}
    return dict(sorted(tensors.items()))
