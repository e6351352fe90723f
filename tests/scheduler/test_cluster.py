"""Clusters: what `--devices` names, of which kinds, how many hosts, whose cores."""

from __future__ import annotations

import pytest

import rlflow as rf
from rlflow.errors import PlanError, UsageError
from rlflow.graph.graph import Graph
from rlflow.scheduler.devices import cluster, collectives
from rlflow.scheduler.devices.cluster import HOST, KINDS, cpu_cluster, mixed_pools, parse_cluster
from rlflow.scheduler.plan.plan import Plan
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "machine_cores", lambda: 2)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h100:1", 1),
        ("h100:8", 1),
        ("a100:9", 2),
        ("b200:32", 4),
        ("h100:8,a100:9", 3),
        ("gb200:9", 3),
    ],
)
def test_accelerators_fill_the_servers_of_their_kind(text: str, hosts: int) -> None:
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
    assert "h100:16 (78.7 GB of 85.5 GB each, 2 hosts)" == parse_cluster("h100:16", 1).describe()


def test_devices_of_several_kinds_are_numbered_as_written() -> None:
    found = parse_cluster("h100:8,a100:4,h200:2@100GB", 1)

    assert 14 == found.count
    kinds = [found.kind_of(device).name for device in range(14)]
    assert ["h100"] * 8 + ["a100"] * 4 + ["h200"] * 2 == kinds
    assert [0] * 8 + [1] * 4 + [2] * 2 == [found.host_of(device) for device in range(14)]
    assert "h100" == found.kind.name
    memory = "78.7 GB of 85.5 GB h100, 79.0 GB of 85.9 GB a100, 100.0 GB h200"
    assert f"h100:8,a100:4,h200:2 ({memory}, 3 hosts)" == found.describe()


def test_a_kind_may_fill_several_hosts() -> None:
    found = parse_cluster("h100:12,a100:2", 1)

    assert [0, 0, 1, 1, 2, 2] == [found.host_of(device) for device in (0, 7, 8, 11, 12, 13)]
    assert 3 == found.hosts


def test_each_device_has_the_memory_of_its_kind() -> None:
    budgets = parse_cluster("b200:1,a100:1@40GB", 1).budgets()

    assert {HOST: 2 * 10**12, 0: int(0.92 * 183359 * 2**20), 1: 40 * 10**9} == budgets


@pytest.mark.parametrize(("said", "left"), [("12%", 0.88), ("0.25", 0.75), ("0", 1.0), ("0%", 1.0)])
def test_a_share_of_memory_is_left_as_said(said: str, left: float) -> None:
    for text in ("h100:8", "h100:8@80GB", "h100:2,a100:2"):
        found = parse_cluster(text, 1, reserve=said)
        for device in (0, found.count - 1):
            assert int(left * found.kind_of(device).memory) == found.budgets()[device]
    assert parse_cluster("cpu:2", 1, reserve=said) == parse_cluster("cpu:2", 1)


@pytest.mark.parametrize("said", ["8 %", "100%", "1", "1.5", "-2%", "a lot", ""])
def test_what_is_no_share_is_refused(said: str) -> None:
    with pytest.raises(UsageError, match=r"E202.*--reserve"):
        parse_cluster("h100:8", 1, reserve=said)


def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(IndexError):
        parse_cluster("h100:2", 1).kind_of(2)
    with pytest.raises(IndexError):
        parse_cluster("h100:2,a100:2", 1).host_of(4)


@pytest.mark.parametrize(
    "text", ["h100", "h100:0", "x100:8", "h100:8,", "h100:8,cpu:2", "cpu:1,cpu:1", "h100:8;a100:8"]
)
def test_what_is_no_cluster_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_cluster(text, 1)

    assert ["E202"] == [finding.code for finding in raised.value.findings]


def test_a_pool_of_several_kinds_is_refused_with_what_each_device_is() -> None:
    found = parse_cluster("h100:2,a100:2", 1)
    (finding,) = mixed_pools({"train": (0, 1), "gen": (1, 2, 3)}, found)

    assert "E223" == finding.code
    assert "pool 'gen'" in finding.what
    assert finding.got.startswith("h100 [1], a100 [2, 3] of h100:2,a100:2")
    assert '"gen": [2, 3]' == finding.fix
    assert [] == mixed_pools({"all": (0, 1, 2, 3)}, parse_cluster("h100:4", 1))


def test_compiling_refuses_a_mixed_pool() -> None:
    from rlflow.scheduler.compile import compile_plan
    from tests.scheduler.examples import grpo

    placement = rf.Placement(pools={"all": 2}, assign={"*": rf.on("all")})
    with pytest.raises(PlanError) as raised:
        compile_plan(grpo(), placement, parse_cluster("h100:1,a100:1", 1))

    assert ["E223"] == [finding.code for finding in raised.value.findings]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_table_is_within_the_bounds_of_physics(kind: cluster.Kind) -> None:
    assert kind.link <= kind.bus < kind.bandwidth
    # A copy between two devices of a GeForce goes over the host.
    assert kind.host_link <= kind.link or "no P2P" in kind.source
    assert kind.nic < kind.link
    assert kind.flops32 <= kind.flops_tf32 < kind.flops
    assert kind.rate(8) <= kind.rate(4) < kind.rate(2)
    assert "data sheet" in kind.source
    # Tensor cores multiply bf16 at twice TF32, by all of these data sheets.
    assert kind.flops / kind.flops_tf32 == pytest.approx(2, rel=0.02)


