"""Times as they are typed: `600s`, `10m`, `2h`, `1.5d`, and as a clock and Slurm write them."""

from __future__ import annotations

import math
import re

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
COUNTED = re.compile(r"(\d+(?:\.\d+)?)([smhd])", re.ASCII)
# D-HH, D-HH:MM, D-HH:MM:SS, HH:MM:SS, and MM:SS, which Slurm reads so.
CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?", re.ASCII)


def read_seconds(text: str) -> float | None:
    """The seconds that a time says; None for what is none, or a number without a unit."""
    said = COUNTED.fullmatch(text)
    if said is not None:
        return float(said[1]) * UNITS[said[2]]
    clock = CLOCK.fullmatch(text)
    if clock is None or not ("-" in text or ":" in text):
        return None
    first, second, third = (int(clock[part] or 0) for part in (2, 3, 4))
    if second >= 60 or third >= 60:
        return None
    if clock[1] is None and clock[4] is None:
        return first * 60.0 + second
    return int(clock[1] or 0) * 86400.0 + first * 3600.0 + second * 60.0 + third


def clock_text(seconds: float) -> str:
    """Seconds, rounded up, as `4:00:00` or `1-12:00:00`."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    within = f":{minutes:02}:{rest:02}"
    return f"{days}-{hours:02}{within}" if days else f"{hours}{within}"
