"""Digests of the files of models: whole where they are small, else by size and blocks.

A large file is known by its size and blocks from all of it: other weights differ in every block,
and no start reads more than a few megabytes. A change of single bytes between the blocks is not
seen. Times of files do not count: a copy is the same model.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from rlflow.runtime.record.identity.sources import DIGITS

WHOLE = 4 << 20
BLOCKS = 64
BLOCK = 16 << 10
SMALL = (".json", ".model", ".jinja")
NAMES = ("merges.txt", "vocab.txt")
WEIGHTS = (".safetensors", ".bin")


def model_digests(directory: Path, *, weights: bool) -> dict[str, str]:
    """A digest by name of each file of a model that a run reads; `weights` those of tensors too."""
    ends = SMALL + (WEIGHTS if weights else ())
    files = [each for each in sorted(directory.iterdir()) if each.is_file()]
    return {
        file.name: file_digest(file)
        for file in files
        if (file.name.endswith(ends) or file.name in NAMES) and not file.name.startswith(".")
    }


def file_digest(path: Path) -> str:
    """A digest of a file's size and bytes; of blocks of one that is large. Raises OSError."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb", buffering=0) as file:
        if size <= WHOLE:
            digest.update(file.readall())
        else:
            for number in range(BLOCKS):
                place = number * (size - BLOCK) // (BLOCKS - 1)
                digest.update(os.pread(file.fileno(), BLOCK, place))
    return digest.hexdigest()[:DIGITS]
