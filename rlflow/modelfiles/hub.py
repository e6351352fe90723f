"""Whether the Hugging Face hub has a model, asked in seconds and once a process.

huggingface_hub is imported when there is something to ask; nothing is downloaded.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Literal

Answer = Literal["there", "missing", "unreachable", "offline"]

SECONDS = 4.0
YES = {"1", "ON", "YES", "TRUE"}


def on_the_hub(name: str) -> Answer:
    """What the hub says of a name within a few seconds; `offline` where it is not to be asked."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in YES:
        return "offline"
    return _asked(name, os.environ.get("HF_ENDPOINT"))


@functools.lru_cache(maxsize=64)
def _asked(name: str, endpoint: str | None) -> Answer:
    """Ask in a thread of its own: a name server that does not answer knows no time limit."""
    found: list[Answer] = []
    asking = threading.Thread(target=lambda: found.append(_answer(name, endpoint)), daemon=True)
    asking.start()
    asking.join(SECONDS)
    return found[0] if found else "unreachable"


def _answer(name: str, endpoint: str | None) -> Answer:
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError
    except ImportError:
        return "unreachable"
    try:
        HfApi(endpoint=endpoint).model_info(name, timeout=SECONDS)
    except RepositoryNotFoundError:
        return "missing"
    except Exception:  # every way in which a network fails
        return "unreachable"
    return "there"
