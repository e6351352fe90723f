"""Data in files: JSON Lines, and Parquet.

This file knows how the two are read; what a row must look like is in `checks`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from rlflow.data.arrow import ArrowSource, limited
from rlflow.data.checks import StoredRow, excerpt, summarised
from rlflow.data.paths import declared_here, find_path, missing_file, shown
from rlflow.data.sources import CHECKED_ROWS, Row, no_rows
from rlflow.data.tables import TableSource, checked_limit, shape_of
from rlflow.errors import DataError, Finding, Source

UTF8_MARK = b"\xef\xbb\xbf"
PARQUET_ROWS = 1000


def jsonl(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    prompt: str = "prompt",
    rename: Mapping[str, str] | None = None,
    images: str | None = None,
    limit: int | None = None,
) -> Jsonl:
    """Rows of a file with one JSON object per line; blank lines do not count.

    `prompt` is the file's column that becomes `prompt`: a text, or a list of chat messages.
    `rename` maps names in the file to names in the pipeline; `columns` are the columns to
    keep, by the latter (left out: those of the first row); `limit` keeps the first rows. `images`
    is the column of pictures, which becomes `images`: a path beside the file, or a list of them. A
    relative path is found from the working directory or from the folders above the pipeline
    file. Raises `UsageError` (E608) for arguments that contradict each other.
    """
    where = declared_here()
    return Jsonl(
        path=str(path),
        found=found_near(path, where),
        shape=shape_of(columns, prompt, rename, images, where),
        limit=checked_limit(limit, where),
        declared=where,
    )


def parquet(
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    prompt: str = "prompt",
    rename: Mapping[str, str] | None = None,
    images: str | None = None,
    limit: int | None = None,
) -> Parquet:
    """Rows of a Parquet file; arguments and errors as in `jsonl`.

    Pictures may also be bytes, or what the `Image` feature of the hub makes of them.
    """
    where = declared_here()
    return Parquet(
        path=str(path),
        found=found_near(path, where),
        shape=shape_of(columns, prompt, rename, images, where),
        limit=checked_limit(limit, where),
        declared=where,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Jsonl(TableSource):
    """A file with one JSON object per line, UTF-8."""

    path: str
    found: Path | None = field(default=None, compare=False, repr=False)

    def located(self) -> Path:
        """The file; raises `DataError` (E601) where there is none."""
        return _located(self.path, self.found, self.declared)

    def folder(self) -> Path:
        """The folder of the file."""
        return self.located().parent

    def describe(self) -> str:
        """The kind, the path as declared, the columns and the limit."""
        return self.described(f"jsonl {self.path}")

    def size(self) -> int | None:
        """The number of lines that are not blank; None for a large or missing file."""
        try:
            if self.whole():
                return sum(1 for _ in islice(self._lines(), self.limit))
        except DataError:
            return None
        return None

    def header(self) -> tuple[str, ...]:
        """The keys of the first row that can be read; raises `DataError` if there is none."""
        broken_rows: list[Finding] = []
        for item in islice(self.stored(), CHECKED_ROWS):
            if isinstance(item, StoredRow):
                return tuple(item.row)
            broken_rows.append(item)
        raise DataError(*(summarised(broken_rows) or [no_rows(self)]))

    def stored(self) -> Iterator[StoredRow | Finding]:
        """One item per line that is not blank."""
        path = shown(self.located())
        for number, raw in self._lines():
            yield parsed(raw, path, number)

    def stored_bytes(self) -> int:
        """The size of the file, bytes."""
        return self.located().stat().st_size

    def content(self) -> str:
        """The file's size and a digest of its bytes."""
        return content_of(self.located())

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        path = self.located()
        try:
            with path.open("rb") as file:
                for number, raw in enumerate(file, start=1):
                    line = raw.removeprefix(UTF8_MARK) if number == 1 else raw
                    if line.strip():
                        yield number, line.rstrip()
        except OSError as error:
            raise unreadable(path, error, self.declared) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Parquet(ArrowSource):
    """A Parquet file."""

    path: str
    found: Path | None = field(default=None, compare=False, repr=False)

    def located(self) -> Path:
        """The file; raises `DataError` (E601) where there is none."""
        return _located(self.path, self.found, self.declared)

    def folder(self) -> Path:
        """The folder of the file."""
        return self.located().parent

    def describe(self) -> str:
        """The kind, the path as declared, the columns and the limit."""
        return self.described(f"parquet {self.path}")

    def label(self) -> str:
        """The path, relative to the working directory where it can be."""
        return shown(self.located())

    def size(self) -> int | None:
        """The number of rows, from the file's footer; None if it cannot be read."""
        try:
            with self._opened() as file:
                rows = int(file.metadata.num_rows)
        except DataError:
            return None
        return rows if self.limit is None else min(rows, self.limit)

    def schema(self) -> Any:
        """The Arrow schema of the file."""
        with self._opened() as file:
            return file.schema_arrow

    def table(self) -> Any:
        """The kept columns, in memory."""
        import pyarrow as pa

        with self._opened() as file:
            try:
                return file.read(columns=self.kept(file.schema_arrow.names))
            except (OSError, pa.ArrowException) as error:
                raise unreadable(Path(self.label()), error, self.declared) from error

    def pieces(self) -> Iterator[list[Row]]:
        """The stored rows, 1000 at a time."""
        import pyarrow as pa

        with self._opened() as file:
            columns = self.kept(file.schema_arrow.names)
            batches = file.iter_batches(batch_size=PARQUET_ROWS, columns=columns)
            try:
                yield from limited((batch.to_pylist() for batch in batches), self.limit)
            except (OSError, pa.ArrowException) as error:
                raise unreadable(Path(self.label()), error, self.declared) from error

    def stored_bytes(self) -> int:
        """The size of the file, bytes."""
        return self.located().stat().st_size

    def content(self) -> str:
        """The file's size and a digest of its bytes."""
        return content_of(self.located())

    def _opened(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.located()
        try:
            return pq.ParquetFile(path)
        except (OSError, pa.ArrowException) as error:
            raise unreadable(path, error, self.declared) from error


def content_of(*paths: Path) -> str:
    """The size of files together, and a digest of their bytes. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
            size += file.tell()
    return f"{size:,} bytes {digest.hexdigest()[:12]}"


def found_near(path: str | Path, declared: Source | None) -> Path | None:
    """The file that `path` names in a pipeline declared there, absolute, or None."""
    return find_path(path, Path(declared.path) if declared is not None else None)


def _located(path: str, found: Path | None, declared: Source | None) -> Path:
    """The file found at the declaration, or one made since; raises `DataError` (E601)."""
    at = found if found is not None and found.exists() else found_near(path, declared)
    if at is None:
        near = Path(declared.path) if declared is not None else None
        raise DataError(missing_file(path, near, declared))
    if at.is_dir():
        raise unreadable(at, IsADirectoryError("it is a folder"), declared)
    if not at.is_file():  # which would be read for ever, or once
        raise unreadable(at, OSError("it is a pipe or a device"), declared)
    return at


def unreadable(path: Path, error: Exception, where: Source | None) -> DataError:
    """A file that is there and cannot be read (E601)."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return DataError(
        Finding(
            code="E601",
            what=f"cannot read {shown(path)}",
            where=where,
            got=excerpt(reason.splitlines()[0]),
            expected="a file of this format that this user may read",
        )
    )


