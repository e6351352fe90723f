"""Which samples are shown, and in which order: ranges, patterns, and a key to sort by."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.errors import Finding, UsageError, near_names
from rlflow.report.samples.joined import RecordedSample

RANGE = re.compile(r"(?P<least>[^:]*)(?P<colon>:?)(?P<most>[^:]*)")
WORDS = ("iteration", "row", "group", "length", "gap", "reward", "advantage")


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`, both included."""

    least: float
    most: float

    @classmethod
    def parse(cls, text: str, option: str) -> Range:
        """`A:B`, `A:`, `:B` or one number; UsageError E320 for others."""
        match = RANGE.fullmatch(text.strip())
        try:
            if match is None or text.strip() in ("", ":"):
                raise ValueError
            least = float(match["least"]) if match["least"] else -math.inf
            most = float(match["most"]) if match["most"] else math.inf
            return cls(least, most if match["colon"] else least)
        except ValueError:
            finding = Finding(
                code="E320",
                what=f"{option} {text!r} is no range",
                expected="FROM:TO, FROM:, :TO or one number",
                fix=f"{option} 0:0.5",
            )
            raise UsageError(finding) from None

    def holds(self, number: float | None) -> bool:
        """Whether a number is within; one that is not known is not."""
        return number is not None and self.least <= number <= self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to show: ranges of numbers by key, a pattern in prompt or response, a group."""

    ranges: dict[str, Range]
    text: re.Pattern[str] | None = None
    group: int | None = None

    def holds(self, sample: RecordedSample) -> bool:
        """Whether a sample is one of those."""
        if self.group is not None and sample.group != self.group:
            return False
        if any(not each.holds(sample.number(key)) for key, each in self.ranges.items()):
            return False
        if self.text is None:
            return True
        texts = (sample.value("prompt"), sample.value("response"))
        return any(isinstance(text, str) and self.text.search(text) for text in texts)


def text_pattern(text: str | None) -> re.Pattern[str] | None:
    """A pattern to look for, upper and lower case alike; UsageError E320 for a broken one."""
    if text is None:
        return None
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        what = f"--text {text!r} is no regular expression: {error}"
        finding = Finding(code="E320", what=what, fix=f"--text {re.escape(text)!r}")
        raise UsageError(finding) from None


def in_order(samples: Sequence[RecordedSample], key: str | None) -> list[RecordedSample]:
    """Samples by a key, the lowest first; with `-` before it the highest. None leaves them.

    Those without the number come last. Raises UsageError E320 for a key that no sample has.
    """
    if key is None or not samples:
        return list(samples)
    name, sign = key.removeprefix("-"), -1.0 if key.startswith("-") else 1.0
    numbers = [(sample.number(name), sample) for sample in samples]
    if all(number is None for number, _ in numbers):
        fields = {field for sample in samples[:1] for field in sample.fields()}
        names = sorted({*WORDS, *(f for f in fields if samples[0].number(f) is not None)})
        finding = Finding(
            code="E320",
            what=f"--sort {name}: no recorded sample has that number",
            expected=", ".join(n for n in names if samples[0].number(n) is not None),
            near=near_names(name, names),
        )
        raise UsageError(finding)
    known = [(number, sample) for number, sample in numbers if number is not None]
    known = [pair for pair in known if not math.isnan(pair[0])]
    there = {id(sample) for _, sample in known}
    rest = [sample for _, sample in numbers if id(sample) not in there]
    return [sample for _, sample in sorted(known, key=lambda pair: sign * pair[0])] + rest
