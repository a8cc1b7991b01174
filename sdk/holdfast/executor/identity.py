"""Which executor this is: one at a time for each folder, and the same one after a restart.

So one that is started again after it was killed need not wait until its own lease has run out.
"""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast import locks
from holdfast.errors import AccessError, AlreadyExistsError

SEQUENCES_PER_LIFE = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A name, and the number from which on this life's reports are numbered."""

    executor: str
    first_sequence: int


def take(folder: Path) -> Identity:
    """Return who this is, and hold the folder until this process ends.

    Raises:
        AlreadyExistsError: another executor has the folder.
        AccessError: it is somebody else's.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise AccessError(f"{folder} belongs to another user")
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(folder / "executor.lock", flags, 0o600)
    if not locks.take(lock):
        raise AlreadyExistsError(
            f"another executor runs in {folder}: pid {locks.holder_of(folder / 'executor.lock')}"
        )
    path = folder / "identity.json"
    before: dict[str, object] = {}
    with suppress(OSError, ValueError):
        before = dict(json.loads(path.read_text(encoding="utf-8")))
    name, life = str(before.get("executor", "")), before.get("life", 0)
    known = len(name) == 32 and isinstance(life, int)
    lives = life + 1 if known and isinstance(life, int) else 1
    record = {"executor": name if known else secrets.token_hex(16), "life": lives}
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(record), encoding="utf-8")
    draft.replace(path)
    return Identity(executor=str(record["executor"]), first_sequence=lives * SEQUENCES_PER_LIFE)
