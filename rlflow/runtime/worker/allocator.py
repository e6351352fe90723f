"""The C allocator: it keeps freed memory and gives back once what loading has left.

A training step frees and takes the same large blocks again and again; by default glibc
returns them to the system, and every return costs a page fault for every 4 kB when the
memory is taken again. Where the C library is another one, nothing is done.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_FREE = 2**31 - 1
LARGEST_ON_HEAP = 32 * 2**20


def keep_freed_memory() -> bool:
    """Set the thresholds of this process; returns whether the C library took them."""
    library = _library()
    if library is None:
        return False
    taken = [
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_ON_HEAP),
        library.mallopt(M_TRIM_THRESHOLD, KEPT_FREE),
    ]
    return all(taken)


def give_back_freed_memory() -> bool:
    """Return what is free now to the system; whether the C library could.

    For what is done once: a model that was just loaded has left nearly its own size behind, which
    no later step takes again.
    """
    library = _library()
    return library is not None and bool(library.malloc_trim(0))


def _library() -> ctypes.CDLL | None:
    """The C library where it is glibc."""
    if platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.CDLL(ctypes.util.find_library("c"))
