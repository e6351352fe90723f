"""What the benchmarks share: environments, processes, statistics, tables, machine facts.

Standard library only, so that every side of a comparison may import it. Nothing here knows
what is compared. Times are seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CACHE = ROOT / ".venv-bench"
RESULTS = HERE / "results"
MARK = "installed.sha256"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment of a benchmark: torch first, then `packages`, all constrained."""

    name: str
    constraints: str
    packages: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Where it is made."""
        return CACHE / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    def digest(self) -> str:
        """Names everything that was asked for; another digest makes the environment anew."""
        asked = (HERE / self.constraints).read_text(encoding="utf-8") + " ".join(self.packages)
        return hashlib.sha256(asked.encode()).hexdigest()

    def ensure(self) -> Path:
        """Make the environment unless it is whole; returns its interpreter."""
        mark = self.path / MARK
        if mark.is_file() and mark.read_text(encoding="utf-8") == self.digest():
            return self.python
        say(f"making {self.path} (once)")
        venv.create(self.path, clear=True, with_pip=True)
        pip = [str(self.python), "-m", "pip", "install", "-q", "-c", str(HERE / self.constraints)]
        for wanted in (("torch",), self.packages):
            subprocess.run([*pip, *wanted], check=True, cwd=ROOT)
        mark.write_text(self.digest(), encoding="utf-8")
        return self.python


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One process of a comparison: seconds and new tokens of every measured iteration."""

    seconds: tuple[float, ...]
    tokens: tuple[float, ...]
    peak_mb: float

    @property
    def median(self) -> float:
        """Median seconds of an iteration."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Paired runs of two sides. `target` is the largest ratio that passes."""

    case: str
    ours: tuple[Side, ...]
    theirs: tuple[Side, ...]
    target: float

    @property
    def ratios(self) -> tuple[float, ...]:
        """Our median over theirs, one for each pair."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return tuple(ours.median / theirs.median for ours, theirs in pairs)

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(self.ratios)

    @property
    def passed(self) -> bool:
        """Whether the ratio meets the target."""
        return self.ratio <= self.target

    def row(self, precision: int = 1) -> tuple[str, ...]:
        """A line of the table, times in milliseconds."""
        spread = f"{min(self.ratios):.2f}..{max(self.ratios):.2f}"
        return (
            self.case,
            f"{pooled(self.ours) * 1e3:.{precision}f}",
            f"{pooled(self.theirs) * 1e3:.{precision}f}",
            f"{self.ratio:.2f}",
            spread,
            f"<= {self.target:.2f}",
            "yes" if self.passed else "NO",
            f"{mean_tokens(self.ours):.0f} / {mean_tokens(self.theirs):.0f}",
            f"{peak(self.ours):.0f} / {peak(self.theirs):.0f}",
        )

    def as_json(self) -> dict[str, Any]:
        """Everything measured, and the figures of the table."""
        figures = {"ratio": self.ratio, "ratios": self.ratios, "passed": self.passed}
        medians = {"rlflow_seconds": pooled(self.ours), "trl_seconds": pooled(self.theirs)}
        return {**asdict(self), **figures, **medians}


HEADER = ("case", "rlflow ms", "TRL ms", "ratio", "of pairs", "target", "met", "new tokens", "MB")


def pooled(sides: Sequence[Side]) -> float:
    """Median seconds over the measured iterations of all runs of a side."""
    return statistics.median(second for side in sides for second in side.seconds)


def mean_tokens(sides: Sequence[Side]) -> float:
    """Mean new tokens of an iteration over all runs of a side."""
    return statistics.fmean(count for side in sides for count in side.tokens)


def peak(sides: Sequence[Side]) -> float:
    """The largest resident memory of a side's processes, MB."""
    return max(side.peak_mb for side in sides)


def paired(
    case: str, ours: Callable[[], Side], theirs: Callable[[], Side], *, pairs: int, target: float
) -> Compared:
    """Run both sides in turn, `pairs` times: A B A B, so that a slow hour meets both."""
    made: list[tuple[Side, Side]] = []
    for number in range(pairs):
        say(f"{case}: pair {number + 1} of {pairs}")
        made.append((ours(), theirs()))
    first, second = zip(*made, strict=True)
    return Compared(case=case, ours=first, theirs=second, target=target)


