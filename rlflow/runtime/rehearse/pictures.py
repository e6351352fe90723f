"""Pictures of so many tokens as a plan counts with, in the place of those of data.

Knows how models see, no rows and no towers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

from rlflow.engines.hf.pictures.passes import picture_tokens
from rlflow.modelfiles.pictures.sights import Sight

# A picture's height is at least such a part of its width.
FLATTEST = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturesAtLongest:
    """As many pictures as a prompt has, of together about `most` tokens and no more, in a prompt.

    What a model makes of them is by its `sight`.
    """

    sight: Sight
    count: int
    most: int

    @property
    def shapes(self) -> Tensor:
        """The shape of each picture as the model counts it, int64 `[pictures, 3]`."""
        return torch.tensor([_shape(self.sight, self.most // self.count)] * self.count)

    @property
    def tokens(self) -> int:
        """Tokens that stand for parts of them."""
        return int(picture_tokens(self.sight, self.shapes).sum())

    def standing_in(self, tokens: Tensor, *, prompts: bool) -> Tensor:
        """Token ids `[rows, tokens]` of prompts with those of the pictures; of others without."""
        own = self.sight.token
        changed = torch.where(tokens == own, own - 1 if own else 1, tokens)
        if prompts:
            changed[:, 1 : 1 + self.tokens] = own
        return changed


def _shape(sight: Sight, most: int) -> list[int]:
    if sight.sees in ("tiles", "soft"):
        return [max(most // sight.each, 1), sight.side, sight.side]
    # What stands at the end of a row is counted with a picture's tokens, and has no pixels.
    ends = sight.sees == "rows"
    sizes = range(max(int(isqrt(most) * FLATTEST), 1), isqrt(most) + 1)
    high = max(sizes, key=lambda rows: rows * (most // rows))
    wide = max(most // high - ends, 1)
    return (
        [1, high * sight.merge, wide * sight.merge]
        if not ends
        else [1, high * sight.side, wide * sight.side]
    )
