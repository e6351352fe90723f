"""What the weights of a model are called in its files, by which engines know them.

A module may have as one tensor what files have as several, such as all experts of a layer, or call
a tensor otherwise than its files. An engine that is told a name it does not know may pass over it
in silence, so that it is told none but those of files: each is a part of the same memory. This file
knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlflow.engines.hf.weights.names import may_be_turned
from rlflow.engines.hf.weights.parts import StoredPart, parts_in_files
from rlflow.engines.reshard.bucket_layout import scale_name
from rlflow.errors import Finding, UsageError

# Name, dtype, shape, offset in bytes.
Entry = tuple[str, str, tuple[int, ...], int]
SCALES = scale_name("")


class FileNames:
    """The names in files of a module's weights, by the module's own; those without keep theirs.

    Adapters are in no file. Scales of a quantised weight are called after it.
    """

    def __init__(self, parts: Mapping[str, StoredPart] | None = None) -> None:
        self._of: dict[str, list[tuple[str, StoredPart]]] = {}
        for key, part in (parts or {}).items():
            self._of.setdefault(part.own, []).append((key, part))

    @classmethod
    def of(cls, module: Any, path: str) -> FileNames:
        """Those of a module that transformers has made of a path, maybe without memory.

        Raises UsageError (E591) where files hold what is made of its weights otherwise.
        """
        parts = parts_in_files(module)
        if parts is None or any(may_be_turned(part.own, module) for part in parts.values()):
            raise UsageError(_made_otherwise(path))
        return cls(parts)

    def rows(self, table: Iterable[Entry]) -> list[Entry]:
        """The rows of a table of own names, each as those of its names in files; by offset."""
        made: list[Entry] = []
        for row in table:
            name, dtype, shape, begin = row
            parts = self._of.get(name)
            if parts is None:
                made.append((self._plain(name), dtype, shape, begin))
                continue
            size = getattr(torch, dtype).itemsize
            for key, part in parts:
                place = part.place(tuple(shape))
                assert place is not None, f"{key} does not lie in one piece"
                made.append((key, dtype, part.shape, begin + place * size))
        return sorted(made, key=lambda row: row[3])

    def views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights by their names in files, views of those by own names."""
        made: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            parts = self._of.get(name)
            if parts is None:
                made[self._plain(name)] = tensor
            else:
                made |= {key: part.of(tensor) for key, part in parts}
        return made

    def _plain(self, name: str) -> str:
        """The name of what is in no file itself: an adapter's own, or that of scales."""
        whole = self._of.get(name.removesuffix(SCALES), []) if name.endswith(SCALES) else []
        return scale_name(whole[0][0]) if len(whole) == 1 else name


def _made_otherwise(path: str) -> Finding:
    return Finding(
        code="E591",
        what=f"an engine cannot be told the weights of {path!r} by the names of its files",
        got="tensors in files that are made of several of the model's, or of one turned around",
        expected="each tensor of the files a part of one of the model's",
        fix='rf.on(..., engine="torch")',
    )
