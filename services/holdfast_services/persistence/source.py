"""Where a shard's bytes come from: the slot's file on this machine, or agents, part by part.

Every byte given out was hashed against the digest that the owner's agent made when it sealed
(P3), after its last hop. A source that fails is left, and the next one is asked; one whose bytes
do not match is told so. Units: bytes.
"""

from __future__ import annotations

import logging
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

from holdfast.core.inventory import Peer
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotState, slot_name
from holdfast.errors import (
    AccessError,
    CheckpointError,
    CorruptionError,
    DigestMismatchError,
    InvalidRequestError,
    NotFoundError,
    StoppedError,
    TruncatedShardError,
    UnavailableError,
)
from holdfast.format.digest import PART_BYTES, part_digest
from holdfast.format.header import parse_header
from holdfast.format.segment import header_length
from holdfast_services.persistence.clients import locate, suspect
from holdfast_services.persistence.domain.upload_plan import Part
from holdfast_services.persistence.pool import PartPool
from holdfast_services.transport import Fetch, FetchRequest, Transport
from holdfast_services.transport.located import Located

log = logging.getLogger(__name__)

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Copy(Protocol):
    """One copy of one shard."""

    def part(self, part: Part, stop: threading.Event) -> Iterator[memoryview]:
        """Yield the bytes of a part once, verified, and take them back.

        Raises:
            NotFoundError: the copy is not there any more.
            DigestMismatchError: the bytes are not what was sealed.
            UnavailableError: the node does not answer.
            StoppedError: ``stop`` was set.
        """
        ...

    def check(self) -> None:
        """Raise NotFoundError when what was given out may have been overwritten meanwhile."""
        ...

    def close(self) -> None:
        """Release the mapping and its connection."""
        ...


class MappedFile:
    """The file of a sealed slot, mapped: no copy, no second set of pages.

    An agent renames a slot before it reuses it. So bytes that were read while the name stood are
    those that were sealed: a seqlock, with the name as the sequence number.
    """

    def __init__(self, path: str, shard: Shard) -> None:
        """Map ``path``.

        Raises:
            InvalidRequestError: not the path of a slot.
            NotFoundError: no such file here: the agent is on another machine, or in a container.
            AccessError: not a plain file of this user.
            CorruptionError: not as long as the shard, or another segment.
            UnavailableError: it cannot be read or mapped now.
        """
        self._path = path
        folder, _, name = path.rpartition("/")
        if not folder.startswith("/") or slot_name(name).state is not SlotState.SEALED:
            raise InvalidRequestError(f"{path[:80]!r} is not the path of a sealed slot")
        try:
            fd = os.open(path, _OPEN)
        except FileNotFoundError as cause:
            raise NotFoundError(f"no file {path} here") from cause
        except OSError as cause:
            raise AccessError(f"cannot open {path}: {cause.strerror}") from cause
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid():
                raise AccessError(f"{path} is no plain file of this user")
            if facts.st_size != shard.length_bytes:
                raise TruncatedShardError(f"{path} has {facts.st_size} bytes")
            self._fd, self._inode = fd, (facts.st_dev, facts.st_ino)
            self._check_identity(shard)
            undo.pop_all()

    def part(self, part: Part, stop: threading.Event) -> Iterator[memoryview]:
        """Yield a mapping of the part alone: page tables too stay bounded."""
        if stop.is_set():
            raise StoppedError("reading a slot was interrupted")
        view = self._map(part.begin, part.length_bytes)
        for index, digest in enumerate(part.digests):
            if part_digest(view[index * PART_BYTES : (index + 1) * PART_BYTES]) != digest:
                self.check()
                raise DigestMismatchError(f"part {part.number} of {self._path} does not match")
        yield view

    def check(self) -> None:
        """Raise NotFoundError when the slot has been given another name."""
        try:
            facts = os.lstat(self._path)
        except OSError as cause:
            raise NotFoundError(f"slot {self._path} was reused") from cause
        if (facts.st_dev, facts.st_ino) != self._inode:
            raise NotFoundError(f"slot {self._path} was replaced")

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)

    def _map(self, begin: int, length_bytes: int) -> memoryview:
        try:
            mapping = mmap.mmap(self._fd, length_bytes, prot=mmap.PROT_READ, offset=begin)
        except OSError as cause:
            raise UnavailableError(f"cannot map {self._path}: {cause.strerror}") from cause
        return memoryview(mapping)

    def _check_identity(self, shard: Shard) -> None:
        try:
            prefix = os.pread(self._fd, 8, 0)
        except OSError as cause:
            raise UnavailableError(f"cannot read {self._path}: {cause.strerror}") from cause
        length = header_length(prefix)
        if length > shard.length_bytes:
            raise TruncatedShardError(f"{self._path} has a header of {length} bytes")
        parse_header(self._map(0, length), shard.length_bytes).expect(shard)


