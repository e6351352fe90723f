"""Stands in for flashinfer, whose wheel is as large as SGLang's: it is imported, and never asked.

SGLang is told to compute without it (SGLANG_IS_FLASHINFER_AVAILABLE), and imports some of its
functions nevertheless.
"""

from __future__ import annotations

from typing import NoReturn


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"flashinfer.{name} is not in this bundle: install flashinfer-python")

    return refuse
