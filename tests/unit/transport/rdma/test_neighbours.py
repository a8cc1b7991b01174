"""The way to a peer is known, or refused, before verbs would wait for it."""

from __future__ import annotations

from ipaddress import IPv6Address

import pytest

from holdfast.errors import UnavailableError
from holdfast_services.transport.rdma.neighbours import find, is_known

HERE = IPv6Address("::ffff:127.0.0.1")
TABLE = """IP address       HW type     Flags       HW address            Mask     Device
10.2.0.2         0x1         0x2         5e:59:f0:8b:e0:7a     *        cable0
10.2.0.77        0x1         0x0         00:00:00:00:00:00     *        cable0
torn
"""


def test_who_refuses_is_there():
    find(HERE, HERE)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (HERE, IPv6Address("::ffff:192.0.2.1")),
        (IPv6Address("::ffff:192.0.2.7"), HERE),
        (HERE, IPv6Address("::ffff:255.255.255.255")),
    ],
    ids=["not from there", "not our address", "everybody"],
)
def test_where_no_way_leads_is_unavailable(ours, theirs):
    with pytest.raises(UnavailableError, match="no way from "):
        find(ours, theirs)


@pytest.mark.parametrize(
    ("address", "known"), [("10.2.0.2", True), ("10.2.0.77", False), ("10.2.0.3", False)]
)
def test_an_address_is_known_when_its_row_is_complete(address, known):
    assert known is is_known(TABLE, address)
