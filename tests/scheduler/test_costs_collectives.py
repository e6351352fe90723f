"""Collectives by hand: a ring, a tree, and hosts that are joined by network cards."""

from __future__ import annotations

import pytest

from rlflow.scheduler.devices.cluster import KINDS, Cluster, cpu_cluster, parse_cluster
from rlflow.scheduler.devices.collectives import ALONE, Group, copy_bandwidth, group_of

FOUR = Group(ranks=4, bandwidth=1e9, start=1e-5, step=1e-6)


def test_a_ring_sends_all_but_the_own_share() -> None:
    assert FOUR.all_gather(4e9) == pytest.approx(3.0 + 1e-5 + 3e-6)
    assert FOUR.reduce_scatter(4e9) == FOUR.all_gather(4e9)


def test_large_sums_go_around_a_ring_and_small_ones_over_a_tree() -> None:
    many = Group(ranks=64, bandwidth=1e9, start=1e-5, step=1e-6)

    assert FOUR.all_reduce(4e9) == pytest.approx(6.0 + 1e-5 + 6e-6, rel=1e-12)
    assert many.all_reduce(1e9) == pytest.approx(2 * 63 / 64, rel=1e-3)
    assert many.all_reduce(0) == pytest.approx(1e-5 + 2 * 6 * 1e-6)


def test_each_sends_to_each_all_but_the_own_share_and_beyond_its_host_by_its_own_card() -> None:
    cluster, kind = parse_cluster("h100:16", 1), KINDS["h100"]
    inside, across = (group_of(cluster, range(count)) for count in (8, 16))

    assert FOUR.all_to_all(4e9) == pytest.approx(3.0 + 1e-5 + 3e-6)
    link, card = kind.link * kind.reached, kind.nic * kind.reached
    assert inside.all_to_all(8e9) == pytest.approx(7e9 / link + kind.latency + 7 * kind.hop)
    waits = kind.latency + 15 * kind.far_hop
    assert across.all_to_all(16e9) == pytest.approx(8e9 / card + waits)
    assert 0.0 == ALONE.all_to_all(1e12)


def test_one_rank_sends_nothing() -> None:
    assert 0.0 == ALONE.all_gather(1e12) == ALONE.all_reduce(1e12)
    assert ALONE == group_of(cpu_cluster(2), [1])


def test_within_a_host_the_link_and_between_hosts_the_cards() -> None:
    cluster, kind = parse_cluster("h100:16", 1), KINDS["h100"]
    inside = group_of(cluster, range(8))
    across = group_of(cluster, range(16))
    thin = group_of(cluster, [0, 8])

    assert inside.bandwidth == kind.link * kind.reached
    assert across.bandwidth == 8 * kind.nic * kind.reached
    assert thin.bandwidth == kind.nic * kind.reached
    assert (kind.hop, kind.far_hop, kind.far_hop) == (inside.step, across.step, thin.step)


def test_the_slowest_kind_sets_the_pace_of_a_copy() -> None:
    mixed = Cluster(
        kind=KINDS["h100"], count=4, groups=((KINDS["h100"], 2), (KINDS["a100"], 2)), hosts=2
    )

    assert copy_bandwidth(mixed, [0, 1]) == 0.8 * KINDS["h100"].link
    assert copy_bandwidth(mixed, [2, 3]) == 0.8 * KINDS["a100"].link
    assert copy_bandwidth(mixed, [1, 2]) == 0.8 * KINDS["a100"].nic


def test_eight_h100_gather_a_7b_model_in_some_forty_milliseconds() -> None:
    """15.2 GB at 360 GB/s, 7 of 8 shares."""
    group = group_of(parse_cluster("h100:8", 1), range(8))

    assert group.all_gather(15.2e9) == pytest.approx(0.037, rel=0.01)
