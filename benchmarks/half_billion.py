"""Planned and measured actions of a 0.5 B model on one CPU thread, by the table alone.

The model has the widths of Qwen2.5-0.5B and random weights. It is planned before anything was
measured, and run; the processor time and the largest resident memory of every action are read
from /proc while it runs, so that a machine which others use tells the same.

    python benchmarks/half_billion.py --dtype bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    CACHE,
    HERE,
    RESULTS,
    ROOT,
    machine,
    markdown_report,
    markdown_table,
    read_jsonl,
    rlflow,
    text_table,
    write_results,
)

from rlflow.scheduler.devices.hardware import CPU_PROCESS

PIPELINE = HERE / "pipelines" / "half_billion.py"
NAME = "half_billion"
HEADER = (
    "action",
    "planned s",
    "processor s",
    "of it system",
    "planned / measured",
    "first time s",
    "planned GB",
    "resident GB",
    "with the process / resident",
)
EVERY = 0.05
WIDTHS = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "vocab_size": 151_936,
}
NOTES = (
    "One thread, `RLFLOW_COSTS=off`: no measurement stands behind the plan.",
    "Processor time, user and system, of the process during the action in the second iteration. In "
    "the first, `first time s`, the system also hands out and clears the memory that it uses, "
    "such as that of all gradients: once a run, and no estimate.",
    "`planned GB` are those that the plan counts. `resident GB` is the whole process, of which the "
    f"plan says that about {CPU_PROCESS / 1e9} GB are libraries: with them it is the last column.",
)


def model_directory() -> Path:
    """A directory with the config of the widths and a tokenizer as large; no weights."""
    path = CACHE / "models" / NAME
    path.mkdir(parents=True, exist_ok=True)
    tiny = ROOT / "pipelines" / "assets" / "arith-tiny"
    shutil.copy(tiny / "tokenizer_config.json", path)
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**config, **WIDTHS}), encoding="utf-8")
    tokenizer = json.loads((tiny / "tokenizer.json").read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    known |= {f"<{number}>": number for number in range(len(known), WIDTHS["vocab_size"])}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return path


def command(word: str, dtype: str) -> list[str]:
    """An rlflow command on the pipeline."""
    words = [rlflow(), word, PIPELINE, "--devices", "cpu:1", "--threads", "1"]
    return [*map(str, words), "--set", f"model={model_directory()}", "--set", f"dtype={dtype}"]


def planned(dtype: str) -> dict[str, tuple[float, int]]:
    """Seconds and peak bytes of every action with a model, by its name."""
    words = [*command("plan", dtype), "--json"]
    made = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    plan: dict[str, Any] = json.loads(made.stdout)
    return {
        action["id"]: (action["cost"]["seconds"], action["peak"])
        for action in plan["actions"]
        if action["devices"] != [-1]
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A process at a time: its processor seconds so far, and its resident bytes."""

    time: float
    user: float
    system: float
    resident: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """An action while it ran: processor seconds, those of them in the system, most bytes."""

    seconds: float
    system: float
    resident: int


def sample(pid: int) -> Sample:
    """A process now."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    user, system = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:13])
    resident = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return Sample(time=time.time(), user=user, system=system, resident=resident)


def measured(dtype: str) -> dict[str, list[Measured]]:
    """Every action in each iteration, by its name."""
    folder = CACHE / "runs" / f"{NAME}-{dtype}"
    shutil.rmtree(folder, ignore_errors=True)
    words = [*command("run", dtype), "--iterations", "2", "--save-every", "1000000", "-q"]
    process = subprocess.Popen([*words, "--run-dir", str(folder)], cwd=ROOT)
    seen = []
    while process.poll() is None:
        seen.append(sample(process.pid))
        time.sleep(EVERY)
    if process.returncode:
        raise SystemExit(process.returncode)
    rows = read_jsonl(folder / "spans" / "main.jsonl")
    found: dict[str, list[Measured]] = {}
    for row in rows:
        if "action" in row:
            start, end = (rows[0]["origin"] + row[edge] for edge in ("start", "end"))
            during = [one for one in seen if start <= one.time <= end]
            if during:
                system = during[-1].system - during[0].system
                one = Measured(
                    seconds=system + during[-1].user - during[0].user,
                    system=system,
                    resident=max(each.resident for each in during),
                )
                found.setdefault(row["action"], []).append(one)
    return found


def main() -> None:
    """Plan, run, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    dtype = parser.parse_args().dtype
    os.environ |= {"RLFLOW_COSTS": "off", "OMP_NUM_THREADS": "1"}
    facts, plan, run = machine(), planned(dtype), measured(dtype)
    rows, cases = [], []
    for name, (seconds, size) in plan.items():
        first, last = run[name]
        resident, whole = max(first.resident, last.resident), size + CPU_PROCESS
        times = (seconds, last.seconds, last.system, seconds / last.seconds, first.seconds)
        sizes = (size / 1e9, resident / 1e9, whole / resident)
        rows.append((name, *(f"{figure:.2f}" for figure in (*times, *sizes))))
        case = {"planned": seconds, "measured": last.seconds, "system": last.system}
        case |= {"first": first.seconds, "bytes": size, "resident": resident}
        cases.append({"action": name, **case})
    whole = sum(case["planned"] for case in cases) / sum(case["measured"] for case in cases)
    line = f"All actions together: planned {whole:.2f} of what was measured (target 0.67 to 1.5)."
    table = markdown_table(HEADER, rows)
    page = markdown_report(f"A 0.5 B model in {dtype} on one thread", facts, [table, line], NOTES)
    document = {"machine": facts, "dtype": dtype, "cases": cases, "ratio": whole}
    write_results(RESULTS, f"{NAME}_{dtype}", document, page)
    sys.stdout.write(f"{text_table(HEADER, rows)}\n{line}\n")


if __name__ == "__main__":
    main()
