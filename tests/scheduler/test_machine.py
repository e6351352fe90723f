"""The devices of this machine: what NVML or nvidia-smi answers becomes a cluster, or none does."""

from __future__ import annotations

import sys
import types

import pytest

from rlflow.cli.doctor import examine
from rlflow.errors import UsageError
from rlflow.scheduler.devices.cluster import parse_cluster
from rlflow.scheduler.devices.machine import chosen_text, machine_gpus
from tests.conftest import PIPELINES

H100, A100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA L4"
GIB = 2**30


def answering(*gpus: tuple[str, int], broken: bool = False) -> types.ModuleType:
    """NVML as `nvidia-ml-py` offers it, with so many GPUs."""
    nvml = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})

    def init():
        if broken:
            raise nvml.NVMLError("Driver Not Loaded")

    nvml.nvmlInit = init
    nvml.nvmlDeviceGetCount = lambda: len(gpus)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: gpus[index]
    nvml.nvmlDeviceGetName = lambda handle: handle[0]
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=handle[1] * GIB)
    return nvml


@pytest.fixture
def machine(monkeypatch):
    """Give this machine GPUs, as NVML tells them, and no nvidia-smi."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RLFLOW_GPUS", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)

    def has(*gpus, broken=False):
        monkeypatch.setitem(sys.modules, "pynvml", answering(*gpus, broken=broken))

    return has


@pytest.mark.parametrize(
    ("gpus", "needed", "described"),
    [
        ([(H100, 80)] * 8, 1, "h100:1 (78.7 GB of 85.5 GB each)"),
        ([(H100, 80)] * 4, 8, "h100:4 (78.7 GB of 85.5 GB each)"),
        ([(A100, 40)] * 2, 2, "a100:2 (39.5 GB of 42.9 GB each)"),
        ([("NVIDIA H200", 141), (L4, 23)], 2, "h200:1 (138.7 GB of 150.8 GB each)"),
        ([("NVIDIA GeForce RTX 4090", 24)] * 2, 2, "rtx4090:2 (23.7 GB of 25.8 GB each)"),
        ([("NVIDIA A800-SXM4-80GB", 80)], 1, "a800:1 (79.0 GB of 85.9 GB each)"),
        ([("NVIDIA H20", 95)], 1, "h20:1 (93.8 GB of 102.0 GB each)"),
        ([("NVIDIA GB200", 185)] * 4, 8, "gb200:4 (182.8 GB of 198.6 GB each)"),
    ],
)
def test_without_devices_those_of_the_machine_are_taken(machine, gpus, needed, described):
    machine(*gpus)
    assert described == parse_cluster(None, needed).describe()


def test_gpu_is_the_kind_of_the_machine(machine):
    machine((H100, 80))
    assert "h100:8 (78.7 GB of 85.5 GB each)" == parse_cluster("gpu:8", 1).describe()
    assert "h100:2 (60.0 GB each)" == parse_cluster("gpu:2@60GB", 1).describe()
    assert "h100:1" in next(row.found for row in examine() if "gpu" == row.name)


@pytest.mark.parametrize(
    "gpus",
    [
        [],
        [(L4, 23)],
        [("NVIDIA GH200 480GB", 95)],
        [("NVIDIA GeForce RTX 4090 D", 24)],
        [("NVIDIA GeForce RTX 4090 Laptop GPU", 16)],
    ],
)
def test_where_no_kind_is_known_cpu_devices_are_taken_and_it_is_said(machine, gpus):
    machine(*gpus)
    assert parse_cluster(None, 2).describe().startswith("cpu:2 ")
    assert "CPU devices are taken" in chosen_text(machine_gpus())
    with pytest.raises(UsageError, match="E251"):
        parse_cluster("gpu:8", 1)


def test_a_driver_that_does_not_answer_is_no_gpu(machine):
    machine((H100, 80), broken=True)
    assert () == machine_gpus()


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("2", 1), ("0,3", 2)])
def test_what_is_visible_counts(machine, monkeypatch, visible, count):
    machine(*[(H100, 80)] * 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count == len(machine_gpus())


def test_the_program_of_the_driver_answers_without_the_library(machine, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{H100}, 81559'\necho '{H100}, 81559'\n")
    program.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda name: str(program))
    assert "h100:2 (78.7 GB of 85.5 GB each)" == parse_cluster(None, 2).describe()


@pytest.mark.torch
def test_a_run_says_that_there_is_no_gpu(rlflow, tmp_path):
    words = ("--set", "prompts_per_iteration=4", "--set", "group_size=2", "--iterations", 1)
    result = rlflow("run", PIPELINES / "grpo_arithmetic.py", *words, "--run-dir", tmp_path / "a")
    assert "GPUs: none on this machine: CPU devices are taken" in result.err