def parsed(raw: bytes, path: str, number: int) -> StoredRow | Finding:
    """The JSON object of one line, or what is wrong with the line."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        return not_utf8(raw, error, path, number)
    where = Source(path=path, line=number, text=excerpt(text))
    try:
        row = json.loads(text, parse_constant=refused)
    except json.JSONDecodeError as error:
        where = Source(path=path, line=number, text=excerpt(text, error.pos))
        return broken(f"{error.msg} at column {error.colno}", where)
    except (ValueError, RecursionError) as error:
        return broken(str(error), where)
    if not isinstance(row, dict):
        return broken(f"a JSON {type(row).__name__}", where, code="E605")
    if "\\ud" in text.lower() and not encodable(row):
        return broken("half of a surrogate pair (\\ud800 to \\udfff), which is no text", where)
    return StoredRow(place=f"line {number} of {path}", row=row, where=where)


def refused(constant: str) -> NoReturn:
    """Refuse NaN and the infinities, which JSON does not have; raises `ValueError`."""
    raise ValueError(f"{constant}, which is not JSON")


def encodable(row: Row) -> bool:
    """Whether all text of a row can be written as UTF-8."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def broken(got: str, where: Source, code: str = "E602") -> Finding:
    """A line that is not a JSON object; `got` says what it is."""
    array = where.text.startswith("[")
    return Finding(
        code=code,
        what=f"line {where.line} of {where.path} is not a JSON object",
        where=where,
        got=got,
        expected="one JSON object on each line",
        fix=f"jq -c '.[]' {where.path} > {Path(where.path).stem}.lines.jsonl" if array else "",
    )


def not_utf8(raw: bytes, error: UnicodeDecodeError, path: str, number: int) -> Finding:
    """A line with bytes that are not UTF-8."""
    start = len(raw[: error.start].decode())
    text = excerpt(raw.decode(errors="replace"), start)
    return Finding(
        code="E606",
        what=f"line {number} of {path} is not UTF-8",
        where=Source(path=path, line=number, text=text),
        got=f"byte 0x{raw[error.start]:02x} at column {start + 1}",
        expected="UTF-8",
        fix=f"iconv -f LATIN1 -t UTF-8 {path} > {Path(path).stem}.utf8.jsonl",
    )
