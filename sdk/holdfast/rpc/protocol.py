"""The protocol number that travels with every call (F94).

A caller sends the one it speaks; a server refuses what it does not understand with
UnsupportedFormatError, which says on which side to upgrade.
"""

from __future__ import annotations

from holdfast.errors import UnsupportedFormatError

HEADER = "holdfast-protocol"
PROTOCOL = 3
"""3: a source of a shard is a message with a kind, and a peer has endpoints with a kind each."""
PROTOCOL_MIN = 3

_DIGITS_MAX = 9


def check(spoken: str | None) -> None:
    """Refuse a caller whose protocol number is not one this side understands.

    Raises:
        UnsupportedFormatError: no number, or one outside ``PROTOCOL_MIN..PROTOCOL``.
    """
    if spoken is None or not (spoken.isascii() and spoken.isdigit() and len(spoken) <= _DIGITS_MAX):
        raise UnsupportedFormatError("caller names no protocol: not a Holdfast client")
    number = int(spoken)
    if number < PROTOCOL_MIN:
        raise UnsupportedFormatError(
            f"caller speaks protocol {number}, this side {_spoken()}: upgrade the caller"
        )
    if number > PROTOCOL:
        raise UnsupportedFormatError(
            f"caller speaks protocol {number}, this side {_spoken()}: upgrade this service"
        )


def _spoken() -> str:
    only = PROTOCOL_MIN == PROTOCOL
    return str(PROTOCOL) if only else f"{PROTOCOL_MIN} to {PROTOCOL}"
