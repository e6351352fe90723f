"""What the C allocator keeps of freed memory, and what goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

BLOCKS = """
import os
from rlflow.runtime.worker.allocator import give_back_freed_memory, keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

assert keep_freed_memory()
blocks = [b"x" * (8 << 20) for _ in range(16)]
last = b"x" * (8 << 20)
used = resident()
del blocks
freed = resident()
assert give_back_freed_memory()
print(used, freed, resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="thresholds are those of glibc")
def test_freed_memory_is_kept_until_it_is_given_back():
    """Blocks of 128 MB below one that is still there."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS], capture_output=True, text=True, check=True
    )

    used, freed, left = map(int, done.stdout.split())
    assert used - freed < 16 << 20
    assert used - left > 120 << 20
