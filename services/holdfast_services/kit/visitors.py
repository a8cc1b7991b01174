"""Who may ask over REST: not a page of another site, in the browser of somebody who may.

A browser inside the trusted network, or with a person's certificate, would do whatever any page
tells it: by a plain form of another site (its ``Origin`` gives it away), or by a name that is
made to point here (DNS rebinding: ``Host`` is a name that is not ours). Programs that are no
browsers send no ``Origin``. Pure; knows nothing of the framework.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit


def refusal(*, host: str, origin: str | None, reached: str, names: Collection[str]) -> str:
    """Return why a request is not answered; empty: it is.

    An address in place of a name cannot be made to point elsewhere, so it is always taken.

    Args:
        host: The header ``Host``; empty where there is none, which no browser does.
        origin: The header ``Origin``, None where there is none.
        reached: The address of ours that the request came to.
        names: What we are called besides ``localhost`` and this machine's name.
    """
    name = _name(host)
    ours = name in names or name in ("", "localhost", socket.gethostname().lower())
    if (origin is not None or _loopback(reached)) and not ours and _address(name) is None:
        return f"Host {name[:80]!r} is no name of this service: see HOLDFAST_REST_NAMES"
    if origin is None:
        return ""
    page = _authority(origin)
    if page and (page == host.lower() or _name(page) in names):
        return ""
    return f"a page of {origin[:80]!r} may not ask this service: see HOLDFAST_REST_NAMES"


def read_names(environ: Mapping[str, str], name: str) -> frozenset[str]:
    """Read the names of ``HOLDFAST_REST_NAMES``."""
    said = environ.get(name, "").split(",")
    return frozenset(each.strip().lower() for each in said if each.strip())


def _authority(origin: str) -> str:
    """Return ``host:port`` of an origin; empty for ``null`` and what is malformed."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _name(authority: str) -> str:
    """Return ``authority`` without its port, in lower case."""
    bracketed, closing, _ = authority.partition("]")
    return (bracketed[1:] if closing else authority.partition(":")[0]).lower()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _loopback(reached: str) -> bool:
    address = _address(reached)
    mapped = getattr(address, "ipv4_mapped", None)
    return address is not None and (mapped or address).is_loopback
