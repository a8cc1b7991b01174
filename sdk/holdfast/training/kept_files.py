"""Files for people to look at: whole under their name, or under one that says who writes them.

Nothing here waits but for the folder; one that hangs, hangs the caller. Who writes a file holds a
lock on it meanwhile, which the kernel lets go when the process ends: so what a dead one has left
is told from what a living one writes. Names are not enough for that: containers share pids.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_BEGUN = re.compile(r"step-\d+-attempt-(\d+)-rank-\d+\.(.+)\.part", re.ASCII)


@dataclass(frozen=True, slots=True)
class KeptFile:
    """What one rank of an attempt writes of one step into ``folder``."""

    folder: Path
    step: int
    attempt: int
    rank: int

    @property
    def path(self) -> Path:
        """The file, once it is whole."""
        return self.folder / f"{self._stem}.safetensors"

    @property
    def begun(self) -> Path:
        """The file until then: another one for each machine, as locks may be of one alone."""
        return self.folder / f"{self._stem}.{socket.gethostname()}.part"

    @property
    def _stem(self) -> str:
        return f"step-{self.step}-attempt-{self.attempt}-rank-{self.rank}"

    def write(self, pieces: Iterable[bytes]) -> None:
        """Write all ``pieces``, one after the other.

        Raises:
            OSError, ValueError: it is not kept; what was begun is deleted, if that can be. So it is
                with what ``pieces`` raises.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.begun, flags, 0o666)
        try:
            _hold(descriptor)
            for piece in pieces:
                _write_all(descriptor, memoryview(piece))
            os.close(os.dup(descriptor))  # one of NFS may tell only now that it has no room
            self._name()
        except BaseException:
            with suppress(OSError):
                self.begun.unlink()
            raise
        finally:
            os.close(descriptor)

    def _name(self) -> None:
        if os.path.lexists(self.path):
            raise FileExistsError(f"{self.path} is there already")
        self.begun.rename(self.path)


def delete_left(folder: Path, *, attempt: int) -> None:
    """Delete what dead processes of this machine have begun in other attempts, and not ended.

    Of its own attempt nothing: other ranks may just have begun. What is no plain file, or whose
    lock cannot be had, stays.
    """
    for path in folder.glob("*.part"):
        named = _BEGUN.fullmatch(path.name)
        if named and int(named[1]) != attempt and named[2] == socket.gethostname():
            with suppress(OSError):
                _delete_if_left(path)


def _delete_if_left(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    finally:
        os.close(descriptor)


def _hold(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise  # somebody takes it for left, and deletes it
    except OSError:
        return  # no locks in this folder: nobody can take it for left


def _write_all(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]