def test_the_table_has_what_the_makers_print() -> None:
    """Ratios that a sparse figure, or the sum of two directions, would break."""
    assert 148e12 == KINDS["h20"].flops
    assert KINDS["h100"].bus == KINDS["h20"].bus == 2.25 * KINDS["h800"].bus
    assert KINDS["a100"].bus == 1.5 * KINDS["a800"].bus
    assert KINDS["l40s"].bus == KINDS["l40s"].host_link
    assert 7 * KINDS["mi300x"].link == KINDS["mi300x"].bus
    assert 5760e12 == 72 * KINDS["gb200"].flops32
    assert KINDS["rtx4090"].flops == 2 * KINDS["rtx4090"].flops32


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"cpu"}))
def test_a_plan_says_what_it_takes_for_granted_of_its_devices(kind) -> None:
    placement = rf.Placement(pools={"all": 1}, assign={"*": rf.on("all")})
    from rlflow.scheduler.compile import compile_plan
    from tests.scheduler.examples import grpo

    plan = compile_plan(grpo(), placement, parse_cluster(f"{kind}:1", 1)).plan

    told = [note.text for note in plan.notes if note.rule == "taken for granted"]
    assert (kind == "mi300x") == bool(told)
    assert all("rlflow was not run on it" in text for text in told)


def test_the_rates_of_the_mi300x_are_its_units_times_their_operations_a_cycle() -> None:
    """304 compute units at 2.1 GHz (AMD CDNA 3 white paper)."""
    cycles = 304 * 2.1e9
    kind = KINDS["mi300x"]
    assert 2048 * cycles == pytest.approx(kind.flops, rel=1e-3)
    assert 1024 * cycles == pytest.approx(kind.flops_tf32, rel=1e-3)
    assert 256 * cycles == pytest.approx(kind.flops32, rel=1e-3)
    assert kind.flops32 == kind.flops64


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs" / "placements.md").read_text(encoding="utf-8")
    for kind in KINDS.values():
        rates = (kind.flops, kind.flops_tf32, kind.flops32)
        ways = (kind.bandwidth, kind.link, kind.nic, kind.host_link)
        figures = [
            *(each / 1e12 for each in rates),
            *(each / 1e9 for each in ways),
            kind.per_host,
        ]
        memory = f"{kind.memory / 1e9:.1f}"
        row = " | ".join(
            [f"`{kind.name}`", memory, *(f"{each:g}" for each in figures), kind.source]
        )
        assert f"| {row} |" in text


def test_links_of_a_rack_join_its_trays() -> None:
    rack, two = parse_cluster("gb200:72", 1), parse_cluster("gb200:144", 1)

    assert (18, 36) == (rack.hosts, two.hosts)
    assert 17 == rack.host_of(71)
    assert 4 * 240e9 == rack.host_memory
    wide = collectives.group_of(rack, range(72))
    assert rack.kind.bus * rack.kind.reached == wide.bandwidth
    assert rack.kind.hop == wide.step
    assert collectives.copy_bandwidth(two, [0, 71]) > collectives.copy_bandwidth(two, [71, 72])
    assert two.kind.far_hop == collectives.group_of(two, [71, 72]).step


def test_a_plan_knows_the_hosts_of_an_uneven_cluster() -> None:
    cluster = parse_cluster("h100:4,a100:12", 16)
    plan = Plan(
        graph=Graph(name="none", nodes=(), models=()),
        placement="p",
        cluster=cluster.describe(),
        budgets=cluster.budgets(),
        backend="ray",
        staleness=0,
        pools={},
        hosts=cluster.hosts,
        host_starts=cluster.host_starts,
    )
    devices = range(cluster.count)
    assert [0] * 4 + [1] * 8 + [2] * 4 == [plan.host_of(device) for device in devices]
    assert [cluster.host_of(d) for d in devices] == [plan.host_of(d) for d in devices]


@pytest.mark.parametrize(
    ("devices", "end"),
    [
        ("h100:2", ", 4 threads each)"),
        ("h100:8,a100:8", " a100, 4 threads each, 2 hosts)"),
    ],
)
def test_accelerators_have_the_threads_that_are_said(devices: str, end: str) -> None:
    found, plain = parse_cluster(devices, 2, 4), parse_cluster(devices, 2)
    assert 4 == found.threads
    assert found.describe().endswith(end)
    assert 1 == plain.threads
    assert "thread" not in plain.describe()
