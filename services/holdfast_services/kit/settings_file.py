"""A file of settings, TOML: tables for services, and above them keys that several of them share.

What is read is text, as in the environment: the same rules hold for both. Knows no setting but the
shared ones, and no service but by name.
"""

from __future__ import annotations

import difflib
import stat
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.records import INT_MAX
from holdfast.core.text import holds_nul
from holdfast.errors import InvalidRequestError

SERVICES = ("metadata", "agent", "persistence", "scheduler", "operator")
SHARED = (
    "address",
    "database_url",
    "insecure",
    "log",
    "log_format",
    "queue",
    "rest_names",
    "store",
    "tls",
)
"""Keys of more than one service which may well be the same for all."""
FILE_BYTES_MAX = 1 << 20
MISPLACED = "put it under"


@dataclass(frozen=True, slots=True)
class Entry:
    """A value as text, and where it is: the file, the table, the key."""

    text: str
    label: str


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """What a file says: ``top`` above all tables, ``tables`` by service."""

    path: Path
    top: dict[str, Any]
    tables: dict[str, dict[str, Any]]

    def find(self, service: str, key: str) -> Entry | None:
        """Return what a service is told; None: nothing, or an empty text.

        Raises:
            InvalidRequestError: it is a value of a kind that no setting has. It is not told which:
                it may be an address with its password.
        """
        table = self.tables.get(service, {})
        if key in table:
            return self._entry(f"[{service}] {key}", table[key])
        if key in SHARED and key in self.top:
            return self._entry(key, self.top[key])
        return None

    def unknown(self, service: str, known: Collection[str]) -> dict[str, str]:
        """Return keys that there are not, each with what may have been meant.

        Of tables only that of ``service``, which knows ``known``, is looked at.
        """
        above = {key: _instead(key, service, known) for key in self.top if key not in SHARED}
        tables = {f"[{name}]": _nearest(name, SERVICES) for name in self.tables.keys() - SERVICES}
        own = self.tables.get(service, {})
        below = {f"[{service}] {key}": _nearest(key, known) for key in own if key not in known}
        return above | tables | below

    def refusal(self, where: str, hint: str) -> str:
        """Return what is said of a key that there is not."""
        return f"{self.path}: {where} is no setting, {hint}"

    def _entry(self, where: str, value: object) -> Entry | None:
        label = f"{self.path}: {where}"
        found = _text(value)
        if found is None:
            raise InvalidRequestError(
                f"{label} is {_kind(value)}, and not a text, a number, or a list or table of these"
            )
        return Entry(found, label) if found else None


def read_file(path: Path, named_by: str) -> SettingsFile:
    """Return what is in a file.

    Raises:
        InvalidRequestError: it cannot be read, or is no TOML; says where in it.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidRequestError(f"{named_by}={path} is no file that can be read twice")
        with path.open("rb") as opened:
            data = opened.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise InvalidRequestError(f"{named_by}={path} is longer than {FILE_BYTES_MAX} bytes")
        parsed = tomllib.loads(data.decode("utf-8-sig"))
    except OSError as cause:
        raise InvalidRequestError(
            f"{named_by}={path} cannot be read: {cause.strerror or cause}"
        ) from cause
    except (ValueError, RecursionError) as cause:  # of TOML, or of UTF-8
        raise InvalidRequestError(f"{named_by}={path} is no TOML: {cause}") from cause
    tables = {key: value for key, value in parsed.items() if isinstance(value, dict)}
    top = {key: value for key, value in parsed.items() if key not in tables}
    return SettingsFile(path, top, tables)


def _text(value: object) -> str | None:
    r"""Return a value as the environment would have it; None: it cannot, or no setting is such.

    >>> _text(7), _text(0.5), _text(["m0", "m1"]), _text({"ada": 8}), _text([[1]])
    ('7', '0.5', 'm0,m1', 'ada=8', None)
    >>> _text(True), _text("\0"), _text(1 << 63)
    (None, None, None)
    """
    match value:
        case bool():
            return None  # 1 and 0 would be a port, a size, or a name
        case int() if not -INT_MAX <= value <= INT_MAX:
            return None
        case str() if holds_nul(value):
            return None
        case str() | int() | float():
            return str(value)
        case list():
            parts = [_text(each) if not isinstance(each, list | dict) else None for each in value]
        case dict():
            of = {key: None if isinstance(v, list | dict) else _text(v) for key, v in value.items()}
            parts = [None if each is None else f"{key}={each}" for key, each in of.items()]
        case _:
            return None
    return None if None in parts else ",".join(map(str, parts))


def _kind(value: object) -> str:
    """Return what a value is for people, without what it says."""
    match value:
        case bool():
            return str(value).lower()
        case list() | dict():
            return "a list or table with something else in it"
        case str():
            return "a text with NUL"
        case int():
            return "a number of more than 64 bits"
        case _:
            return f"a {type(value).__name__}"


def _instead(key: str, service: str, known: Collection[str]) -> str:
    if key in known:
        return f"{MISPLACED} [{service}]"
    return _nearest(key, (*SHARED, *known))


def _nearest(key: str, known: Collection[str]) -> str:
    """Return a hint at what may have been meant."""
    found = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)
    return f"the nearest is {found[0]}" if found else "there is none"
