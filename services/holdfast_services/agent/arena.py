"""The arena: slot files on a tmpfs, their descriptors, locks, sidecars. Owns every file there.

One descriptor and one mapping per slot from creation on: POSIX record locks vanish when a
process closes *any* descriptor of the file, so no slot is ever opened twice here. All names go
through ``core.slot_names`` or ``core.ids`` and are opened relative to the folder's descriptor with
``O_NOFOLLOW`` (P9). Knows nothing of sessions' meaning, of the network, of the catalogue.

Files are allocated with ``posix_fallocate`` before they are mapped: a full file system is an
ExhaustedError here and never a SIGBUS later. Nobody truncates a slot. Units: bytes, seconds.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from holdfast import locks
from holdfast.core.byte_sizes import format_bytes
from holdfast.core.ids import session_id
from holdfast.core.needs import ByteRange
from holdfast.core.slot_names import SlotName, SlotState, slot_name
from holdfast.errors import (
    AccessError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from holdfast.pages import populate

SESSIONS = "sessions"
SIDECAR_BYTES_MAX = 64 << 20
SESSION_ORPHAN_S = 60.0
LOCK_POLL_S = 0.005

_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_TEMPORARY = ".tmp"
_NOT_OURS = (FileNotFoundError, IsADirectoryError)
_DIGESTS = "the digests of a segment"


class SlotFile:
    """One slot's descriptor and mapping; both live as long as something refers to them."""

    def __init__(self, fd: int, length_bytes: int) -> None:
        self.fd = fd
        self.length_bytes = length_bytes
        self.map = mmap.mmap(fd, length_bytes)

    @property
    def view(self) -> memoryview:
        """The bytes of the file; a view keeps the mapping alive after the slot was dropped."""
        return memoryview(self.map)

    def lock(self) -> bool:
        """Take the record lock without waiting; False when another process holds it."""
        return locks.take(self.fd)

    def lock_within(self, timeout_s: float) -> bool:
        """Take the record lock of a process that is about to let go; False: it does not. Blocks."""
        deadline_s = time.monotonic() + timeout_s
        while not (taken := self.lock()) and time.monotonic() < deadline_s:
            time.sleep(LOCK_POLL_S)
        return taken

    def unlock(self) -> None:
        """Give the record lock back."""
        locks.release(self.fd)


