"""What makes requests of pictures, for the models that SGLang leaves without."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.models.mistral import Mistral3ForConditionalGeneration
from sglang.srt.multimodal.processors.internvl import InternVLProcessor
from sglang.srt.multimodal.processors.pixtral import PixtralProcessor

from .internvl import InternVLForConditionalGeneration

SIZES = "image_sizes"


class TilesProcessor(InternVLProcessor):  # type: ignore[misc]
    """That of InternVL."""

    models = [InternVLForConditionalGeneration]  # noqa: RUF012

    def _postprocess_mm_items_before_transport(
        self, mm_items: list[Any], *, images: list[Any] | None
    ) -> list[Any]:
        """All pictures of a prompt as one: SGLang gives each of them the places of all.

        With that, prompts whose last pictures are the same would be one in its cache.
        """
        del images
        if len(mm_items) < 2:
            return mm_items
        whole = copy.copy(mm_items[0])
        whole.feature = torch.cat([item.feature for item in mm_items])
        return [whole]


class RowsProcessor(PixtralProcessor):  # type: ignore[misc]
    """That of Mistral 3; in SGLang 0.5.23 another is around it, which no update of weights passes.

    Each picture goes through the tower by itself: of several at once its kernels on GPUs forget
    that they do not see each other.
    """

    models = [Mistral3ForConditionalGeneration]  # noqa: RUF012

    def _postprocess_mm_items_before_transport(
        self, mm_items: list[Any], *, images: list[Any] | None
    ) -> list[Any]:
        del images
        return [single for item in mm_items for single in self._singles(item)]

    def _singles(self, item: Any) -> Iterator[Any]:
        """The pictures of an item; each row of tokens of a picture has a place of its own."""
        place = 0
        for number, (high, wide) in enumerate(item.model_specific_data[SIZES].tolist()):
            rows = high // self._effective_patch_size
            one = copy.copy(item)
            one.feature = item.feature[number : number + 1, :, :high, :wide]
            one.offsets = item.offsets[place : place + rows]
            one.model_specific_data = {SIZES: item.model_specific_data[SIZES][number : number + 1]}
            one.hash = one.pad_value = None
            place += rows
            yield one
