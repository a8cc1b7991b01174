"""Fetches copies to this node: asks the sources in turn, verifies the bytes, seals the slot.

Blames sources that have bad bytes; those that do not answer are tried again later, unblamed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.core.inventory import Peer
from holdfast.core.shard import Shard
from holdfast.core.slot_names import SlotName, SlotState
from holdfast.core.sources import Memory, Object, Rebuilt, Source
from holdfast.errors import (
    CheckpointError,
    ConflictError,
    CorruptionError,
)
from holdfast.format.digest import parts_count
from holdfast_services.agent import element_sidecar, sidecar
from holdfast_services.agent.arena import Arena
from holdfast_services.agent.clients import PeerClients
from holdfast_services.agent.domain import Content
from holdfast_services.agent.domain import events as ev
from holdfast_services.agent.domain.next_actions import FETCHES_COUNT_MAX, MAKES_COUNT_MAX
from holdfast_services.agent.domain.state import Rebuilding
from holdfast_services.agent.domain.wanted_parts import length_of, ranges_of
from holdfast_services.agent.parity_maker import ParityMaker, Rebuild, is_bad
from holdfast_services.agent.store_source import ObjectTier
from holdfast_services.agent.summing import Summing
from holdfast_services.agent.unchanged_parts import unchanged_parts
from holdfast_services.transport import Fetch, FetchRequest
from holdfast_services.transport.located import Located
from holdfast_services.transport.paced import Paced

STOP_S_MAX = 3.0
LET_GO_S_MAX = 1.0
"""How long a rank that has closed a slot it filled may take to let go of its lock."""

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Progress:
    """One fetch over all its sources: parts that are here, whom to blame, what went wrong.

    ``before`` are the digests of what the slot held; ``unchanged`` the parts that lay there still,
    or that a rank here has ``filled`` in.
    """

    done: set[int] = field(default_factory=set)
    before: bytes = b""
    filled: bool = False
    unchanged: set[int] = field(default_factory=set)
    bad: list[Source] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    advice: str = ""

    def keep_unchanged(
        self, view: memoryview, digests: Sequence[bytes], stop: threading.Event
    ) -> None:
        """Find the parts that need not come, once for all sources: their digests are the same."""
        before, self.before = b"".join(digests) if self.filled else self.before, b""
        self.filled = False
        if before:
            self.unchanged = unchanged_parts(view, digests, before, stop)
            self.done |= self.unchanged

    def failed(self, action: ev.Fetch) -> ev.FetchFailed:
        """Return what the machine hears once no source is left."""
        reason = "; ".join(self.reasons) or "no source is known"
        bad = tuple(self.bad)
        return ev.FetchFailed(action.name, action.shard.id, reason, bad, self.advice)


class Fetcher:
    """Performs ``Fetch`` actions; ``stop`` interrupts those under way.

    ``unchanged_bytes``: of whole copies that came, what lay in their slots already; ``parity``
    makes what follows from stripes.
    """

    def __init__(
        self, *, node: str, arena: Arena, transport: Paced, peers: PeerClients, tier: ObjectTier
    ) -> None:
        self._node = node
        self._arena = arena
        self._transport = transport
        self._peers = peers
        self._tier = tier
        self.unchanged_bytes = 0
        self._stop = threading.Event()
        self._moving: set[Future[Any]] = set()
        count = FETCHES_COUNT_MAX + MAKES_COUNT_MAX
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="fetch")
        summing = Summing(transport, peers, self._stop)
        self.parity = ParityMaker(summing, peers, self._in_thread)

    def pace(self, *, limited: bool) -> None:
        """Have fetches keep the rate for copies, or go on without it; those under way too."""
        if limited:
            self._transport.resume()
        else:
            self._transport.lift()

    async def fetch(self, action: ev.Fetch) -> list[ev.AgentEvent]:
        """Fill the slot from the first good source and seal it; return what happened.

        A part that one source has given stays when the next one is asked for the rest, and so does
        one that the slot held before. The slot's lock is held meanwhile: a writer that wakes up
        late cannot get it.
        """
        if action.parts:
            return await self._fetch_parts(action)
        file = self._arena.file(action.name.slot)
        taken = file.lock()
        if not taken and action.filled:
            taken = await self._in_thread(lambda: file.lock_within(LET_GO_S_MAX))
        if not taken:
            self._arena.drop(action.name)
            failed = ev.FetchFailed(action.name, action.shard.id, "slot held by a stale writer")
            return [ev.Reclaimed(action.name, replaced=True), failed]
        before = action.last.digests if action.last else b""
        progress = _Progress(before=before, filled=action.filled)
        try:
            content = await self._from_any(action, progress)
            if content is not None:
                self._seal(action.name, content)
                alike_bytes = length_of(progress.unchanged, action.shard.length_bytes)
                self.unchanged_bytes += alike_bytes
                told = alike_bytes if action.filled else None
                return [ev.FetchDone(action.name, content, tuple(progress.bad), told)]
        except CheckpointError as error:
            progress.reasons.append(str(error))
        finally:
            file.unlock()
        return [progress.failed(action)]

    async def _fetch_parts(self, action: ev.Fetch) -> list[ev.AgentEvent]:
        """Make a partial slot and fill its parts; each is verified, and nobody is served them."""
        length_bytes = action.shard.length_bytes
        progress = _Progress(done=set(range(parts_count(length_bytes))) - action.parts)
        ranges = ranges_of(action.parts, length_bytes)
        try:
            await self._in_thread(
                lambda: self._arena.create_partial(action.name, length_bytes, ranges)
            )
            content = await self._from_any(action, progress)
            if content is not None:
                return [ev.FetchDone(action.name, content, tuple(progress.bad))]
        except CheckpointError as error:
            progress.reasons.append(str(error))
        return [progress.failed(action)]

    async def _from_any(self, action: ev.Fetch, progress: _Progress) -> Content | None:
        for source in action.sources:
            match source:
                case Peer():
                    content = await self._from_peer(source, action, progress)
                case Rebuilding():
                    content = await self._from_stripe(source, action, progress)
                case Object():
                    content = await self._from_store(action, progress)
            if content is not None:
                return content
        return None

    async def _from_store(self, action: ev.Fetch, progress: _Progress) -> Content | None:
        """Fetch what is missing from the object store; None when it did not give all of it."""
        view = self._arena.file(action.name.slot).view

        def transfer() -> bytes:
            return self._transfer_from_store(action.shard, view, progress)

        try:
            digests = await self._in_thread(transfer)
        except CorruptionError as error:
            log.warning("object store: %s", error)
            progress.bad.append(Object())
            progress.reasons.append(f"object store: {error}")
            return None
        except CheckpointError as error:
            progress.advice = self._tier.advice(error)
            progress.reasons.append(progress.advice)
            return None
        owner = action.owner or self._node
        return Content(shard=action.shard, owner=owner, digests=digests, source="object")

    def _transfer_from_store(self, shard: Shard, view: memoryview, progress: _Progress) -> bytes:
        """Fetch what is missing at the pace of all fetches; return the part digests, joined."""
        every = set(range(parts_count(shard.length_bytes)))
        missing, digests = sorted(every - progress.done), b""

        def prepare(digests: Sequence[bytes]) -> None:
            progress.keep_unchanged(view, digests, self._stop)
            passed.update(progress.done)

        for parts in self._transport.portions(missing, shard.length_bytes, self._stop):
            passed = (every - parts) | progress.done
            try:
                digests = self._tier.fetch(
                    shard, view, done=passed, stop=self._stop, prepare=prepare
                )
            finally:
                progress.done |= passed & parts
        return digests

    async def _from_stripe(
        self, source: Rebuilding, action: ev.Fetch, progress: _Progress
    ) -> Content | None:
        """Make what is missing out of the rest of its stripe; None when it cannot be had."""
        view = self._arena.file(action.name.slot).view
        lost = Rebuild(action.shard, view[: action.shard.length_bytes], progress.done)
        try:
            digests = await self.parity.rebuild(lost, source, progress.reasons)
        except CheckpointError as error:
            log.warning("parity: %s", error)
            progress.reasons.append(f"parity: {error}")
            if is_bad(error):
                progress.bad.append(Rebuilt(source.stripe))
            return None
        owner = action.owner or self._node
        return Content(shard=action.shard, owner=owner, digests=digests, source="peer")

    async def make_element(self, action: ev.MakeElement) -> list[ev.AgentEvent]:
        """Fill the slot with an element and seal it as that; return what happened.

        It is made anew after each failure: a sum without one of its members is none.
        """
        file = self._arena.file(action.name.slot)
        key = action.element.key
        if not file.lock():
            self._arena.drop(action.name)
            failed = ev.ElementFailed(action.name, key, "slot held by a stale writer")
            return [ev.Reclaimed(action.name, replaced=True), failed]
        try:
            held = await self.parity.make(action, file.view)
            if self._stop.is_set():
                raise ConflictError("agent stops")
            self._arena.write_sidecar(action.name, element_sidecar.encode(held))
            if not self._arena.rename(action.name, action.name.to(SlotState.ELEMENT)):
                raise ConflictError(f"slot {action.name.file_name} was taken away")
        except CheckpointError as error:
            return [ev.ElementFailed(action.name, key, str(error))]
        finally:
            file.unlock()
        return [ev.ElementMade(action.name, held)]

    async def _from_peer(self, peer: Peer, action: ev.Fetch, progress: _Progress) -> Content | None:
        """Fetch what is missing from one peer; None when it did not give all of it."""
        located: Located | None = None
        try:
            located = await self._peers.locate(peer, action.shard.id)
            located.check(action.shard)
            await self._transfer(peer, action, located, progress)
        except CorruptionError as error:
            log.warning("source %s is bad: %s", peer.node, error)
            progress.bad.append(Memory(peer.node))
            progress.reasons.append(f"{peer.node}: {error}")
            await self._tell(peer, action.shard, located)
            return None
        except CheckpointError as error:
            progress.reasons.append(f"{peer.node}: {error}")
            return None
        return Content(
            shard=action.shard,
            owner=action.owner or peer.node,
            digests=located.part_digests,
            # A copy held for its owner was here before anything failed: memory, to a restore.
            source="memory" if action.asked else "peer",
        )

    async def _transfer(
        self, peer: Peer, action: ev.Fetch, located: Located, progress: _Progress
    ) -> None:
        request = FetchRequest(
            key=action.shard.id.key,
            incarnation=located.slot_incarnation,
            length_bytes=action.shard.length_bytes,
            digests=located.digests,
        )
        view = self._arena.file(action.name.slot).view

        def transfer() -> None:
            progress.keep_unchanged(view, request.digests, self._stop)
            self._transport.fetch(
                peer.endpoints, Fetch(request, view, done=progress.done, stop=self._stop)
            )

        await self._in_thread(transfer)

    async def _tell(self, peer: Peer, shard: Shard, located: Located | None) -> None:
        if located is None:
            return
        try:
            await self._peers.suspect(peer, shard.id, located.slot_incarnation, shard.length_bytes)
        except CheckpointError as error:
            log.info("could not tell %s: %s", peer.node, error)

    def _seal(self, opened: SlotName, content: Content) -> None:
        """Sidecar first, then the two renames: a crash between leaves a slot that is hashed."""
        if self._stop.is_set():
            raise ConflictError("agent stops")
        closed = opened.to(SlotState.CLOSED)
        self._arena.write_sidecar(opened, sidecar.encode(content))
        if not self._arena.rename(opened, closed):
            raise ConflictError(f"slot {opened.file_name} was taken away")
        self._arena.rename(closed, closed.to(SlotState.SEALED))

    async def _in_thread(self, transfer: Callable[[], T]) -> T:
        moving = self._threads.submit(transfer)
        self._moving.add(moving)
        moving.add_done_callback(self._moving.discard)
        return await asyncio.wrap_future(moving)

    def stop(self) -> None:
        """Interrupt all fetches; those interrupted leave an open slot, freed at the next start.

        A read that hangs in an object store is left behind after ``STOP_S_MAX``.
        """
        self._stop.set()
        self._transport.lift()
        self._threads.shutdown(wait=False, cancel_futures=True)
        wait(list(self._moving), STOP_S_MAX)
        self._tier.close()
