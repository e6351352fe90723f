"""Devices that a file declares: what it may say, what stands for what, and how it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlflow.cli.commands import Target, cluster_of
from rlflow.cli.machines import local_device
from rlflow.errors import PlanError, UsageError
from rlflow.scheduler.devices import cluster
from rlflow.scheduler.devices.cluster import KINDS, Cluster, parse_cluster
from tests.conftest import PIPELINES

MINE = """
devices = "mine:8,h100:4"

[host]
memory = 1.5e12

[kinds.mine]
base = "h100"
memory = 96e9
link = 2e11
per_host = 4
"""
WHOLE = """
devices = "odd:2"

[kinds.odd]
memory = 32e9
flops = 100e12
flops32 = 10e12
bandwidth = 1e12
link = 32e9
nic = 1e9
host_link = 30e9
measured = [{what = "matmul bfloat16", size = 4096, rate = 1e14, seconds = 1e-3}]
"""


@pytest.fixture
def declared(tmp_path: Path):
    def write(text: str, name: str = "my.toml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def refused(text: str, **options) -> list:
    with pytest.raises(UsageError) as raised:
        parse_cluster(text, 1, **options)
    assert all("E252" == finding.code for finding in raised.value.findings)
    return list(raised.value.findings)


def test_kinds_of_a_file_stand_beside_those_of_the_table(declared) -> None:
    found = parse_cluster(declared(MINE), 1)

    assert (12, 3) == (found.count, found.hosts)
    mine, h100 = (kind for kind, _ in found.groups)
    assert ("mine", "h100", 96e9) == (mine.name, mine.chip, mine.memory)
    assert 2e11 == mine.link == mine.bus, "collectives get no more than the link that is said"
    assert KINDS["h100"].flops == mine.flops
    assert "declared in my.toml" == mine.source
    assert [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2] == [found.host_of(d) for d in range(12)]
    assert 1.5e12 == found.host_memory == h100.host_memory


def test_a_kind_without_a_base_says_what_it_needs(declared) -> None:
    (kind,) = {kind for kind, _ in parse_cluster(declared(WHOLE), 1).kinds}

    assert (100e12, 10e12, 5e12) == (kind.rate(2), kind.rate(4), kind.rate(8))
    assert 32e9 == kind.bus
    assert KINDS["h100"].launch == kind.launch
    missing = refused(declared('devices = "odd:1"\n[kinds.odd]\nmemory = 1e9\nnic = 1e9\n'))
    assert "kinds.odd lacks flops, flops32, bandwidth, link, host_link" in missing[0].what


def test_a_kind_named_as_one_of_the_table_stands_for_it(declared) -> None:
    found = parse_cluster(declared('devices = "h200:8"\n[kinds.h200]\nflops = 7e14\n'), 1)

    assert (7e14, KINDS["h200"].memory) == (found.kind.flops, found.kind.memory)
    assert 8 == found.count


def test_rates_of_cpu_devices_follow_their_threads(declared, monkeypatch) -> None:
    monkeypatch.setattr(cluster, "machine_cores", lambda: 2)
    text = declared(
        'devices = "cpu:2"\n[host]\ncores = 8\n'
        "[kinds.cpu]\nthreads = 8\nflops = 8e11\nflops32 = 1.6e12\nbandwidth = 3e10\n"
    )
    found = parse_cluster(text, 1)
    one = parse_cluster(text, 1, threads=1)

    assert (4, 4e11, 8e11) == (found.threads, found.kind.flops, found.kind.flops32)
    assert (1e11, 3e10, 3e10) == (one.kind.flops, one.kind.bandwidth, found.kind.bandwidth)
    assert found.is_cpu
    assert found.kind.weights <= found.kind.bandwidth
    wide = parse_cluster(declared('devices = "cpu:9"\n[host]\ncores = 8\n'), 1)
    assert (8, 1) == (wide.cores, wide.threads), "9 devices share 8 cores"


@pytest.mark.parametrize(
    ("text", "what", "near"),
    [
        ('device = "cpu:1"', "device is not a key here", ("devices",)),
        ("[host]\nmemory = 1", "devices", ()),
        ('devices = "cpu:1"\n[host]\nmemroy = 1', "host.memroy is not a key here", ("memory",)),
        (
            'devices = "m:1"\n[kinds.m]\nflop = 1.0',
            "kinds.m.flop is not",
            ("flops", "flops64", "flops32"),
        ),
        ('devices = "m:1"\n[kinds.m]\nflops = "1"', "kinds.m.flops", ()),
        ('devices = "m:1"\n[kinds.m]\nflops = true', "kinds.m.flops", ()),
        ('devices = "m:1"\n[kinds.m]\nflops = 0', "kinds.m.flops", ()),
        ('devices = "m:1"\n[kinds.m]\nbase = "h10"', "kinds.m.base", ("h100", "h20")),
        ('devices = "m:1"\n[kinds.m]\nbase = "h100"\nthreads = 2', "kinds.m.threads", ()),
        ('devices = "gpu:1"\n[kinds.gpu]\nbase = "h100"', "kinds.gpu is no name", ()),
        ('devices = "M:1"\n[kinds.M]\nbase = "h100"', "kinds.M is no name", ()),
        ('devices = "cpu:1"\n[kinds.cpu]\nthreads = 1\nmemory = 1', "kinds.cpu.memory", ()),
        ('devices = "cpu:1"\n[kinds.cpu]\nflops = 1', "kinds.cpu.threads is missing", ()),
        ('devices = "h100:1"\n[host]\ncores = 4', "host.cores", ()),
        ("devices = ", "is not TOML", ()),
    ],
)
def test_what_is_wrong_with_a_file_is_named_by_its_key(declared, text, what, near) -> None:
    path = declared(text)
    findings = refused(path)

    found = next(finding for finding in findings if what in finding.what)
    assert found.what.startswith(f"--devices {path}: ")
    assert near == found.near
    assert found.expected or "TOML" in found.what


def test_a_file_that_is_not_there_names_those_that_are(declared) -> None:
    path = declared(MINE)
    (finding,) = refused(path.replace("my.toml", "mine.toml"))

    assert ("my.toml",) == finding.near
    assert "rlflow doctor --measure -o" in finding.fix


def test_devices_of_a_file_are_read_as_those_of_the_command_line(declared) -> None:
    with pytest.raises(UsageError, match="no device kind 'mines' is known") as raised:
        parse_cluster(declared('devices = "mines:1"\n[kinds.mine]\nbase = "h100"\n'), 1)
    assert "mine" in raised.value.findings[0].near


@pytest.mark.parametrize(
    ("said", "size"), [("512GB", 512e9), ("1.5TB", 1.5e12), ("1000", 1e3), ("20MB", 2e7)]
)
def test_the_memory_of_a_host_is_what_is_said(declared, said, size) -> None:
    for text in ("h100:16", "cpu:2@1GB", declared(MINE), None):
        assert size == parse_cluster(text, 1, host_memory=said).host_memory


@pytest.mark.parametrize("said", ["much", "0", "-1GB", "1PB", ""])
def test_no_amount_of_memory_is_refused(said) -> None:
    with pytest.raises(UsageError, match=r"E202.*--host-memory"):
        parse_cluster("h100:8", 1, host_memory=said)


def test_a_host_of_this_machines_gpus_has_its_memory(monkeypatch) -> None:
    own = (KINDS["h100"], 8)
    monkeypatch.setattr(cluster, "usable", lambda gpus: own)
    monkeypatch.setattr(cluster, "machine_memory", lambda: 500e9)

    for text in (None, "h100:8", "h100:16", "gpu:2"):
        assert 450e9 == parse_cluster(text, 1).host_memory
    assert 2e12 == parse_cluster("b200:8", 1).host_memory


def test_the_memory_of_a_control_group_is_a_bound(tmp_path, monkeypatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(cluster, "CGROUP_LIMIT", limit)
    whole = cluster.machine_memory()
    limit.write_text("max\n")
    assert whole == cluster.machine_memory()
    limit.write_text("1000000\n")
    assert 1e6 == cluster.machine_memory()


def test_every_command_takes_a_file_and_the_memory_of_a_host(rlflow, declared) -> None:
    file = declared('devices = "fast:2"\n[kinds.fast]\nbase = "h200"\nflops = 5e15\n')
    pipeline = str(PIPELINES / "grpo_arithmetic.py")
    told = ["--devices", file, "--host-memory", "300GB"]
    made = json.loads(rlflow("plan", pipeline, *told, "--placement", "split", "--json").out)

    assert made["cluster"].startswith("fast:2 (138.7 GB of 150.8 GB each)")
    assert (
        3e11
        == cluster_of(Target(pipeline=pipeline, devices=file, host_memory="300GB"), 1).host_memory
    )
    assert 'devices = "fast:4" in the file' in rlflow("check", pipeline, *told).err
    assert "fast:2" in rlflow("check", pipeline, *told, "--placement", "split").out
    for words in (
        ["simulate", pipeline, *told],
        ["diff", pipeline, *told, "--placement", "colocate", "--placement", "split"],
        ["tune", pipeline, *told, "--top", "1"],
        ["run", pipeline, *told, "--placement", "split", "--dry-run"],
    ):
        assert 0 == rlflow(*words).code, words


def test_what_a_file_declares_is_what_estimates_use(declared) -> None:
    slow = parse_cluster(declared('devices = "m:1"\n[kinds.m]\nbase = "h100"\nflops = 1e12\n'), 1)

    assert isinstance(slow, Cluster)
    assert 1e12 == slow.kind.rate(2)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "kind", "taken"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", True),
        ("NVIDIA H100 80GB HBM3", "a100", False),
        ("NVIDIA H100 80GB HBM3", "gpu", True),
        ("NVIDIA L4", "gpu", True),
        ("NVIDIA L4", "h100", True),
    ],
)
def test_a_kind_that_stands_alone_is_whatever_this_machine_has(
    name, kind, taken, monkeypatch
) -> None:
    import torch

    chip = SimpleNamespace(name=name, total_memory=85e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    if taken:
        assert "cuda:0" == local_device(kind)
    else:
        with pytest.raises(PlanError, match="E406"):
            local_device(kind)
