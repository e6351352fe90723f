"""`rlflow doctor --measure`: what is timed, what becomes of it, and a plan made of it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlflow.cli.measuring import MeasuredMachine, measure_machine, short_name
from rlflow.scheduler.devices.cluster import KINDS, parse_cluster
from rlflow.scheduler.devices.efficiency import LAYER_SHAPES
from tests.conftest import PIPELINES

pytestmark = pytest.mark.torch


def timing(what: str, size: int, seconds: float, rate: float):
    from rlflow.runtime.measuring import DeviceTiming

    return DeviceTiming(what=what, size=size, seconds=seconds, rate=rate)


@pytest.fixture
def gpus() -> MeasuredMachine:
    """Four GPUs of round figures: 10 us and 400 GB/s for an all-gather of three quarters of it."""
    mib = 1 << 20
    return MeasuredMachine(
        kind="cuda",
        name="h100",
        base="h100",
        count=4,
        threads=8,
        memory=85e9,
        timings=(
            timing("product bfloat16", 1024, 1e-5, 2e14),
            timing("product bfloat16", 8192, 1e-3, 7e14),
            timing("product float32", 8192, 2e-2, 5e13),
            timing("product tf32", 8192, 3e-3, 3e14),
            timing("copy", mib, 1e-6, 9e12),
            timing("copy", 1024 * mib, 8e-4, 2.5e12),
            timing("launch", 1000, 5e-6, 2e5),
            timing("replayed", 1000, 1.5e-6, 6e5),
            timing("h2d pinned", 256 * mib, 5e-3, 5.5e10),
            timing("h2d pageable", 256 * mib, 5e-2, 5e9),
            timing("d2h pinned", 256 * mib, 5e-3, 5e10),
            timing("all_gather", 1024, 13e-6, 6e7),
            timing("all_gather", 400_000_000, 13e-6 + 3e8 / 4e11, 4e11),
            timing("all_reduce", 400_000_000, 2e-3, 3e11),
        ),
    )


def test_what_was_measured_is_what_the_estimates_read(gpus, tmp_path) -> None:
    (tmp_path / "my.toml").write_text(gpus.toml())
    found = parse_cluster(str(tmp_path / "my.toml"), 1)
    kind = found.kind

    assert (4, "h100", 85e9) == (found.count, kind.chip, kind.memory)
    assert (7e14, 5e13, 3e14) == (kind.flops, kind.flops32, kind.flops_tf32)
    assert (2.5e12, 5e10) == (kind.bandwidth, kind.host_link), "the larger copy, the slower way"
    assert (5e-6, 1.5e-6) == (kind.launch, kind.replayed)
    assert kind.bus == kind.link == pytest.approx(4e11)
    assert kind.latency + 3 * kind.hop == pytest.approx(13e-6, rel=1e-3)
    assert (1.0, LAYER_SHAPES) == (kind.reached, kind.sustained)
    assert KINDS["h100"].nic == kind.nic, "what was not measured is the base's"
    assert "measured by rlflow doctor, 4 devices" == kind.source
    table = tomllib.loads(gpus.toml())
    assert len(gpus.timings) == len(table["kinds"]["h100"]["measured"])


def test_a_gpu_of_no_known_kind_is_declared_whole(gpus, tmp_path) -> None:
    (tmp_path / "my.toml").write_text(replace(gpus, name="l4", base="", count=1).toml())
    kind = parse_cluster(str(tmp_path / "my.toml"), 1).kind

    assert ("l4", 7e14, 85e9) == (kind.name, kind.flops, kind.memory)
    assert kind.link > 0
    assert kind.nic > 0


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GH200 480GB", "gh200480gb"),
        ("NVIDIA H100", "h100card"),
        ("42", "k42"),
    ],
)
def test_a_name_that_devices_take(name, short) -> None:
    assert short == short_name(name)


def test_without_timings_a_file_still_says_what_is_there(gpus, tmp_path) -> None:
    """All was left out, as where the time was up: of a known kind the base stands."""
    (tmp_path / "my.toml").write_text(replace(gpus, timings=()).toml())
    assert KINDS["h100"].flops == parse_cluster(str(tmp_path / "my.toml"), 1).kind.flops


def test_products_and_copies_are_timed_by_size(monkeypatch) -> None:
    import torch

    from rlflow.runtime import measuring

    monkeypatch.setattr(measuring, "COPIES", {"cpu": (1 << 20,)})
    device, before = torch.device("cpu"), torch.get_float32_matmul_precision()
    (low, full) = measuring.square_products(device, 64, set())
    (copy,) = measuring.copies(device)

    assert ["product bfloat16", "product float32"] == [low.what, full.what]
    assert full.rate == pytest.approx(2 * 64**3 / full.seconds)
    assert copy.rate == pytest.approx(2 * (1 << 20) / copy.seconds)
    assert before == torch.get_float32_matmul_precision()
    (launch,) = measuring.launches(device)
    assert 0 < launch.seconds < 1e-3, "seconds of one of the thousand"


def test_products_that_take_too_long_are_not_tried_in_larger_sizes(monkeypatch) -> None:
    import torch

    from rlflow.runtime import measuring

    monkeypatch.setattr(measuring, "TOO_LONG", 0.0)
    late: set[str] = set()
    device = torch.device("cpu")
    assert 2 == len(list(measuring.square_products(device, 8, late)))
    assert [] == list(measuring.square_products(device, 16, late))


def test_products_of_a_pass_and_attention_are_timed_by_rows(monkeypatch) -> None:
    import torch

    from rlflow.runtime import measuring
    from rlflow.scheduler.devices.curves import curves_of

    monkeypatch.setattr(measuring, "PASSES", {"cpu": (1, 8, 64)})
    monkeypatch.setattr(measuring, "ATTENDED", (8, 32))
    monkeypatch.setattr(measuring, "AT_ONCE", 64)
    device = torch.device("cpu")
    rows = list(measuring.row_products(device, 32))
    assert [1, 8, 64] * 2 == [row.size for row in rows]
    assert rows[-1].rate == pytest.approx(2 * 64 * 32**2 / rows[-1].seconds)
    over = list(measuring.attention(device))
    assert over[1].rate == pytest.approx(2 * 2 * 16 * 128 * 32**2 / over[1].seconds)
    curves = curves_of((*rows, *over))
    assert over[1].rate == pytest.approx(curves.attended("bfloat16", 32))
    assert 0 < (curves.filled("float32", 8, 32) or 0) <= 1
    monkeypatch.setattr(measuring, "TOO_LONG", 0.0)
    assert [1, 1] == [row.size for row in measuring.row_products(device, 32)]


def test_gpus_that_torch_has_are_measured_whoever_made_them(monkeypatch) -> None:
    """No driver's library is asked: NVML knows no AMD."""
    import torch

    from rlflow.runtime import measuring

    chip = SimpleNamespace(name="AMD Instinct MI300X", total_memory=206e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    monkeypatch.setattr(measuring, "measured", lambda *words: iter(()))
    monkeypatch.delenv("RLFLOW_GPUS", raising=False)
    found = measure_machine(lambda text: None)
    assert ("cuda", "mi300x", "mi300x", 8) == (found.kind, found.name, found.base, found.count)
    monkeypatch.setenv("RLFLOW_GPUS", "off")
    assert "cpu" == measure_machine(lambda text: None).kind


def test_a_budget_that_is_spent_begins_nothing() -> None:
    from rlflow.runtime.measuring import measured

    assert [] == list(measured("cpu", 2, 1, 0.0))


@pytest.mark.slow
def test_ranks_that_fail_say_why() -> None:
    from rlflow.runtime.measuring import collectives

    with pytest.raises(RuntimeError, match=r"(?i)cuda|nccl"):
        list(collectives("cuda", 2))


@pytest.mark.slow
def test_a_cpu_is_measured_and_planned_with(rlflow, tmp_path) -> None:
    path = tmp_path / "my.toml"
    done = rlflow("doctor", "--measure", "-o", path)

    assert 0 == done.code, done.err
    assert "s at the most" in done.err
    assert f"wrote {path}" in done.err
    whats = {row["what"] for row in tomllib.loads(path.read_text())["kinds"]["cpu"]["measured"]}
    assert {"product bfloat16", "product float32", "copy", "launch", "weights"} <= whats
    plan = rlflow(
        "plan", PIPELINES / "grpo_arithmetic.py", "--placement", "colocate", "--devices", path
    )
    assert 0 == plan.code, plan.err


@pytest.mark.slow
def test_collectives_of_processes_are_timed_by_size() -> None:
    from rlflow.runtime.measuring import GATHERED, collectives

    found = list(collectives("cpu", 2))
    assert [*GATHERED["cpu"]] == [row.size for row in found if row.what == "all_gather"]
    assert all(row.rate == pytest.approx(row.size / 2 / row.seconds) for row in found[::2])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-o", "x.toml"), "-o writes what --measure finds"),
        (("--measure", "-o", "x.json"), "error[E252]: -o x.json"),
        (("--measure", "-o", "nowhere/x.toml"), "there is no folder nowhere"),
    ],
)
def test_a_file_that_could_not_be_used_is_refused_before_anything(rlflow, words, said) -> None:
    done = rlflow("doctor", *words)
    assert 2 == done.code
    assert said in done.err
