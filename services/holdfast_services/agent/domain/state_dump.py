"""The agent's whole state as plain JSON values, for people. Pure."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum

from holdfast.core.sources import Source
from holdfast_services.agent.domain.state import State


def dump(state: State) -> dict[str, object]:
    """Return the whole state as plain JSON values, for people (F46)."""
    return {
        "me": _plain(state.me),
        "budget_bytes": state.budget_bytes,
        "used_bytes": state.used_bytes,
        "metadata_lost": state.lost,
        "slots": {name: _plain(slot) for name, slot in sorted(state.slots.items())},
        "sessions": {name: _plain(session) for name, session in sorted(state.sessions.items())},
        "view": _plain(state.view),
        "holds": [_plain(hold) for hold in state.holds.values()],
        "fetches": {key.key: _plain(value) for key, value in state.fetches.items()},
        "asks": {f"{k[0].key} -> {k[1]}": _plain(value) for k, value in state.asks.items()},
        "makes": {key: _plain(value) for key, value in state.makes.items()},
        "bad_sources": [_plain(bad) for bad in state.bad_sources],
    }


def _plain(value: object) -> object:
    if isinstance(value, Source):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        named = ((item.name, getattr(value, item.name)) for item in fields(value))  # type: ignore[arg-type]
        return {name: _plain(item) for name, item in named}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()[:64]
    return value.value if isinstance(value, Enum) else value
