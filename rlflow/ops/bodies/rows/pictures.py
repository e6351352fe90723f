"""Prompts with pictures as tokens: where pictures stand, and what a model reads of them.

This file knows neither image formats nor models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.batch import flat, offsets, ragged, ragged_rows
from rlflow.contract.pictures import PictureReader, Pictures, ReadPictures
from rlflow.contract.tokenizers import Tokenizer
from rlflow.data.pictures.columns import (
    MISPLACED,
    UNREADABLE,
    decoded_pictures,
    places_in,
    unseen_picture,
)
from rlflow.errors import DataError
from rlflow.graph.fields import PICTURES, PIXELS
from rlflow.ops.bodies.common import chat_of, chat_text, require_tokens
from rlflow.ops.body import Call


def seen_rows(
    call: Call,
    tokenizer: Tokenizer,
    reader: PictureReader,
    texts: list[str],
    images: Tensor,
    *,
    chat: bool,
) -> tuple[Tensor, Pictures]:
    """Prompts as ragged int64 tokens with a token for each part of their pictures, and these.

    `images` are the rows' pictures as a field of them holds these, ragged uint8. Raises DataError
    (E611, E612) for a picture that is none, and where a prompt has other places than pictures.
    """
    blob, bounds = flat(images).numpy().tobytes(), offsets(images).tolist()
    found: list[ReadPictures] = []
    rows: list[list[int]] = []
    for number, text in enumerate(texts):
        encoded = decoded_pictures(blob[bounds[number] : bounds[number + 1]])
        try:
            seen = reader.read(encoded)
        except ValueError as error:
            raise _unseen(call, number, UNREADABLE, str(error)) from error
        found.append(seen)
        written = (
            chat_text(call, tokenizer, _with_places(chat_of(call).messages(text), len(encoded)))
            if chat
            else _opened(reader, text, len(encoded))
        )
        places = written.split(reader.mark)
        if len(places) - 1 != len(encoded):
            got = f"{len(encoded)} pictures, and {len(places) - 1} places in the text"
            raise _unseen(call, number, MISPLACED, got)
        whole = places[0] + "".join(a + b for a, b in zip(seen.texts, places[1:], strict=True))
        rows.append(tokenizer([whole], add_special_tokens=not chat, verbose=False)["input_ids"][0])
    require_tokens(call, texts, rows)
    return ragged_rows(rows, torch.int64), joined_pictures(found, images)


def joined_pictures(found: list[ReadPictures], encoded: Tensor) -> Pictures:
    """The pictures of rows as fields."""
    parts = [(seen.pixels, seen.shapes) for seen in found]
    pixels, shapes = (
        ragged(torch.cat(each), torch.tensor([len(part) for part in each]))
        for each in zip(*parts, strict=True)
    )
    return Pictures(pixels=pixels, shapes=shapes, encoded=encoded)


def picture_fields(pictures: Pictures) -> dict[str, Tensor]:
    """Pictures by the names of their fields."""
    return {PIXELS: pictures.pixels, PICTURES: pictures.shapes}


def _opened(reader: PictureReader, text: str, pictures: int) -> str:
    """A text with its pictures before it, unless it says itself where they stand."""
    return text if reader.mark in text else reader.opening * pictures + text


def _with_places(messages: list[dict[str, Any]], pictures: int) -> list[dict[str, Any]]:
    """Messages with a part for each picture: in the first message of a user, where none has one."""
    if not pictures or places_in(messages):
        return messages
    first = next((n for n, said in enumerate(messages) if said["role"] == "user"), 0)
    content = messages[first]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    seen = [{"type": "image"}] * pictures
    return [
        {**said, "content": [*seen, *parts]} if number == first else said
        for number, said in enumerate(messages)
    ]


def _unseen(call: Call, row: int, code: str, got: str) -> DataError:
    column = str(call.params.get("images", "images"))
    place = f"{call.node}: row {row}"
    return DataError(unseen_picture(place, column, code, got, call.where))
