"""Tokens of prompts, counted in a sample of their data by the tokenizer that will read them.

Needs no torch: the package `tokenizers` reads a `tokenizer.json` by itself. What was counted is
kept by the digests of tokenizer and texts, so that a tokenizer is loaded once for a data set.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Protocol

from rlflow.modelfiles.pictures.sights import Sight
from rlflow.scheduler.models.tokenizers import tokenizer_content

ASSUMED_PROMPT_TOKENS = 64
# Width and height, pixels.
ASSUMED_PICTURE = (512, 512)
LOOKED_AT = 64
SAMPLED = 256
MOST_ROWS = 300_000
MOST_KEPT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureTokens:
    """Tokens that the pictures of a prompt take: in the `mean`, and at the `longest`; `how`.

    A prompt has `count` pictures in the mean, and `squares` is the mean of the sum of the squares
    of each one's tokens.
    """

    count: float
    mean: float
    squares: float
    longest: int
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """Tokens of the `longest` prompt, and of the `mean` one where they were counted; `how`.

    Those of `pictures` are among them.
    """

    longest: int
    how: str
    mean: float | None = None
    pictures: PictureTokens | None = None


NOT_LOADED = PromptTokens(longest=ASSUMED_PROMPT_TOKENS, how="assumed: the data is not loaded")


class PromptRows(Protocol):
    """What is asked of a data source: whether rows are here, how many, and the rows."""

    @property
    def pictured(self) -> bool:
        """Whether its rows have pictures."""

    def picture_sizes(self, row: Mapping[str, object]) -> Sequence[tuple[int, int]]:
        """Width and height of each picture of a row; raises `ValueError` and OSError."""

    @property
    def remote(self) -> bool:
        """Whether reading the rows may need the network."""

    def size(self) -> int | None:
        """How many rows there are; None where only reading them would tell."""

    def rows(self) -> Sequence[Mapping[str, object]]:
        """The rows, each with a `prompt`."""


def counted_prompts(data: PromptRows | None, tokenizer: Path | None) -> PromptTokens:
    """Tokens of the prompts of a data source, by the `tokenizer.json` of their model.

    Of rows that are here, up to 256 evenly taken are tokenized, as text, without a chat template.
    Without a tokenizer's file a prompt counts as many tokens as the longest of the first 64 has
    characters; data that may need the network is not loaded, and a number is assumed.
    """
    if data is None or data.remote or (data.size() or MOST_ROWS) >= MOST_ROWS:
        return NOT_LOADED
    rows = data.rows()
    if tokenizer is not None:
        step = max(len(rows) / SAMPLED, 1.0)
        taken = [rows[int(number * step)] for number in range(min(len(rows), SAMPLED))]
        texts = [_text(row["prompt"]) for row in taken]
        if found := _kept(tokenizer, texts):
            longest, total = found
            mean, how = max(total / len(texts), 1.0), f"tokens of {len(texts)} rows"
            return PromptTokens(longest=max(longest, 1), mean=mean, how=how)
    first = rows[:LOOKED_AT]
    longest = max(len(str(row["prompt"])) for row in first)
    return PromptTokens(longest=longest, how=f"characters of {len(first)} rows")


def with_picture_tokens(
    found: PromptTokens, data: PromptRows | None, sight: Sight | None
) -> PromptTokens:
    """The same with the tokens of pictures, of as many rows as are tokenized.

    By the sizes that their files tell; what cannot be read is told by the check of the data. Where
    it is not loaded a prompt is taken to have one picture.
    """
    if data is None or sight is None or not data.pictured:
        return found
    if found is NOT_LOADED:
        one = sight.tokens(*ASSUMED_PICTURE)
        how = f"assumed: one of {' x '.join(map(str, ASSUMED_PICTURE))} pixels"
        seen = PictureTokens(count=1, mean=one, squares=one**2, longest=one, how=how)
        return replace(found, longest=found.longest + one, pictures=seen)
    rows = data.rows()
    step = max(len(rows) / SAMPLED, 1.0)
    counts = [
        _picture_tokens(data, rows[int(number * step)], sight)
        for number in range(min(len(rows), SAMPLED))
    ]
    totals = [sum(each) for each in counts]
    seen = PictureTokens(
        count=fmean(map(len, counts)),
        mean=fmean(totals),
        squares=fmean(sum(one**2 for one in each) for each in counts),
        longest=max(totals),
        how=f"sizes in {len(counts)} rows",
    )
    return PromptTokens(
        longest=found.longest + seen.longest,
        mean=None if found.mean is None else found.mean + seen.mean,
        how=f"{found.how} with pictures",
        pictures=seen,
    )


def _picture_tokens(data: PromptRows, row: Mapping[str, object], sight: Sight) -> list[int]:
    """Tokens that each picture of a row takes; none where one cannot be read."""
    try:
        return [sight.tokens(*size) for size in data.picture_sizes(row)]
    except (ValueError, OSError):
        return []


def _text(prompt: object) -> str:
    """A prompt as text: of a conversation what its messages say."""
    if isinstance(prompt, str):
        return prompt
    messages = prompt if isinstance(prompt, list) else [prompt]
    said = (each.get("content", each) if isinstance(each, dict) else each for each in messages)
    return "\n".join(map(_text_of_content, said))


def _text_of_content(content: object) -> str:
    """What a message says, without the places of its pictures."""
    if not isinstance(content, list):
        return str(content)
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))


def _kept(tokenizer: Path, texts: Sequence[str]) -> list[int]:
    """Tokens of the longest text and of all, as they were counted before, or now and kept.

    Empty for a file that is no tokenizer, which whoever loads the model says.
    """
    said = json.dumps(texts, ensure_ascii=True).encode()
    key = f"{tokenizer_content(tokenizer).digest[:32]}-{hashlib.sha256(said).hexdigest()[:32]}"
    file = _cache()
    known = _read(file)
    if key not in known:
        try:
            known = {**known, key: _counted(tokenizer, texts)}
        except Exception:
            return []
        _write(file, dict(list(known.items())[-MOST_KEPT:]))
    return known[key]


def _counted(tokenizer: Path, texts: Sequence[str]) -> list[int]:
    """Tokens of the longest text and of all; those that a tokenizer adds by itself count."""
    from tokenizers import Tokenizer

    made = Tokenizer.from_file(str(tokenizer))
    counts = [len(made.encode(text).ids) for text in texts]
    return [max(counts), sum(counts)]


def _cache() -> Path:
    """Where counts are kept."""
    folder = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(folder) / "rlflow" / "prompts.json"


def _read(file: Path) -> dict[str, list[int]]:
    """The counts in the file; none where it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: each for key, each in found.items() if isinstance(each, list) and len(each) == 2}


def _write(file: Path, known: dict[str, list[int]]) -> None:
    """Keep the counts, where there is room for them: without they are counted again."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(known), encoding="utf-8")
        draft.replace(file)
    except OSError:
        draft.unlink(missing_ok=True)
