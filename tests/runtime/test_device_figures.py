"""What devices did while actions ran: asked of the driver and the allocator, kept, and shown."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest
import torch

from rlflow.report.device_table import device_rows, device_table
from rlflow.report.report import write_report
from rlflow.report.runfiles import read_run_files
from rlflow.runtime.ray.made import Made
from rlflow.runtime.record.devices import nvml
from rlflow.runtime.record.devices.log import (
    DEVICE_LOG,
    DeviceLine,
    DeviceLog,
    read_device_lines,
)
from rlflow.runtime.record.devices.meter import DeviceMeter
from rlflow.runtime.record.devices.nvml import NvmlGpu
from rlflow.runtime.record.lines.rolling import dropped_before
from tests.conftest import PIPELINES

pytestmark = pytest.mark.torch

# The calls of nvml.h that are used, as its documentation has them: handles are opaque, codes are
# 0 for success, 1 uninitialized, 2 invalid argument, 3 not supported, 6 not found.
LIBRARY = r"""
#include <string.h>
typedef void *nvmlDevice_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
static int ready, device;
int nvmlInit_v2(void) { ready = 1; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *found) {
  if (!ready) return 1;
  if (!uuid || !found) return 2;
  if (strcmp(uuid, "GPU-1234")) return 6;
  *found = &device; return 0;
}
static int wrong(nvmlDevice_t d, void *p) { return !ready ? 1 : (d != &device || !p) ? 2 : 0; }
int nvmlDeviceGetUtilizationRates(nvmlDevice_t d, nvmlUtilization_t *u) {
  int code = wrong(d, u); if (code) return code;
#ifdef MIG
  return 3;
#endif
  u->gpu = 87; u->memory = 12; return 0;
}
int nvmlDeviceGetClockInfo(nvmlDevice_t d, int type, unsigned int *mhz) {
  int code = wrong(d, mhz); if (code) return code;
  if (type != 1) return 2;
  *mhz = 1980; return 0;
}
int nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *m) {
  int code = wrong(d, m); if (code) return code;
  m->total = 150ull << 30; m->used = 100ull << 30; m->free = 50ull << 30; return 0;
}
#ifndef OLD
int nvmlDeviceGetPowerUsage(nvmlDevice_t d, unsigned int *mw) {
  int code = wrong(d, mw); if (code) return code;
  *mw = 650500; return 0;
}
#endif
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch):
    """A driver's library with the C interface, of another build where names are given."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")

    def build(*names: str) -> None:
        source, made = tmp_path / "nvml.c", tmp_path / f"nvml{''.join(names)}.so"
        source.write_text(LIBRARY)
        flags = ["-shared", "-fPIC", *(f"-D{name}" for name in names)]
        subprocess.run([compiler, *flags, "-o", made, source], check=True)
        monkeypatch.setenv(nvml.VARIABLE, str(made))

    return build


def test_the_driver_is_asked_by_its_c_interface(driver) -> None:
    driver()
    gpu = NvmlGpu.found("GPU-1234")

    assert gpu is not None
    expected = {"utilisation": 87.0, "clock": 1.98e9, "power": 650.5, "used": 100.0 * 2**30}
    assert expected == gpu.figures()
    assert NvmlGpu.found("GPU-5678") is None


@pytest.mark.parametrize(("build", "absent"), [("MIG", "utilisation"), ("OLD", "power")])
def test_what_a_gpu_does_not_have_is_left_out(driver, build, absent) -> None:
    driver(build)
    gpu = NvmlGpu.found("GPU-1234")

    assert gpu is not None
    assert {"utilisation", "clock", "power", "used"} - {absent} == gpu.figures().keys()


def test_without_a_driver_there_is_no_gpu(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv(nvml.VARIABLE, str(tmp_path / "none.so"))
    assert NvmlGpu.found("GPU-1234") is None


def test_a_cpu_says_what_it_has() -> None:
    meter = DeviceMeter("cpu")

    def call() -> str:
        meter.note({"tokens": 12.0})
        return "made"

    made, figures = meter.around(call)
    assert "made" == made
    assert {"peak_rss", "tokens"} == figures.keys()
    assert 12 == figures["tokens"]
    assert 1e7 < figures["peak_rss"] < 1e12
    assert {"peak_rss"} == meter.around(lambda: None)[1].keys(), "tokens are of one action"


def test_a_gpu_is_asked_around_an_action_and_waited_for_once(monkeypatch) -> None:
    """The order of the calls to torch.cuda, which a machine without a GPU cannot run."""
    calls: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.over = False

        def record(self, stream: object) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("wait")
            self.over = True

        def elapsed_time(self, other: Event) -> float:
            assert other.over, "CUDA refuses events that have not come"
            return 250.0

    memory = iter((10.0, 4.0))
    fakes = {
        "Event": Event,
        "current_stream": lambda device: "stream",
        "memory_allocated": lambda device: next(memory),
        "memory_reserved": lambda device: 30,
        "max_memory_allocated": lambda device: 25,
        "reset_peak_memory_stats": lambda device: calls.append("reset"),
        "get_device_properties": lambda device: type("Chip", (), {"uuid": "none"}),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    meter = DeviceMeter("cuda:0")
    _, figures = meter.around(lambda: calls.append("action"))

    assert ["reset", "record", "action", "record", "wait"] == calls
    expected = {"device_seconds": 0.25, "allocated_before": 10, "allocated": 4}
    assert {**expected, "reserved": 30, "peak": 25} == figures
    memory, calls[:] = iter((1.0, 1.0)), []
    assert "peak" not in meter.around(lambda: None, beside=True)[1]
    assert "reset" not in calls, "what runs beside leaves the peak to the others"


def test_lines_come_back_the_last_of_each_and_none_that_is_torn(tmp_path) -> None:
    path = tmp_path / DEVICE_LOG
    log = DeviceLog(path)
    for tokens in (1.0, 2.0):
        log.write(
            DeviceLine(action="a", iteration=3, device=0, seconds=1 / 3, figures={"tokens": tokens})
        )
    log.close()
    path.write_text(path.read_text() + '{"action": "a", "iter')

    (line,) = read_device_lines(path)
    assert ("a", 3, 0, 0.333333, {"tokens": 2.0}) == (
        line.action,
        line.iteration,
        line.device,
        line.seconds,
        line.figures,
    )
    assert [] == read_device_lines(tmp_path / "none")


def test_the_last_lines_of_a_long_run_are_kept(tmp_path) -> None:
    path = tmp_path / DEVICE_LOG
    log = DeviceLog(path, room=2000)
    for iteration in range(100):
        log.write(
            DeviceLine(action="a", iteration=iteration, device=0, seconds=0.5, figures={"peak": 1})
        )
    log.close()

    kept = [line.iteration for line in read_device_lines(path)]
    assert kept == list(range(100))[-len(kept) :]
    assert 12 < len(kept) < 40
    assert 100 - len(kept) == dropped_before(path)


def test_a_rank_sends_its_figures_with_its_answer() -> None:
    made = Made(start=0.0, end=1.0, figures={"tokens": 5.0, "peak": 1e9})
    assert made == Made.unpacked(made.packed())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """Two iterations of PPO in this process, without a report."""
    from click.testing import CliRunner

    from rlflow.cli.main import cli

    path = tmp_path_factory.mktemp("runs") / "ppo"
    words = ["run", str(PIPELINES / "ppo_arithmetic.py"), "--placement", "colocate"]
    words += ["--iterations", "2", "--run-dir", str(path), "--quiet", "--threads", "1"]
    done = CliRunner().invoke(cli, words)
    assert 0 == done.exit_code, done.output
    return path


@pytest.mark.slow
def test_a_run_on_a_cpu_shows_tokens_and_memory_and_no_more(run_dir) -> None:
    headings, rows = device_table(read_run_files(run_dir))

    assert ("action", "device time", "tokens/s/device", "process memory") == headings
    shown = {row[0]: row for row in rows}
    assert "-" == shown["eval"][2] != shown["actor.rollout"][2]
    by_name = {row.action: row for row in device_rows(read_run_files(run_dir))}
    made = by_name["actor.rollout"].tokens
    assert made == by_name["ref.log_probs"].tokens
    assert 2 * made == by_name["actor.update"].tokens, "two epochs over the same rows"
    page = write_report(run_dir, run_dir / "a.html").read_text()
    assert "What devices did" in page
    assert "MFU" not in page.partition("What devices did")[2].partition("One iteration")[0][:600]


@pytest.mark.slow
def test_mfu_is_of_the_peak_that_the_run_has_noted(run_dir, tmp_path) -> None:
    """The same run as if on a device of 1 Tflop/s, with widths that are easy to count."""
    there = shutil.copytree(run_dir, tmp_path / "gpu")
    peaks = json.loads((there / "peaks.json").read_text())
    assert "flops" not in peaks
    widths = {"body": 1000, "head": 50, "layers": 2, "heads": 3, "head_dim": 4}
    peaks |= {"flops": 4e12, "flops32": 1e12}
    peaks["products"] = dict.fromkeys(peaks["products"], widths)
    peaks["products"]["critic"] = widths | {"head": 0}
    (there / "peaks.json").write_text(json.dumps(peaks))
    rows = {row.action: row for row in device_rows(read_run_files(there))}
    update, forward = rows["actor.update"], rows["critic.values"]

    noted = [line.figures for line in read_device_lines(there / DEVICE_LOG)]
    rollouts = [found for found in noted if "passed" in found]
    passed, predicted, pairs = (
        statistics.median(found[name] for found in rollouts)
        for name in ("passed", "predicted", "pairs")
    )
    once = 2 * 1000 * passed + 4 * 2 * 3 * 4 * pairs
    assert passed <= update.tokens / 2
    assert 2 * 3 * (once + 2 * 50 * predicted) == update.flops, "two epochs of three forwards each"
    assert once == forward.flops
    headings, shown = device_table(read_run_files(there))
    cell = next(row for row in shown if row[0] == "actor.update")[headings.index("MFU")]
    assert f"{update.flops / update.seconds / 1e12:.1%}" == cell
