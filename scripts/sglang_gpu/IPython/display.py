"""Names that SGLang imports; nothing is shown."""

from __future__ import annotations

from typing import NoReturn


def display(*_: object, **__: object) -> NoReturn:
    """No notebook is here."""
    raise RuntimeError("IPython is not in this bundle: install it to show pages in a notebook")


HTML = Image = clear_output = display
