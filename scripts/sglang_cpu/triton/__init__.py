"""Stands for triton where nothing of it runs: the real wheel unpacks to 1 GB.

Any submodule and any name in one can be imported; a kernel raises when it is launched.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__version__ = "3.9.0"

DECORATORS = ("jit", "autotune", "heuristics", "jit_function", "constexpr_function")


class Kernel:
    """A decorated function, which cannot be launched."""

    def __init__(self, function: Any = None) -> None:
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(f"triton kernel {self.__name__} cannot run on a CPU")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse."""
        raise RuntimeError(f"triton kernel {self.__name__} cannot run on a CPU")


def decorator(*args: Any, **kwargs: Any) -> Any:
    """Makes a kernel, with or without arguments to the decorator."""
    if len(args) == 1 and not kwargs and callable(args[0]):
        return Kernel(args[0])
    made: Callable[[Any], Any] = lambda function: (  # noqa: E731
        function if isinstance(function, Kernel) else Kernel(function)
    )
    return made


class AnyName(type):
    """Has every public attribute: itself."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Nothing(metaclass=AnyName):
    """Stands for any class of triton."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class Submodule(ModuleType):
    """A submodule with every public name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return decorator if name in DECORATORS else type(name, (Nothing,), {})


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every submodule."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A package of that name, if it is triton's."""
        if not name.startswith("triton."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """An empty one."""
        module = Submodule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


sys.meta_path.append(Submodules())
jit = autotune = heuristics = decorator
Config = type("Config", (Nothing,), {})


def cdiv(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, int(n) - 1).bit_length()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"triton.{name}")
