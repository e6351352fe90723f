"""A column of pictures: what it may hold, the pictures of a row, and their bytes on an edge.

A row's pictures are a list of files by path, or of encoded bytes as they are stored. This file
knows neither files of rows nor models.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlflow.data.pictures.headers import KNOWN, Size, picture_size, size_in_file
from rlflow.errors import DataError, Finding, Source

IMAGES = "images"
"""What the column is called in a pipeline."""

# What may be wrong: a picture that is none, and a prompt with other places than pictures.
UNREADABLE, MISPLACED = "E611", "E612"

Picture = str | bytes
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureColumn:
    """How a source's pictures are read: from which folder, and whether a check opens files."""

    folder: Path | None = None
    opened: bool = True


def pictures_in(value: object, folder: Path | None) -> list[Picture]:
    """The pictures of a column's value, paths relative to `folder` made absolute.

    A path, bytes, a struct of `bytes` and `path` as the hub's `Image` feature has it, or a list of
    such: several pictures, or the frames of a video. None are no pictures. Raises `ValueError` for
    anything else.
    """
    found: list[Picture] = []
    several = value if isinstance(value, list | tuple) else [value]
    for entry in () if value is None else several:
        each = entry
        if isinstance(entry, Mapping):
            each = entry.get("bytes") or entry.get("path")
        if isinstance(each, bytes | bytearray):
            found.append(bytes(each))
        elif isinstance(each, str) and each:
            path = Path(each).expanduser()
            found.append(str(path if path.is_absolute() or folder is None else folder / path))
        else:
            raise ValueError(f"{type(each).__name__} {each!r:.60}")
    return found


def size_of_picture(picture: Picture) -> Size:
    """Width and height, pixels; raises `ValueError` that says why there are none."""
    if isinstance(picture, bytes):
        found, what = picture_size(picture), f"{len(picture):,} bytes that are no picture"
    else:
        path = Path(picture)
        if not path.is_file():
            raise ValueError(f"no file {picture!r}")
        found, what = size_in_file(path), f"{picture!r} is no picture"
    if found is None:
        raise ValueError(what)
    return found


def picture_problem(value: object, prompt: object, column: PictureColumn) -> tuple[str, str] | None:
    """What is wrong with a row's pictures: the code, and what was got; None for nothing.

    `prompt` may say where pictures stand.
    """
    try:
        pictures = pictures_in(value, column.folder)
        if column.opened:
            for each in pictures:
                size_of_picture(each)
    except (ValueError, OSError) as error:
        return UNREADABLE, str(error)
    places = places_in(prompt)
    if places and places != len(pictures):
        return MISPLACED, f"{len(pictures)} pictures, and {places} places for them in the prompt"
    return None


def unseen_picture(place: str, column: str, code: str, got: str, where: Source | None) -> Finding:
    """The finding for a problem of `picture_problem`, in the row that `place` names."""
    if code == MISPLACED:
        return Finding(
            code=code,
            what=f"{place} has other pictures than its prompt has places for",
            where=where,
            got=got,
            expected='a part {"type": "image"} for each picture, or no such part at all',
        )
    return Finding(
        code=code,
        what=f"{place} has a picture in {column!r} that cannot be read",
        where=where,
        got=got,
        expected=f"{KNOWN}, by its path relative to the data file, or its bytes",
    )


def places_in(prompt: object) -> int:
    """How many places for pictures the messages of a prompt have."""
    messages = prompt if isinstance(prompt, list) else ()
    return sum(
        isinstance(part, Mapping) and part.get("type") == "image"
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def encoded_pictures(pictures: Iterable[Picture]) -> bytes:
    """The bytes of a row's pictures, each after its length: what the field of them holds.

    Reads files. Raises `DataError` (E611) for one that cannot be read.
    """
    parts: list[bytes] = []
    for each in pictures:
        try:
            size_of_picture(each)
            data = each if isinstance(each, bytes) else Path(each).read_bytes()
        except (ValueError, OSError) as error:
            raise DataError(
                unseen_picture("a row", IMAGES, UNREADABLE, str(error), None)
            ) from error
        parts += [_LENGTH.pack(len(data)), data]
    return b"".join(parts)


def decoded_pictures(field: bytes) -> list[bytes]:
    """The inverse of `encoded_pictures`."""
    found, place = [], 0
    while place < len(field):
        (size,) = _LENGTH.unpack_from(field, place)
        place += _LENGTH.size
        found.append(field[place : place + size])
        place += size
    return found
