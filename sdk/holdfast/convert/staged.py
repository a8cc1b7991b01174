"""Files and folders that appear whole: written under another name beside, renamed at the end.

What is replaced is there until the new one is: a file by rename, a folder by exchanging the two.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import AccessError, AlreadyExistsError, ExhaustedError, UnavailableError
from holdfast.objectstore.folders import exchange

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def staged(dest: Path, *, force: bool) -> Iterator[Path]:
    """Yield the path to write a file or folder at; ``dest`` is there once the block has ended.

    A failure removes what was written; a kill leaves it under a name that begins with a dot.

    Raises:
        AlreadyExistsError: ``dest`` is there and ``force`` is not set.
        ExhaustedError: the disk is full.
        AccessError: no right to write there.
        UnavailableError: another error of the file system.
    """
    dest = dest.absolute()
    _refuse(dest, force=force)
    temporary = dest.with_name(f".{dest.name}.{secrets.token_hex(4)}.part")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _refuse(dest, force=force)
        _sync(temporary, *temporary.rglob("*"))
        _replace(temporary, dest)
    except OSError as cause:
        reason = f"cannot write {dest}: {cause.strerror or cause}"
        if cause.errno in _FULL:
            raise ExhaustedError(reason) from cause
        if isinstance(cause, PermissionError):
            raise AccessError(reason) from cause
        raise UnavailableError(reason) from cause
    finally:
        _remove(temporary)


def _refuse(dest: Path, *, force: bool) -> None:
    if not force and os.path.lexists(dest):
        raise AlreadyExistsError(f"{dest} is there already: choose another, or use --force")


def _sync(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _replace(temporary: Path, dest: Path) -> None:
    """Put ``temporary`` in the place of ``dest``; what was there, if any, is removed."""
    if not (temporary.is_dir() and os.path.lexists(dest)):
        temporary.replace(dest)
    elif not exchange(temporary, dest):
        # Neither can a folder be renamed over one that holds something. A kill between the two
        # leaves nothing at ``dest``, and both beside it.
        old = dest.with_name(f"{temporary.name}.old")
        dest.rename(old)
        temporary.rename(dest)
        _remove(old)
    _sync(dest.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
