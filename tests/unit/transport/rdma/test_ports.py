"""Which ports are used, with which GID, and why not the others."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv6Address

import pytest

from holdfast.errors import UnavailableError
from holdfast_services.transport.rdma.ports import (
    Gid,
    LinkLayer,
    Place,
    Port,
    choose_gid,
    memlock_shortage,
    reachable,
    usable_places,
)

LOCAL = Gid(index=0, address=IPv6Address("fe80::1"), roce_v2=True)
OLD = Gid(index=1, address=IPv6Address("::ffff:10.2.0.1"))
SIX = Gid(index=2, address=IPv6Address("2001:db8::1"), roce_v2=True)
FOUR = Gid(index=3, address=IPv6Address("::ffff:10.2.0.1"), roce_v2=True)
OTHERS = Gid(index=4, address=IPv6Address("::ffff:10.9.0.1"), roce_v2=True)
ROCE = Port(
    device="rxe0", number=1, active=True, link_layer=LinkLayer.ETHERNET, lid=0, mtu=5,
    message_bytes_max=1 << 31, reads_count_max=16, windows=True, gids=(LOCAL, OLD, SIX, FOUR),
)  # fmt: skip
INFINIBAND = replace(ROCE, device="mlx0", link_layer=LinkLayer.INFINIBAND, lid=7, gids=(LOCAL, SIX))


def ours(address):
    return address != OTHERS.address


def test_on_ethernet_the_first_ipv4_address_of_this_host_is_used():
    assert FOUR == choose_gid(replace(ROCE, gids=(LOCAL, OLD, OTHERS, SIX, FOUR)), ours)


def test_ipv6_is_used_where_there_is_no_ipv4():
    assert SIX == choose_gid(replace(ROCE, gids=(LOCAL, OLD, OTHERS, SIX)), ours)


def test_infiniband_has_its_own():
    assert LOCAL == choose_gid(INFINIBAND, ours)


@pytest.mark.parametrize(
    ("port", "why"),
    [
        (replace(ROCE, active=False), "rxe0/1 is down"),
        (replace(ROCE, windows=False), "rxe0/1 has no memory windows"),
        (replace(ROCE, gids=(LOCAL, OLD)), "rxe0/1 has no GID of RoCE v2 with an address of this"),
        (replace(ROCE, gids=(OTHERS,)), "rxe0/1 has no GID of RoCE v2 with an address of this"),
        (replace(ROCE, link_layer=7), "rxe0/1 is neither InfiniBand nor Ethernet"),
        (replace(INFINIBAND, lid=0), "mlx0/1 has no LID: is a subnet manager running?"),
    ],
)
def test_a_port_that_is_not_used_says_why(port, why):
    with pytest.raises(UnavailableError, match=why.replace("?", r"\?")):
        usable_places([port], (), ours)


def test_all_ports_that_can_be_are_used_and_of_named_devices_only():
    ports = [ROCE, INFINIBAND, replace(ROCE, device="rxe1", active=False)]

    assert ["rxe0/1 (10.2.0.1)", "mlx0/1 (fe80::1)"] == [
        str(place) for place in usable_places(ports, (), ours)
    ]
    assert [Place(port=INFINIBAND, gid=LOCAL)] == usable_places(ports, ("mlx0",), ours)


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(UnavailableError, match="no device mlx5_9 to open; rxe0/1 is down"):
        usable_places([replace(ROCE, active=False)], ("rxe0", "mlx5_9"), ours)


@pytest.mark.parametrize(
    ("port", "gid", "link_layer", "peer", "there"),
    [
        (ROCE, FOUR, LinkLayer.ETHERNET, OTHERS.address, True),
        (ROCE, FOUR, LinkLayer.INFINIBAND, OTHERS.address, False),
        (INFINIBAND, LOCAL, LinkLayer.INFINIBAND, IPv6Address("fe80::2"), True),
        (INFINIBAND, LOCAL, LinkLayer.INFINIBAND, IPv6Address("fec0::2"), False),
    ],
    ids=["Ethernet", "other link layer", "same subnet", "other subnet"],
)
def test_peers_are_reachable_on_the_same_fabric(port, gid, link_layer, peer, there):
    assert there is reachable(Place(port=port, gid=gid), link_layer, peer)


@pytest.mark.parametrize(
    ("limit", "needed", "why"),
    [
        (None, 1 << 40, ""),
        (2 << 30, 1 << 30, ""),
        ((2 << 30) - 1, 1 << 30, "memlock limit 2097151 KiB is less than the budget at each port"),
        (8 << 20, 1 << 30, "memlock limit 8192 KiB is less than the budget at each port, 2 x 1048"),
    ],
)
def test_a_low_memlock_limit_says_the_cure(limit, needed, why):
    """The kernel counts what is registered at each port anew."""
    said = memlock_shortage(limit, needed, 2)

    assert said.startswith(why)
    assert bool(why) is bool(said)
