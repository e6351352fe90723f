"""What the driver's library says of one GPU, by its C interface; nothing where it is not there.

`nvidia-ml-py` is the same interface and is not needed. A figure that a GPU does not have, as the
utilisation of a MIG slice, is left out. `RLFLOW_NVML` names another library.
"""

from __future__ import annotations

import ctypes
import os

LIBRARY = "libnvidia-ml.so.1"
VARIABLE = "RLFLOW_NVML"
SUCCESS = 0
SM_CLOCK = 1


class _Utilisation(ctypes.Structure):
    """`nvmlUtilization_t`: percent of the last sample period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`, bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class NvmlGpu:
    """One GPU by its UUID, `GPU-...`; `figures` asks it."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    @classmethod
    def found(cls, uuid: str) -> NvmlGpu | None:
        """The GPU of that UUID; None where the library or the GPU does not answer."""
        try:
            library = ctypes.CDLL(os.environ.get(VARIABLE, LIBRARY))
            if library.nvmlInit_v2() != SUCCESS:
                return None
            handle = ctypes.c_void_p()
            name = ctypes.c_char_p(uuid.encode())
            code = library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle))
        except (OSError, AttributeError):
            return None
        return cls(library, handle) if code == SUCCESS else None

    def figures(self) -> dict[str, float]:
        """Utilisation in percent, SM clock in Hz, power in W, bytes used by all processes."""
        used, memory = _Utilisation(), _Memory()
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        found: dict[str, float] = {}
        if self._asked("nvmlDeviceGetUtilizationRates", ctypes.byref(used)):
            found["utilisation"] = float(used.gpu)
        if self._asked("nvmlDeviceGetClockInfo", ctypes.c_int(SM_CLOCK), ctypes.byref(clock)):
            found["clock"] = clock.value * 1e6
        if self._asked("nvmlDeviceGetPowerUsage", ctypes.byref(power)):
            found["power"] = power.value / 1e3
        if self._asked("nvmlDeviceGetMemoryInfo", ctypes.byref(memory)):
            found["used"] = float(memory.used)
        return found

    def _asked(self, name: str, *arguments: object) -> bool:
        """Whether a function of the library is there and succeeded."""
        function = getattr(self._library, name, None)
        return function is not None and int(function(self._handle, *arguments)) == SUCCESS
