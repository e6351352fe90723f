"""The order of places: by number, never by how a number is spelled."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.runtime.ray.places import address_key, device_key


def test_addresses_sort_by_number_and_not_as_text():
    shuffled = ["10.0.0.10", "node-b", "::2", "10.0.0.9", "node-a", "::1", "9.255.0.1"]

    found = sorted(shuffled, key=address_key)

    assert ["9.255.0.1", "10.0.0.9", "10.0.0.10", "::1", "::2", "node-a", "node-b"] == found


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_ipv4_sorts_as_its_number(left, right):
    texts = [str(ipaddress.IPv4Address(number)) for number in (left, right)]

    assert (left < right) == (address_key(texts[0]) < address_key(texts[1]))


@given(st.integers(0, 2**128 - 1))
def test_ipv6_is_the_same_however_it_is_written(number):
    address = ipaddress.IPv6Address(number)

    assert address_key(address.compressed) == address_key(address.exploded)


def test_an_ipv4_address_in_ipv6_is_the_ipv4_address():
    assert address_key("10.1.2.3") == address_key("::ffff:10.1.2.3")


@pytest.mark.parametrize(
    ("first", "second"),
    [("", "0"), ("2", "10"), ("0,1", "0,2"), ("9", "GPU-1a"), ("1", "1,0"), ("GPU-1a", "GPU-1b")],
)
def test_devices_sort_by_number_and_names_come_after(first, second):
    assert device_key(first) < device_key(second)
