"""What holds of updates, whichever way weights take to an engine."""

from __future__ import annotations

from dataclasses import replace

from rlflow.batch import flat
from tests.engines.sglang.conftest import GREEDY, PROMPTS, same


def generates_with_updates(pair):
    """Rows are those of the last update's weights, of which the engine has every byte."""
    before, _ = pair.generate(PROMPTS, GREEDY)
    for version in (1, 2, 3):
        pair.update(version, seed=version)
        real, plain = pair.generate(PROMPTS, GREEDY)
        same(real, plain)
        assert {} == pair.model.check()
        assert version == pair.model.version
    assert flat(before.response_tokens).tolist() != flat(real.response_tokens).tolist()


def leaves_nothing_in_the_cache(pair):
    """An update right after rows have ended: none of their prompts are cached after it."""
    for version in range(1, 9):
        pair.generate(PROMPTS, GREEDY)
        pair.update(version, seed=100 + version)
        cached = pair.rollout.stats()["cached_prompt_tokens"]
        same(*pair.generate(PROMPTS, replace(GREEDY, n=1)))
        assert cached == pair.rollout.stats()["cached_prompt_tokens"]