class Arena:
    """The arena's folder and all slots in it; safe to call from several threads.

    Args:
        folder: On a tmpfs; made if missing, set to mode 0700.
        budget_bytes: Most that slot files may take together; the caller keeps to it.

    Raises:
        ExhaustedError: the file system is smaller than the budget.
        AccessError: the folder is a link, belongs to another user, or cannot be made.
        PreconditionError: another process serves it; also one that is stopped and may go on.
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self._dir_fd = _open_folder(folder)
        self._claim()
        self._sessions_fd = _open_folder(folder / SESSIONS)
        self._files: dict[str, SlotFile] = {}
        self._guard = threading.Lock()
        self._check_size()

    def _claim(self) -> None:
        """Hold the folder until this process ends: of two agents each would free the other's."""
        try:
            fcntl.flock(self._dir_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            os.close(self._dir_fd)
            raise PreconditionError(
                f"another agent serves {self.folder}: stop it first, or set HOLDFAST_ARENA to a "
                f"folder of this one's own"
            ) from cause

    def _check_size(self) -> None:
        statistics = os.fstatvfs(self._dir_fd)
        size_bytes = statistics.f_blocks * statistics.f_frsize
        if size_bytes < self.budget_bytes:
            raise ExhaustedError(
                f"the file system of {self.folder} has {format_bytes(size_bytes)}, less than the "
                f"budget of {format_bytes(self.budget_bytes)}; lower HOLDFAST_BUDGET or enlarge "
                f"it (docker: --shm-size, compose: shm_size)"
            )

    def adopt(self) -> list[tuple[SlotName, int]]:
        """Open every slot of the folder; return names and lengths, in order of name.

        Leftovers of interrupted writes are removed, and partial slots. What is not a regular file
        under a slot's name is left alone and not opened.
        """
        found: list[tuple[SlotName, int]] = []
        for entry in sorted(_entries(self._dir_fd)):
            if entry.endswith(_TEMPORARY):
                self._unlink(entry)
                continue
            try:
                name = slot_name(entry)
                if name.state is SlotState.PARTIAL:
                    self._unlink(entry)
                    continue
                fd = os.open(entry, _OPEN, dir_fd=self._dir_fd)
            except (InvalidRequestError, OSError):
                continue
            info = os.fstat(fd)
            ours = stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid()
            if not ours or info.st_size == 0 or name.slot in self._files:
                os.close(fd)
                continue
            try:
                os.posix_fallocate(fd, 0, info.st_size)
            except OSError:  # sparse, on a full file system: a read could be a SIGBUS
                os.close(fd)
                continue
            self._files[name.slot] = SlotFile(fd, info.st_size)
            found.append((name, info.st_size))
        return found

    def create(self, name: SlotName, length_bytes: int) -> None:
        """Make a slot's file, allocated and pre-faulted. Takes 0.1-1 s per GiB.

        Raises:
            ExhaustedError: the file system is full; nothing is left behind.
        """
        temporary = f"{name.file_name}{_TEMPORARY}"
        flags = _OPEN | os.O_CREAT | os.O_EXCL
        fd = os.open(temporary, flags, 0o600, dir_fd=self._dir_fd)
        try:
            os.posix_fallocate(fd, 0, length_bytes)
            file = SlotFile(fd, length_bytes)
            populate(file.map)
        except OSError as cause:
            os.close(fd)
            self._unlink(temporary)
            raise self._full(f"a slot of {format_bytes(length_bytes)}", cause) from cause
        with self._guard:
            os.rename(temporary, name.file_name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
            self._files[name.slot] = file

    def create_partial(
        self, name: SlotName, length_bytes: int, ranges: Iterable[ByteRange]
    ) -> None:
        """Make the file of a partial slot: as long as its segment, allocated where it will be.

        Raises:
            ExhaustedError: the file system is full; nothing is left behind.
        """
        flags = _OPEN | os.O_CREAT | os.O_EXCL
        fd = os.open(name.file_name, flags, 0o600, dir_fd=self._dir_fd)
        try:
            os.ftruncate(fd, length_bytes)
            for part in ranges:
                os.posix_fallocate(fd, part.begin, part.end - part.begin)
            file = SlotFile(fd, length_bytes)
        except OSError as cause:
            os.close(fd)
            self._unlink(name.file_name)
            raise self._full(f"parts of {format_bytes(length_bytes)}", cause) from cause
        with self._guard:
            self._files[name.slot] = file

    def check_room(self, length_bytes: int) -> None:
        """Refuse what the file system would refuse too, before the work that leads there.

        Raises:
            ExhaustedError: fewer than ``length_bytes`` are free.
        """
        if self.free_bytes < length_bytes:
            raise self._full(_DIGESTS, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    @property
    def free_bytes(self) -> int:
        """What is free in the file system of the arena."""
        statistics = os.fstatvfs(self._dir_fd)
        return statistics.f_bavail * statistics.f_frsize

    def _full(self, what: str, cause: OSError) -> ExhaustedError:
        statistics = os.fstatvfs(self._dir_fd)
        return ExhaustedError(
            f"no room for {what} in {self.folder}: "
            f"{format_bytes(self.free_bytes)} of "
            f"{format_bytes(statistics.f_blocks * statistics.f_frsize)} free, budget "
            f"{format_bytes(self.budget_bytes)} ({cause.strerror}); remove what else fills it, or "
            f"enlarge it"
        )

    def drop(self, name: SlotName) -> bool:
        """Unlink a slot; mappings that others hold stay valid. False: it has another name now."""
        with self._guard:
            try:
                os.unlink(name.file_name, dir_fd=self._dir_fd)
            except FileNotFoundError:
                return False
            self._unlink(name.sidecar_name)
            file = self._files.pop(name.slot, None)
        if file is not None:
            os.close(file.fd)
        return True

    def rename(self, old: SlotName, new: SlotName) -> bool:
        """Move a slot to another state; False when it is no longer called ``old``.

        A slot that leaves SEALED loses its sidecar first.
        """
        if new.sidecar_name != old.sidecar_name or new.state.value == "free":
            self._unlink(old.sidecar_name)
        try:
            os.rename(
                old.file_name, new.file_name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd
            )
        except FileNotFoundError:
            return False
        return True

    def names(self) -> dict[str, SlotName]:
        """Return the file name of each slot, as the folder shows it now."""
        found: dict[str, SlotName] = {}
        for entry in _entries(self._dir_fd):
            with suppress(InvalidRequestError):
                name = slot_name(entry)
                found[name.slot] = name
        return found

    def file(self, slot: str) -> SlotFile:
        """Return the open file of ``slot``.

        Raises:
            NotFoundError: there is no such slot.
        """
        file = self._files.get(slot)
        if file is None:
            raise NotFoundError(f"no slot {slot[:20]!r} in the arena")
        return file

    def write_sidecar(self, name: SlotName, data: bytes) -> None:
        """Put the digests beside a slot, by rename: whole or not at all."""
        temporary = f"{name.sidecar_name}{_TEMPORARY}"
        flags = _OPEN | os.O_CREAT | os.O_TRUNC
        try:
            fd = os.open(temporary, flags, 0o600, dir_fd=self._dir_fd)
            with os.fdopen(fd, "wb") as stream:
                stream.write(data)
            os.rename(
                temporary, name.sidecar_name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd
            )
        except OSError as cause:
            self._unlink(temporary)
            raise self._full(_DIGESTS, cause) from cause

    def read_sidecar(self, name: SlotName) -> bytes | None:
        """Return the digests of a slot, or None when there are none that can be read."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name.sidecar_name, flags, dir_fd=self._dir_fd)
            with os.fdopen(fd, "rb") as stream:
                return stream.read(SIDECAR_BYTES_MAX)
        except OSError:
            return None

    def session_alive(self, session: str) -> bool:
        """Tell whether a process holds the session's lock; does not take it."""
        return self.session_holder(session) is not None

    def session_holder(self, session: str) -> int | None:
        """Return the pid of the process that holds the session's lock, see ``locks.holder``."""
        try:
            fd = os.open(session_id(session), _OPEN, dir_fd=self._sessions_fd)
        except OSError:
            return None
        try:
            return locks.holder(fd)
        finally:
            os.close(fd)

    def forget_session(self, session: str) -> None:
        """Remove the lock file of a session that has ended."""
        with suppress(*_NOT_OURS):
            os.unlink(session_id(session), dir_fd=self._sessions_fd)

    def sweep_sessions(self) -> None:
        """Remove lock files that no process holds, except those made just now."""
        for entry in _entries(self._sessions_fd):
            with suppress(InvalidRequestError, FileNotFoundError):
                info = os.stat(session_id(entry), dir_fd=self._sessions_fd, follow_symlinks=False)
                old = time.time() - info.st_mtime > SESSION_ORPHAN_S
                if old and not self.session_alive(entry):
                    self.forget_session(entry)

    def close(self) -> None:
        """Let go of all descriptors; the files stay for the next agent."""
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()
        os.close(self._dir_fd)
        os.close(self._sessions_fd)

    def _unlink(self, entry: str) -> None:
        with suppress(*_NOT_OURS):
            os.unlink(entry, dir_fd=self._dir_fd)


def _open_folder(folder: Path) -> int:
    """Make ``folder`` if needed and return its descriptor; refuse links and others' folders."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as cause:
        raise AccessError(f"cannot use {folder} as a folder: {cause.strerror}") from cause
    if os.fstat(fd).st_uid != os.getuid():
        os.close(fd)
        raise AccessError(f"folder {folder} belongs to another user")
    os.fchmod(fd, 0o700)
    return fd


def _entries(folder_fd: int) -> list[str]:
    """The names in a folder, by descriptor: a folder swapped for another is not followed."""
    return os.listdir(folder_fd)
