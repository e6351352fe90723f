"""Data sets of the Hugging Face hub, and local folders and files of the same form.

This file is the only one that imports `datasets`, which is optional; it knows no columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.data.arrow import ArrowSource, limited
from rlflow.data.checks import bad_argument, excerpt
from rlflow.data.files import content_of, found_near
from rlflow.data.paths import declared_here, shown
from rlflow.data.sources import Row
from rlflow.data.tables import checked_limit, shape_of
from rlflow.errors import DataError, Finding, known_names, near_names

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
PIECE_ROWS = 1000


def huggingface(
    name: str,
    split: str = "train",
    subset: str | None = None,
    *,
    revision: str | None = None,
    columns: Sequence[str] | None = None,
    prompt: str = "prompt",
    rename: Mapping[str, str] | None = None,
    images: str | None = None,
    limit: int | None = None,
) -> HuggingFace:
    """One split of a data set, by its hub name or as a local folder or file.

    Declare `columns` for a data set of the hub: then a pipeline is checked and planned
    without a network. A local file has the split `train`. `revision` is a commit or tag of
    the hub; the other arguments and errors are as in `jsonl`.
    """
    where = declared_here()
    found = found_near(name, where)
    if found is not None and found.is_file() and found.suffix not in FORMATS:
        raise bad_argument(
            f"no format is known for {name!r}",
            where,
            got=f"a file ending in {found.suffix!r}",
            expected=f"a folder, or a file ending in {', '.join(FORMATS)}",
        )
    return HuggingFace(
        name=name,
        split=split,
        subset=subset,
        revision=revision,
        found=found,
        shape=shape_of(columns, prompt, rename, images, where),
        limit=checked_limit(limit, where),
        declared=where,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFace(ArrowSource):
    """One split of a data set that the package `datasets` reads; kept open once loaded."""

    name: str
    split: str
    subset: str | None = None
    revision: str | None = None
    found: Path | None = field(default=None, compare=False, repr=False)

    @property
    def remote(self) -> bool:
        """Whether the data set is one of the hub."""
        return self.found is None

    def folder(self) -> Path | None:
        """The folder of a local data set; pictures of the hub's come as bytes."""
        found = self.found
        return found.parent if found is not None and found.is_file() else found

    def describe(self) -> str:
        """The name, subset, split and revision, the columns and the limit."""
        subset = f" {self.subset}" if self.subset else ""
        revision = f" at {self.revision}" if self.revision else ""
        return self.described(f"huggingface {self.name}{subset}, {self.split} split{revision}")

    def label(self) -> str:
        """The name and the split."""
        return f"{self.name} ({self.split})"

    def size(self) -> int | None:
        """The number of rows once the data set is loaded, None before."""
        if "dataset" not in self._memo:
            return None
        rows = len(self._dataset())
        return rows if self.limit is None else min(rows, self.limit)

    def schema(self) -> Any:
        """The Arrow schema of the data set."""
        return self._dataset().features.arrow_schema

    def table(self) -> Any:
        """The kept columns, mapped from the cache of `datasets`."""
        dataset = self._dataset()
        columns = self.kept(dataset.column_names)
        return dataset.select_columns(columns).with_format("arrow")[:]

    def pieces(self) -> Iterator[list[Row]]:
        """The stored rows, 1000 at a time."""
        dataset = self._dataset()
        kept = dataset.select_columns(self.kept(dataset.column_names)).with_format("arrow")
        tables = kept.iter(batch_size=PIECE_ROWS)
        yield from limited((table.to_pylist() for table in tables), self.limit)

    def stored_bytes(self) -> int:
        """The size of the data set as Arrow, bytes."""
        return int(self._dataset().data.nbytes)

    def content(self) -> str:
        """The size of the files that hold the rows, and a digest of their bytes."""
        if self.found is None:
            kept = self._dataset().cache_files
            return content_of(*(Path(each["filename"]) for each in kept)) if kept else ""
        ends = {*FORMATS, ".arrow"}
        files = sorted(each for each in self.found.rglob("*") if each.suffix in ends)
        return content_of(*(files if self.found.is_dir() else [self.found]))

    def _dataset(self) -> Any:
        return self._memo.once("dataset", self._loaded)

    def _loaded(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise DataError(self._not_installed()) from error
        try:
            datasets.disable_progress_bars()
            loaded = self._opener(datasets)()
        except Exception as error:
            raise DataError(self._not_loaded(str(error))) from error
        if not isinstance(loaded, Mapping):
            return loaded
        if self.split not in loaded:
            raise DataError(self._no_split(tuple(loaded)))
        return loaded[self.split]

    def _opener(self, datasets: Any) -> Callable[[], Any]:
        found = self.found
        if found is None:
            name, revision = self.name, self.revision
            return lambda: datasets.load_dataset(
                name, self.subset, split=self.split, revision=revision
            )
        if found.is_file():
            return lambda: datasets.load_dataset(FORMATS[found.suffix], data_files=str(found))
        if any((found / mark).is_file() for mark in ("state.json", "dataset_dict.json")):
            return lambda: datasets.load_from_disk(str(found))
        return lambda: datasets.load_dataset(str(found), self.subset)

    def _not_installed(self) -> Finding:
        return Finding(
            code="E607",
            what=f"{self.label()} needs the package 'datasets'",
            where=self.declared,
            got="it is not installed",
            fix="pip install -e '.[datasets]'",
        )

    def _not_loaded(self, reason: str) -> Finding:
        first = excerpt((reason.splitlines() or ["no reason given"])[0])
        hub = "a data set of the hub and a network, or a local folder or file"
        return Finding(
            code="E607",
            what=f"cannot load {self.label()}",
            where=self.declared,
            got=first,
            expected=hub if self.remote else f"a data set in {shown(self.found or Path())}",
            fix=f"hf download --repo-type dataset {self.name}" if self.remote else "",
        )

    def _no_split(self, splits: tuple[str, ...]) -> Finding:
        near = near_names(self.split, splits)
        return Finding(
            code="E608",
            what=f"{self.name} has no split {self.split!r}",
            where=self.declared,
            got=f"splits {known_names(splits)}",
            expected="one of them",
            near=near,
            fix=f'split="{(near or splits)[0]}"' if splits else "",
        )