def between(ends: Sequence[float], warmup: int) -> tuple[float, ...]:
    """Seconds of every iteration after `warmup` of them, from the times they ended at.

    Raises ValueError for less than one iteration of warm-up: the first has no end before it.
    """
    if warmup < 1:
        raise ValueError(f"warmup={warmup}, and the first iteration has no end before it")
    return tuple(b - a for a, b in zip(ends[warmup - 1 :], ends[warmup:], strict=False))


def run(command: Sequence[str | Path], log: Path) -> float:
    """Run a process on one thread, its output in `log`; returns its peak memory in MB.

    It begins as a copy of this process, so the peak is no less than what that has in memory.
    Raises SystemExit with the end of the log where the process fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in command]
    with log.open("wb") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
        )
        _, status, usage = os.wait4(process.pid, 0)
    # wait4 has reaped the child behind Popen's back, which would warn about it.
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise SystemExit(f"{tail}\n{shlex.join(words)}\nexit code {process.returncode}, log: {log}")
    return usage.ru_maxrss / 1024


def script(name: str, python: Path, file: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run a script of this folder on a spec, in a directory of its own; what it wrote."""
    folder = CACHE / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    given, made = folder / "spec.json", folder / "result.json"
    given.write_text(json.dumps(spec), encoding="utf-8")
    run([python, HERE / file, given, made], CACHE / "logs" / f"{name}.log")
    found: dict[str, Any] = json.loads(made.read_text(encoding="utf-8"))
    return found


def rlflow() -> Path:
    """The rlflow command of this interpreter's environment."""
    return Path(sys.executable).parent / "rlflow"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def machine() -> dict[str, Any]:
    """Where and when, as plain data; the date is UTC."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_name(),
        "flags": cpu_flags(),
        "products": product_library(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def cpu_name() -> str:
    """The processor as the system names it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


# Instructions on which the speed of matrix products depends, as Linux names them.
WIDE = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def cpu_flags() -> list[str]:
    """Those of `WIDE` that the processor has."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return [name for name in WIDE if name in flags]


def product_library() -> str:
    """The library of rlflow's float32 products on this machine, as a process of its own says."""
    program = "from rlflow.engines.hf.forward.kernels import LIBRARY; print(LIBRARY)"
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    return found.stdout.strip() or "none"


def machine_kind() -> str:
    """The processor in a file's name, such as `intel-xeon`."""
    words = cpu_name().lower().replace("(r)", " ").replace("processor", " ").split()
    return "-".join(words[:2]) or "unknown"


def commit() -> str:
    """The commit measured, marked `+` where files differ from it."""
    head = git("rev-parse", "--short", "HEAD").strip()
    return head + ("+" if git("status", "--porcelain") else "") if head else "unknown"


def git(*words: str) -> str:
    """What git says about this checkout; empty where it is none."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of their own width, the first one to the left."""
    widths = [max(len(row[at]) for row in (header, *rows)) for at in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def markdown_report(
    title: str, facts: Mapping[str, Any], parts: Sequence[str], notes: Sequence[str] = ()
) -> str:
    """A results page: where it was measured, its tables, and how it was measured."""
    load = " ".join(str(value) for value in facts["load"])
    chip = f"{facts['cpu']} ({' '.join(facts['flags'])}; products by {facts['products']})"
    where = (
        f"{facts['date']}, commit {facts['commit']}, {chip}, {facts['cores']} cores, "
        f"{facts['memory_gb']} GB, Python {facts['python']}, load average {load} at the start."
    )
    listed = "\n".join(f"- {note}" for note in notes)
    return "\n\n".join(filter(None, (f"# {title}", where, *parts, listed))) + "\n"


def write_results(folder: Path, name: str, data: Mapping[str, Any], page: str) -> None:
    """Write NAME.json and NAME.md."""
    folder.mkdir(parents=True, exist_ok=True)
    document = json.dumps(data, indent=1, sort_keys=True) + "\n"
    (folder / f"{name}.json").write_text(document, encoding="utf-8")
    (folder / f"{name}.md").write_text(page, encoding="utf-8")
    say(f"wrote {folder / name}.json and .md")


def say(text: str) -> None:
    """Progress, to standard error."""
    print(text, file=sys.stderr, flush=True)
