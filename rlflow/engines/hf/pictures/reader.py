"""A model's image processor: encoded pictures to pixels, shapes, and the text that stands for them.

It is transformers' own with its PIL backend, which needs no torchvision; what is written into the
prompt is what the family's processor writes there. This file knows no rows.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.contract.pictures import PictureReader, ReadPictures
from rlflow.engines.hf.loading import load_tokenizer, quiet_transformers, read
from rlflow.engines.hf.pictures.passes import picture_tokens
from rlflow.engines.hf.weights.skeletons import auto
from rlflow.errors import UsageError
from rlflow.modelfiles.pictures.sights import Sight, blind_finding, sight_of, unset_finding

# Pictures are RGB with as many numbers of color as the towers read.
MODE = "RGB"


@functools.cache
def picture_reader(path: str) -> PictureReader:
    """The reader of the model in a directory or of a hub name, made once.

    Raises UsageError where the model sees no pictures (E551) or has no processor (E553, E501).
    """
    if (unset := unset_finding(_directory(path))) is not None:
        raise UsageError(unset)
    with quiet_transformers():
        made = auto("AutoImageProcessor")
        processor = read(path, lambda: made.from_pretrained(path, backend="pil"))
        config = read(path, lambda: auto("AutoConfig").from_pretrained(path)).to_dict()
    sight = sight_of(_directory(path), config)
    if sight is None:
        raise UsageError(blind_finding(path, str(config.get("model_type"))))
    return FamilyReader(sight, processor, load_tokenizer(path), config)


def _directory(path: str) -> Path:
    """Where the files of a model lie, which were read before."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, local_files_only=True))


class FamilyReader:
    """Reads pictures the way that a family sees them."""

    def __init__(
        self, sight: Sight, processor: Any, tokenizer: Any, config: dict[str, Any]
    ) -> None:
        self.sight = sight
        self.processor = processor
        self.part = _text_of(tokenizer, sight.token)
        self.mark, self.opening = self.part, self.part
        self.before = self.after = self.row_end = ""
        if sight.sees == "grid":
            start, end = (
                _text_of(tokenizer, config[f"vision_{at}_token_id"]) for at in ("start", "end")
            )
            self.opening = f"{start}{self.part}{end}"
        elif sight.sees == "soft":
            start, end = (_text_of(tokenizer, config[f"{at}_token_index"]) for at in ("boi", "eoi"))
            self.mark = self.opening = start
            self.before, self.after = f"\n\n{start}", f"{end}\n\n"
        elif sight.sees == "tiles":
            self.before, self.after = tokenizer.start_image_token, tokenizer.end_image_token
        else:
            self.row_end, self.after = "[IMG_BREAK]", "[IMG_END]"

    def read(self, encoded: Sequence[bytes]) -> ReadPictures:
        """See `PictureReader`."""
        made = [self._one(each) for each in encoded]
        none = torch.zeros(0, self.sight.numbers), torch.zeros(0, 3, dtype=torch.int64)
        return ReadPictures(
            pixels=torch.cat([none[0], *(pixels for pixels, _, _ in made)]),
            shapes=torch.cat([none[1], *(shape[None] for _, shape, _ in made)]),
            texts=tuple(text for _, _, text in made),
        )

    def _one(self, encoded: bytes) -> tuple[Tensor, Tensor, str]:
        """Pixels, shape and text of one picture."""
        from PIL import Image

        try:
            with Image.open(io.BytesIO(encoded)) as opened:
                image = opened.convert(MODE)
        except OSError as error:
            raise ValueError(str(error)) from error
        found = self.processor(images=[image], return_tensors="pt", **self._options())
        pixels = torch.as_tensor(found["pixel_values"], dtype=torch.float32)
        shape = self._shape(found, pixels)
        tokens = picture_tokens(self.sight, shape[None])
        by_token = dealt_out(pixels, int(tokens), self.sight.numbers)
        return by_token, shape, self._text(shape, int(tokens))

    def _options(self) -> dict[str, Any]:
        """What the family's processor tells its image processor."""
        sees, side = self.sight.sees, self.sight.side
        if sees == "tiles":
            return {"crop_to_patches": self.sight.tiles > 1}
        if sees == "rows":
            return {"patch_size": {"height": side, "width": side}}
        return {"do_pan_and_scan": False} if sees == "soft" else {}

    def _shape(self, found: Any, pixels: Tensor) -> Tensor:
        """Of a grid frames, rows and columns of patches; of others tiles, and pixels of a side."""
        if self.sight.sees == "grid":
            return torch.as_tensor(found["image_grid_thw"], dtype=torch.int64)[0]
        return torch.tensor([len(pixels), *pixels.shape[-2:]], dtype=torch.int64)

    def _text(self, shape: Tensor, tokens: int) -> str:
        if not self.row_end:
            return f"{self.before}{self.part * tokens}{self.after}"
        rows, columns = (int(n) // self.sight.side for n in shape[1:])
        lines = [self.part * columns] * rows
        return self.row_end.join(lines) + self.after


def dealt_out(pixels: Tensor, tokens: int, numbers: int) -> Tensor:
    """Pixels as `[tokens, numbers]`, in their order; zeros fill up a tile that does not divide."""
    if pixels.numel() == tokens * numbers:
        return pixels.reshape(tokens, numbers)
    tiles = pixels.flatten(1)
    room = tokens * numbers // len(tiles) - tiles.shape[1]
    return torch.nn.functional.pad(tiles, (0, room)).view(tokens, numbers)


def _text_of(tokenizer: Any, token: int) -> str:
    found: str = tokenizer.convert_ids_to_tokens(int(token))
    return found
