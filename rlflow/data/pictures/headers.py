"""The size of an encoded picture, from its first bytes: nothing is decoded, nothing imported.

PNG, JPEG, GIF, BMP and WebP, each by its own specification. This file knows no rows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

Size = tuple[int, int]
"""Width and height, pixels."""

# So many bytes hold the header of nearly every file; JPEG may have a preview before its own.
FIRST = 1 << 16
KNOWN = "a PNG, JPEG, WebP, GIF or BMP file"
# JPEG markers of a frame (ITU-T T.81, table B.1): SOF0 to SOF15 without DHT, JPG and DAC.
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def picture_size(data: bytes) -> Size | None:
    """Width and height of an encoded picture, None where the bytes are none that is known."""
    for mark, read in _READERS:
        if data.startswith(mark):
            try:
                found = read(data)
            except (struct.error, IndexError):
                return None
            return found if found is not None and min(found) > 0 else None
    return None


def size_in_file(path: Path) -> Size | None:
    """The same of a file, of which no more is read than it takes; raises OSError."""
    with path.open("rb") as file:
        first = file.read(FIRST)
        found = picture_size(first)
        if found is None and first.startswith(b"\xff\xd8"):
            found = picture_size(first + file.read())
        return found


def _png(data: bytes) -> Size | None:
    width, height = struct.unpack(">II", data[16:24])
    return (width, height) if data[12:16] == b"IHDR" else None


def _gif(data: bytes) -> Size:
    width, height = struct.unpack("<HH", data[6:10])
    return width, height


def _bmp(data: bytes) -> Size:
    width, height = struct.unpack("<ii", data[18:26])
    return width, abs(height)


def _webp(data: bytes) -> Size | None:
    kind, body = data[12:16], data[20:]
    if data[8:12] != b"WEBP":
        return None
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack("<HH", body[6:10])
    return width & 0x3FFF, height & 0x3FFF


def _jpeg(data: bytes) -> Size | None:
    place = 2
    while place + 9 <= len(data):
        if data[place] != 0xFF:
            return None
        marker = data[place + 1]
        if marker == 0xFF:
            place += 1
        elif marker in FRAMES:
            height, width = struct.unpack(">HH", data[place + 5 : place + 9])
            return width, height
        elif 0xD0 <= marker <= 0xD8 or marker == 0x01:
            place += 2
        else:
            place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return None


_READERS: tuple[tuple[bytes, Callable[[bytes], Size | None]], ...] = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8\xff", _jpeg),
    (b"RIFF", _webp),
    (b"GIF8", _gif),
    (b"BM", _bmp),
)
