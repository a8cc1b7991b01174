"""``/metrics`` at an address of its own: it is there, or whoever asked for it is told why not."""

from __future__ import annotations

import pytest

from holdfast.errors import UnavailableError
from holdfast_services.kit.metrics_server import MetricsServer


def nothing():
    return []


async def test_of_two_that_bind_one_port_at_once_the_second_is_told_as_it_begins():
    """Both may bind it as long as neither listens: two agents of a node that start together."""
    first = MetricsServer("127.0.0.1:0", "first", ())
    address = first.url.removeprefix("http://")
    second = MetricsServer(address, "second", ())
    await first.begin(nothing)

    with pytest.raises(UnavailableError, match=f"cannot listen on http://{address}: Address alr"):
        await second.begin(nothing)

    await second.end()
    await first.end()


@pytest.mark.parametrize("host", [f"{64 * 'a'}", "a..b", "no.such.name.invalid"])
def test_a_host_that_cannot_be_is_named(host):
    with pytest.raises(UnavailableError, match=f"cannot listen on {host}:0"):
        MetricsServer(f"{host}:0", "service", ())