class RemoteCopy:
    """A copy at an agent: each part is fetched when it is sent, into memory used over and over."""

    def __init__(
        self, peer: Peer, shard: Shard, located: Located, pool: PartPool, transport: Transport
    ) -> None:
        self._peer = peer
        self._transport = transport
        self._shard = shard
        self._located = located
        self._pool = pool

    def part(self, part: Part, stop: threading.Event) -> Iterator[memoryview]:
        """Fetch the part and yield it; see ``Copy.part``."""
        request = FetchRequest(
            key=self._shard.id.key,
            incarnation=self._located.slot_incarnation,
            length_bytes=part.length_bytes,
            digests=part.digests,
            offset_bytes=part.begin,
        )
        with self._pool.buffer(part.length_bytes) as view:
            endpoints = self._peer.endpoints
            self._transport.fetch(endpoints, Fetch(request, view, stop=stop))
            yield view

    def check(self) -> None:
        """Do nothing: the bytes are in this worker's own memory."""

    def close(self) -> None:
        """Do nothing: nothing is held open."""


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    """A copy: how to read it, whose it is, what its agent said of it."""

    copy: Copy
    peer: Peer
    located: Located


@dataclass(frozen=True, slots=True)
class Lent:
    """A part's bytes while they are used; ``still`` tells afterwards whether to believe them."""

    view: memoryview
    still: Callable[[], bool]


class ReadableCopies(Protocol):
    """All copies of a shard, whichever of them can be read. Safe to use from several threads."""

    def digests(self) -> tuple[bytes, ...]:
        """Return the part digests, which give the root digest.

        Raises:
            UnavailableError: no copy is left; says what became of each.
        """
        ...

    def part(self, part: Part, stop: threading.Event) -> AbstractContextManager[Lent]:
        """Lend the bytes of a part, verified, from the first copy that has them.

        Raises:
            UnavailableError: no copy is left; says what became of each.
            StoppedError: ``stop`` was set.
        """
        ...

    def close(self) -> None:
        """Give all copies back; nothing of them may be in use."""
        ...


class Sources:
    """The ``ReadableCopies`` that agents hold, one of them in use.

    Args:
        shard: Whose copies.
        peers: Agents that hold one; those whose file can be mapped are asked first.
        pool: Lends memory for what is fetched.
        transport: Fetches what cannot be mapped; whoever made it closes it.
    """

    def __init__(
        self, shard: Shard, peers: Sequence[Peer], pool: PartPool, transport: Transport
    ) -> None:
        self._transport = transport
        self._shard = shard
        self._pool = pool
        self._peers = tuple(peers)
        self._guard = threading.Lock()
        self._opened: list[_Opened] = []
        self._left: list[_Opened] = []
        self._reasons: list[str] = []

    def digests(self) -> tuple[bytes, ...]:
        """See ``ReadableCopies.digests``."""
        return self._use().located.digests

    @contextmanager
    def part(self, part: Part, stop: threading.Event) -> Iterator[Lent]:
        """See ``ReadableCopies.part``."""
        while True:
            opened = self._use()
            lending = opened.copy.part(part, stop)
            try:
                view = next(lending)
                break
            except StoppedError:
                raise
            except CheckpointError as error:
                self._leave(opened, error)
        try:
            yield Lent(view, lambda: self._still(opened))
        finally:
            for _ in lending:
                pass  # it takes the memory back

    def close(self) -> None:
        """See ``ReadableCopies.close``."""
        for opened in self._opened:
            opened.copy.close()
        self._opened.clear()

    def _still(self, opened: _Opened) -> bool:
        try:
            opened.copy.check()
        except CheckpointError as error:
            self._leave(opened, error)
            return False
        return True

    def _use(self) -> _Opened:
        """Return the copy in use; look for all of them the first time."""
        with self._guard:
            if self._peers:
                self._opened = [o for peer in self._peers if (o := self._open(peer)) is not None]
                # What can be mapped is not fetched.
                self._opened.sort(key=lambda opened: isinstance(opened.copy, RemoteCopy))
                self._left, self._peers = list(self._opened), ()
            if not self._left:
                why = "; ".join(self._reasons) or "no agent holds it"
                raise UnavailableError(f"no copy of {self._shard.id.key} can be read: {why}")
            return self._left[0]

    def _open(self, peer: Peer) -> _Opened | None:
        try:
            located = locate(peer, self._shard)
        except CheckpointError as error:
            self._reasons.append(f"{peer.node}: {error}")
            return None
        copy: Copy = RemoteCopy(peer, self._shard, located, self._pool, self._transport)
        if located.path:
            try:
                copy = MappedFile(located.path, self._shard)
            except CheckpointError as error:
                log.debug("%s is fetched from %s: %s", self._shard.id.key, peer.node, error)
        return _Opened(copy, peer, located)

    def _leave(self, opened: _Opened, error: CheckpointError) -> None:
        """Use this copy no more; the node hears of it when its bytes did not match."""
        with self._guard:
            if opened not in self._left:
                return  # another thread has left it already
            self._left.remove(opened)
            self._reasons.append(f"{opened.peer.node}: {error}")
        log.warning("%s from %s: %s", self._shard.id.key, opened.peer.node, error)
        if isinstance(error, CorruptionError):
            try:
                suspect(opened.peer, self._shard, opened.located.slot_incarnation)
            except CheckpointError as cause:
                log.info("could not tell %s: %s", opened.peer.node, cause)


OpenSources = Callable[[Shard, Sequence[Peer], PartPool], ReadableCopies]


def sources_over(transport: Transport) -> OpenSources:
    """Return what opens the copies of a shard, fetching over ``transport`` what it cannot map."""
    return lambda shard, peers, pool: Sources(shard, peers, pool, transport)
