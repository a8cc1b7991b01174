"""Which object store a stack drains to: its own folder, or one that was chosen and is remembered.

The choice is kept in HOME, because the catalogue there speaks of that store: a stack that is
started again without a word must not look for its checkpoints elsewhere.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.objectstore import open_store
from holdfast_services.supervisor.layout import private_folder

_CHOICE = "store.url"


def own_folder(home: Path) -> Path:
    """Return the folder that is the store of the stack in ``home`` unless another was chosen."""
    return home / "store"


def choose(home: Path, asked: str) -> str:
    """Return the URL of the store to use, and remember it.

    Args:
        home: HOME of the stack, whose lock the caller holds.
        asked: URL or path that somebody named; empty: as the last time.

    Raises:
        InvalidRequestError: there can be no such store, or its folder is not there.
        UnavailableError: its client library is not installed.
    """
    opened = open_store(asked or remembered(home))
    url, own_url = opened.url, own_folder(home).as_uri()
    if url.startswith("memory:"):
        raise InvalidRequestError("store memory: is for one process, a stack has several")
    if url == own_url:
        private_folder(own_folder(home))
    try:
        # A volume that is not mounted is seen now; later, the drain alone waits for it. Of a
        # bucket nothing is asked: whether it answers is no reason to start or not.
        if asked and url.startswith("file:"):
            opened.check()
    except NotFoundError as cause:
        raise InvalidRequestError(f"{cause.message}; make it, or mount its volume") from cause
    finally:
        with suppress(NotFoundError):
            opened.close()
    if url == own_url:
        forget_choice(home)  # not written down: it moves with HOME
    else:
        (home / _CHOICE).write_text(url)
    return url


def remembered(home: Path) -> str:
    """Return the URL of the store that the stack in ``home`` used last, or would use."""
    choice = home / _CHOICE
    return choice.read_text() if choice.exists() else own_folder(home).as_uri()


def forget_choice(home: Path) -> None:
    """Have the next stack in ``home`` use its own folder again, unless told otherwise."""
    (home / _CHOICE).unlink(missing_ok=True)
