"""A long run holds no more than a short one: by thousands of iterations of nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import soak
from overhead import compiled

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.extra]
# Bytes: the runs of weeks that this stands for would grow by gigabytes with a few an iteration.
GROWTH = 4e6


def test_memory_descriptors_and_threads_stay_and_files_grow_evenly(tmp_path):
    with soak.ahead(4.0) as passed:
        held = soak.soaked(compiled("split"), 4000, tmp_path / "run", 8, passed)
    assert 3500 * 4 <= held[-1].seconds < 3500 * 4 + 600
    warm = held[2:]
    assert len(warm) >= 6
    assert warm[-1].resident - warm[0].resident < GROWTH
    assert max(each.descriptors for each in warm) <= warm[0].descriptors + 2
    assert max(each.threads for each in warm) <= warm[0].threads + 2
    written = [b.written - a.written for a, b in pairwise(warm)]
    assert max(written) < 1.2 * min(written)
