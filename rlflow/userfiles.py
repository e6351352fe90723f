"""Where a user's file belongs: its package, its own modules, and how they are pickled.

And how its code is kept from ending the process that calls it. Knows files and modules; nothing
of pipelines or of what is done with them.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import sys
import threading
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

OWN = Path(__file__).resolve().parent
INSTALLED = {"site-packages", "dist-packages"}
_REAL = os._exit
_LOCK = threading.Lock()
_INSIDE: set[tuple[int, int]] = set()
OF_THE_IMPORT = {"__builtins__", "__cached__", "__loader__", "__spec__"}


def package_of(path: Path) -> tuple[Path, str]:
    """The folder that a file's package is imported from, and the package's dotted name.

    For a file in no package its own folder, and no name. Packages have an `__init__.py`.
    """
    folder = path.resolve().parent
    names: list[str] = []
    while folder.name.isidentifier() and (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)


def own_folder(path: Path) -> Path:
    """The folder of the modules that belong to a file: its outermost package, or its own folder."""
    root, package = package_of(path)
    return root / package.partition(".")[0]


def own_modules(path: Path) -> list[ModuleType]:
    """The modules loaded from a file's own folder; those of rlflow, or installed there, are not."""
    folder = own_folder(path)
    named = [module for name, module in list(sys.modules.items()) if _name(module) == name]
    return [module for module in named if _lies_in(module, folder)]


def _name(module: ModuleType) -> object:
    return getattr(module, "__name__", None)


def _lies_in(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return False
    path = Path(file).resolve()
    if not path.is_relative_to(folder) or path.is_relative_to(OWN):
        return False
    return not INSTALLED & set(path.relative_to(folder).parts)


def dumped(value: object) -> bytes:
    """A value as cloudpickle has it, but for modules that go by value and use each other.

    Those are registered with cloudpickle, or not loaded by their name here. Raises what it raises.
    """
    import cloudpickle

    usual = cloudpickle.Pickler
    table = ChainMap({ModuleType: _module}, usual.dispatch_table)
    pickler = type("Pickler", (usual,), {"dispatch_table": table})
    with io.BytesIO() as file:
        pickler(file).dump(value)
        return file.getvalue()


def _module(module: ModuleType) -> tuple[Any, ...]:
    """How a module is made again: by its name, or empty first, so that a cycle can end in it."""
    import cloudpickle

    name = module.__name__
    parts = name.split(".")
    parents = {".".join(parts[: n + 1]) for n in range(len(parts))}
    if (
        sys.modules.get(name) is module
        and not parents & cloudpickle.list_registry_pickle_by_value()
    ):
        return importlib.import_module, (name,)
    held = {key: each for key, each in vars(module).items() if key not in OF_THE_IMPORT}
    return ModuleType, (name,), held, None, None, _filled


def _filled(module: ModuleType, held: dict[str, Any]) -> None:
    vars(module).update(held, __builtins__=builtins)


@contextmanager
def kept_alive() -> Iterator[None]:
    """Have `os._exit` raise SystemExit where this thread calls it: a failure of that call alone.

    It would end a run without a word, and with code 0 as if it were done. In a forked copy and in
    other threads it does what it always did; a copy that comes back from here ends, for there is
    one run. What C code ends, it ends.
    """
    me = (os.getpid(), threading.get_ident())
    with _LOCK:
        again = me in _INSIDE
        _INSIDE.add(me)
        os._exit = _exit
    try:
        yield
    finally:
        if os.getpid() != me[0]:
            _REAL(int(sys.exc_info()[0] is not None))
        with _LOCK:
            if not again:
                _INSIDE.discard(me)
            if not _INSIDE:
                os._exit = _REAL


def _exit(status: int) -> NoReturn:
    if (os.getpid(), threading.get_ident()) in _INSIDE:
        raise SystemExit(f"os._exit({status})")
    _REAL(status)
