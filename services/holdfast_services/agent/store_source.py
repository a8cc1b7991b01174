"""The object store as the last source of a shard: reads it into a slot, every part verified.

Blocking; fetches call it from their threads. The store is opened by the first one that needs it:
an agent that restores from memory never loads a client library. What can be blamed on the objects
is a CorruptionError here; what can be blamed on the store is every other error, with advice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core.ids import CheckpointId
from holdfast.core.needs import Head
from holdfast.core.shard import Shard
from holdfast.errors import (
    AccessError,
    CheckpointError,
    CorruptionError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
    UnsupportedFormatError,
)
from holdfast.format import keys
from holdfast.objectstore import ObjectStore, open_store

READS_COUNT_MAX = 8
"""Ranged reads of one shard at a time; an agent fetches a few shards side by side."""


class ObjectTier:
    """The store that ``url`` names; empty: this agent was not told of one.

    Every call to the store has its own deadline there, so no fetch waits for ever.
    """

    def __init__(self, url: str, opener: Callable[[str], ObjectStore] = open_store) -> None:
        self._url = url
        self._opener = opener
        self._store: ObjectStore | None = None
        self._guard = threading.Lock()

    def fetch(
        self,
        shard: Shard,
        view: memoryview,
        *,
        done: set[int],
        stop: threading.Event,
        prepare: Callable[[Sequence[bytes]], None] = lambda _: None,
    ) -> bytes:
        """Fill ``view`` with what is not ``done`` of a shard; return its part digests, joined.

        A store that fails half way is asked for the rest at once, as long as each time brings
        some of it. ``prepare`` is told the part digests before anything is read, and may add to
        ``done``.

        Raises:
            CorruptionError: the objects are not there, or not those of this very shard.
            UnavailableError: no answer, or ``stop`` was set; parts that came are in ``done``.
            CheckpointError: another kind: the store refuses us; ``advice`` says what to do.
        """
        store = self._open()
        folder = CheckpointFolder(store, keys.folder(shard.job, shard.id.checkpoint))
        try:
            sidecar = folder.sidecar(shard)
            prepare(sidecar.digests)
            while True:
                before = len(done)
                try:
                    folder.fetch(
                        shard, sidecar, view, done=done, threads=READS_COUNT_MAX, stop=stop
                    )
                except UnavailableError:
                    if stop.is_set() or len(done) == before:
                        raise
                else:
                    return b"".join(sidecar.digests)
        except (NotFoundError, UnsupportedFormatError) as error:
            next(iter(store.list()), None)  # a bucket that is gone says nothing of what was in it
            raise CorruptionError(f"no use in {store.url}: {error}") from error

    def heads(self, job: str, checkpoint: CheckpointId, ranks: Collection[int]) -> list[Head]:
        """Return the heads of these ranks' segments of a checkpoint that is in the store.

        Raises:
            CheckpointError: none is set, or it does not answer, or there is no such checkpoint.
        """
        folder = CheckpointFolder(self._open(), keys.folder(job, checkpoint))
        return [
            Head(rank=int(shard.id.rank), length_bytes=shard.length_bytes, data=folder.head(shard))
            for shard in folder.manifest().shards
            if shard.id.rank in ranks
        ]

    def advice(self, error: CheckpointError) -> str:
        """Return what to do about an error that is not corruption, for people."""
        if not self._url:
            return f"{error.message}: set it as for the metadata service"
        return f"object store {self._url}: {error.message}; {_todo(error)}"

    def close(self) -> None:
        """Give connections back; nothing may be fetching any more."""
        with self._guard:
            if self._store is not None:
                self._store.close()
                self._store = None

    def _open(self) -> ObjectStore:
        """Return the store.

        Raises:
            PreconditionError: none is set.
            InvalidRequestError, UnavailableError: see ``open_store``.
        """
        if not self._url:
            raise PreconditionError("no object store: HOLDFAST_STORE is not set for this agent")
        with self._guard:
            if self._store is None:
                self._store = self._opener(self._url)
            return self._store


def _todo(error: CheckpointError) -> str:
    if isinstance(error, InvalidRequestError):
        return "set HOLDFAST_STORE for this agent as for the metadata service"
    if isinstance(error, AccessError):
        return "give this node's agent credentials that may read there"
    if isinstance(error, NotFoundError):
        return "create the bucket, or mount the folder, on this node"
    if isinstance(error, ExhaustedError):
        return "make room on this node"
    return "the restore waits and tries again"
