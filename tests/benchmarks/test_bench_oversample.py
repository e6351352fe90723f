"""What over-sampling is predicted to save, of a distribution with a tail."""

from __future__ import annotations

import itertools

from oversample import BEGUN, predicted


def test_more_groups_take_fewer_turns_more_tokens_and_leave_shorter_rows():
    found = [predicted(begun) for begun in BEGUN]
    for one, other in itertools.pairwise(found):
        assert one["turns"] > other["turns"]
        assert one["length"] > other["length"]
    tokens = [each["tokens"] for each in found]
    assert tokens[1:] == sorted(tokens[1:])
