"""Clusters: what `--devices` names, how many hosts, whose cores."""

from __future__ import annotations

import pytest

from rlflow.scheduler import cluster
from rlflow.scheduler.cluster import cpu_cluster, parse_cluster


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "machine_cores", lambda: 2)


@pytest.mark.parametrize(
    ("text", "hosts"), [("h100:1", 1), ("h100:8", 1), ("a100:9", 2), ("b200:32", 4)]
)
def test_accelerators_are_eight_to_a_host(text: str, hosts: int) -> None:
    assert hosts == parse_cluster(text, 1).hosts


def test_cpu_devices_are_on_this_machine() -> None:
    assert 1 == parse_cluster("cpu:64", 1).hosts


@pytest.mark.parametrize(
    ("count", "threads", "cores"), [(1, 2, 0), (2, 1, 0), (3, 1, 2), (64, 1, 2)]
)
def test_cpu_devices_share_cores_where_there_are_fewer(
    count: int, threads: int, cores: int
) -> None:
    for found in (parse_cluster(f"cpu:{count}", 1), parse_cluster(None, count)):
        assert (count, threads, cores) == (found.count, found.threads, found.cores)
        assert found.kind.memory == cpu_cluster(count).kind.memory


def test_several_hosts_are_printed() -> None:
    assert "h100:16 (80.0 GB each, 2 hosts)" == parse_cluster("h100:16", 1).describe()
