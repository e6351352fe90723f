"""The C allocator's thresholds: keep freed memory instead of giving it back each time.

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
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(ctypes.util.find_library("c"))
    taken = [
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_ON_HEAP),
        library.mallopt(M_TRIM_THRESHOLD, KEPT_FREE),
    ]
    return all(taken)
