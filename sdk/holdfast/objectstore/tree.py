"""One folder and what lies in it by key: opened step by step, so that no link leads out of it.

Knows nothing of uploads and stores. Every name that reaches here was checked by ``rules``; still
each step is opened with ``O_NOFOLLOW`` below the one before (P9). Folders are made 0700.
Units: bytes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from holdfast.errors import (
    AccessError,
    AlreadyExistsError,
    CheckpointError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
)

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
TRIES_MAX = 100

T = TypeVar("T")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP})


class Tree:
    """The folder ``root`` of a store; ``root`` itself may be a link, nothing below it is one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held: int | None = None

    def hold(self) -> int:
        """Keep to the folder that is at ``root`` now until ``let_go``; return its descriptor.

        Raises:
            NotFoundError: there is none.
        """
        if self._held is None:
            self._held = self._open_root()
        return self._held

    def let_go(self) -> None:
        """Go by name again; idempotent."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    @contextmanager
    def errors(self, key: str) -> Iterator[None]:
        """Raise errors of the system as Holdfast errors that name the folder."""
        try:
            yield
        except OSError as error:
            raise self._error(error, key) from error

    def _error(self, error: OSError, key: str) -> CheckpointError:
        reason = f"{error.strerror or error} in {self.root}"
        if error.errno in _FULL:
            return ExhaustedError(f"no space: {reason}", key=key)
        if error.errno in _DENIED:
            return AccessError(reason, key=key)
        if error.errno == errno.ENAMETOOLONG:
            return InvalidRequestError(reason, key=key)
        if error.errno in (errno.ENOTDIR, errno.EISDIR):
            return PreconditionError(f"an object and a folder of one name: {reason}", key=key)
        if error.errno == errno.ENOENT:
            return NotFoundError(f"no such object: {reason}", key=key)
        return UnavailableError(reason, key=key)

    @contextmanager
    def opened(self, folder: str = "", *, make: bool = False) -> Iterator[int]:
        """Yield a descriptor of ``folder`` below the root; it is closed afterwards.

        Raises:
            FileNotFoundError, NotADirectoryError: it is not there, and ``make`` is not set.
            NotFoundError: the root itself is missing.
        """
        at = again(lambda: self._descend(folder, make=True)) if make else self._descend(folder)
        try:
            yield at
        finally:
            os.close(at)

    def _open_root(self) -> int:
        if self._held is not None:
            return os.dup(self._held)
        try:
            return os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFoundError(f"the store's folder {self.root} is missing") from error
        except NotADirectoryError as error:
            raise NotFoundError(f"{self.root} is a file, or below one, and no folder") from error

    def _descend(self, folder: str, *, make: bool = False) -> int:
        at = self._open_root()
        for name in filter(None, folder.split("/")):
            try:
                below = _step(at, name, make=make)
            finally:
                os.close(at)
            at = below
        return at

    @contextmanager
    def file(self, key: str) -> Iterator[int]:
        """Yield a descriptor to read the object ``key`` from; it is closed afterwards.

        Raises:
            NotFoundError: there is none, or something that is no file.
        """
        folder, _, last = key.rpartition("/")
        with self.errors(key):
            try:
                with self.opened(folder) as at:
                    fd = os.open(last, READ, dir_fd=at)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise NotFoundError(f"no object {key!r} in {self.root}", key=key) from error
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise NotFoundError(f"no object {key!r} in {self.root}", key=key)
                yield fd
            finally:
                os.close(fd)

    def place(self, work: int, name: str, key: str, *, if_absent: bool = False) -> None:
        """Make the file ``name`` of the folder ``work`` the object ``key``, whole, on disk.

        Raises:
            AlreadyExistsError: ``if_absent`` and the key is taken; ``name`` stays.
            OSError: anything else that goes wrong; nothing has changed.
        """
        folder, _, last = key.rpartition("/")

        def attempt() -> None:
            with self.opened(folder, make=True) as at:
                try:
                    put = os.link if if_absent else os.rename
                    put(name, last, src_dir_fd=work, dst_dir_fd=at)
                except FileExistsError as error:
                    raise AlreadyExistsError(f"there is an object {key!r}", key=key) from error
                os.fsync(at)

        again(attempt)

    def names(self, folder: str) -> list[tuple[str, bool]]:
        """Return what lies in ``folder``, by key: (name, whether it is a folder).

        Neither links nor anything else that is no file; empty if there is no such folder.
        """
        try:
            with self.opened(folder) as at, os.scandir(at) as entries:
                found = [
                    (entry.name, entry.is_dir(follow_symlinks=False))
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(found, key=lambda one: f"{one[0]}/" if one[1] else one[0])

    def prune(self, folder: str) -> None:
        """Remove ``folder`` and the folders above it as far as they are empty."""
        while folder:
            above, _, name = folder.rpartition("/")
            try:
                with self.opened(above) as at:
                    os.rmdir(name, dir_fd=at)
            except (OSError, NotFoundError):
                return
            folder = above


def again(action: Callable[[], T]) -> T:
    """Return what ``action`` returns; it is repeated while folders vanish under it.

    Another process removes a folder that has become empty, perhaps the one just made or opened.
    """
    for _ in range(TRIES_MAX - 1):
        with suppress(FileNotFoundError):
            return action()
    return action()


def _step(at: int, name: str, *, make: bool) -> int:
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=at)
            os.fsync(at)
    return os.open(name, FOLDER, dir_fd=at)


def write_all(fd: int, data: memoryview, begin: int = 0) -> None:
    """Write all of ``data`` at ``begin``, straight from its memory."""
    while data.nbytes:
        count = os.pwrite(fd, data, begin)
        data, begin = data[count:], begin + count


def read_all(fd: int, view: memoryview, begin: int) -> int:
    """Fill ``view`` from ``begin`` on; return how many bytes there were."""
    count = 0
    while count < view.nbytes:
        got = os.preadv(fd, [view[count:]], begin + count)
        if got == 0:
            break
        count += got
    return count
