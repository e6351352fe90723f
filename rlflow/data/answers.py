r"""Reading answers out of a model's text, for reward functions.

    extract_boxed(r"so \boxed{42}")  ->  "42"
    extract_gsm8k("6*7=42 #### 42")  ->  "42"
    last_number("it costs $1,234.")  ->  "1234"
    same_number("$3.00", "3")        ->  True

Pure functions of text; this file knows no data set and no reward.
"""

from __future__ import annotations

import re
from fractions import Fraction

CURRENCY = "$€£¥"
MINUS = str.maketrans("−–", "--")  # noqa: RUF001 - models write these for a minus sign
LONGEST_NUMBER = 200

BRACES = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
IN_TEXT = re.compile(rf"(?:(?<![\w)\]])(-)[{CURRENCY}]?|[{CURRENCY}](-))?({DIGITS})")
ALONE = re.compile(rf"([+-]?)[{CURRENCY}]?([+-]?)({DIGITS})(?:e([+-]?[0-9]{{1,3}}))?%?\.?")
RATIO = re.compile(r"([+-]?[0-9]+)/([0-9]+)")


def extract_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, braces inside it kept; None without one.

    Escaped braces do not count; of nested boxes it is the inner one. One pass, so that a
    long text of unclosed boxes costs no more than any other.
    """
    open_braces: list[tuple[bool, int]] = []
    last = (-1, -1)
    for match in BRACES.finditer(text):
        if match.group() == "}":
            is_box, start = open_braces.pop() if open_braces else (False, 0)
            last = max(last, (start, match.start())) if is_box else last
        elif match.group() == "{" or match.group(1):
            open_braces.append((bool(match.group(1)), match.end()))
    return text[slice(*last)].strip() if last[0] >= 0 else None


def extract_gsm8k(text: str) -> str | None:
    """What follows the last `####` on its line, without `,` in numbers and a currency sign.

    None where there is no `####`, or nothing after it.
    """
    _, mark, rest = text.rpartition("####")
    answer = rest.strip().partition("\n")[0].strip() if mark else ""
    answer = re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", answer)
    return answer.lstrip(CURRENCY).strip() or None


def last_number(text: str) -> str | None:
    """The last number in the text, without thousands separators and currency; None without one.

    A minus sign counts where it cannot be a subtraction: "10-5" ends in 5, "= -5" in -5.
    """
    matches = list(IN_TEXT.finditer(text.translate(MINUS)))
    if not matches:
        return None
    before, after, digits = matches[-1].groups(default="")
    return f"{before}{after}{digits.replace(',', '')}"


def parse_number(value: str | int | float) -> Fraction | None:
    """The exact value of a text that is one number; None for anything else.

    Understands "1,234", "$5", "-$5", "3.0", ".5", "1e3", "50%" (50), "3/4" and a full stop
    at the end. A number of more than 200 characters is None: a model can write 1e999999999.
    """
    text = str(value).strip().translate(MINUS).lower()
    if len(text) > LONGEST_NUMBER:
        return None
    ratio = RATIO.fullmatch(text)
    if ratio is not None:
        below = int(ratio.group(2))
        return Fraction(int(ratio.group(1)), below) if below else None
    match = ALONE.fullmatch(text)
    if match is None or (match.group(1) and match.group(2)):
        return None
    before, after, digits, power = match.groups(default="")
    return Fraction(f"{before}{after}{digits.replace(',', '')}e{power or 0}")


def same_number(a: str | int | float | None, b: str | int | float | None) -> bool:
    """Whether both are numbers and equal, exactly: "3.0" is "3", "0.3333" is not "1/3"."""
    first, second = (None if value is None else parse_number(value) for value in (a, b))
    return first is not None and first == second
