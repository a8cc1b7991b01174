"""Files that appear whole: written under another name beside, renamed at the end."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import AccessError, AlreadyExistsError, ExhaustedError, UnavailableError

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
        _sync(temporary)
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


def _sync(path: Path) -> None:
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _replace(temporary: Path, dest: Path) -> None:
    if temporary.is_dir() and os.path.lexists(dest):
        # A folder cannot be renamed over one that holds something.
        old = dest.with_name(f"{temporary.name}.old")
        dest.rename(old)
        temporary.rename(dest)
        _remove(old)
    else:
        temporary.replace(dest)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
