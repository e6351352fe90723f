"""Pictures of prompts as they pass from who reads them to who computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """The pictures of prompts, one row each.

    `pixels` ragged float32 `[prompts, tokens, numbers]` are of the tokens that stand for parts of
    pictures, `shapes` ragged int64 `[prompts, pictures, 3]`. `encoded` ragged uint8 are the same
    pictures as the field of them holds these, for engines that make pixels themselves.
    """

    pixels: Tensor
    shapes: Tensor
    encoded: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPictures:
    """The pictures of one prompt: pixels `[tokens, numbers]`, shapes `[pictures, 3]`.

    `texts` is what stands for each in the text that the tokenizer reads.
    """

    pixels: Tensor
    shapes: Tensor
    texts: tuple[str, ...]


class PictureReader(Protocol):
    """The image processor of a model."""

    @property
    def mark(self) -> str:
        """What a chat template writes for a picture."""

    @property
    def opening(self) -> str:
        """What stands before a text for a picture, where no template says so; has the mark."""

    def read(self, encoded: Sequence[bytes]) -> ReadPictures:
        """Decode pictures and make of them what the model reads; raises `ValueError`."""
