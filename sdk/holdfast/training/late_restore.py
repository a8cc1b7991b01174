"""A restore by a rank that learns late which boxes it loads: from the plan of a framework.

A checkpoint is chosen first, and this rank's own segment and the text of rank 0 are fetched. The
heads of all segments tell which tensors there are; boxes are named when they are to be read. Until
training has begun (``AgentSession.begun``) there may be any number of reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.core.decision import Decision
from holdfast.core.needs import HEADS_COUNT_MAX, Needs, ShardNeed, checked
from holdfast.core.session import RestoreView
from holdfast.errors import (
    CheckpointError,
    NotFoundError,
    NotReadyError,
    PreconditionError,
    StaleGenerationError,
)
from holdfast.format import byte_ranges
from holdfast.format.boxes import Box, whole
from holdfast.format.index import Index, of_some
from holdfast.format.names import blob_name
from holdfast.format.segment import TensorSpec
from holdfast.reading.files import open_files
from holdfast.reading.reader import Reader, Want
from holdfast.training import restore_needs
from holdfast.training.restore import Decided, choose, decide
from holdfast.training.session import AgentSession

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Named:
    """Names what ``needed`` says; ``after`` is the number of the needs that did not suffice."""

    needed: Callable[[Decision], Needs]
    after: int = 0

    def suffices(self, needs: Needs) -> bool:
        return needs.number > self.after

    def needs(self, decision: Decision, session: AgentSession) -> tuple[Needs, bool]:
        number = session.needs.number + 1 if session.needs else 1
        return replace(self.needed(decision), number=number), False


class LateRestore:
    """What a rank reads of the checkpoint that was chosen for its attempt.

    Args:
        session: Registered, with its threads started.
        arena: The node's folder of segments.
        timeout_s: How long a choice, and the bytes of one read, may take.
    """

    def __init__(self, session: AgentSession, arena: Path, *, timeout_s: float) -> None:
        self._session = session
        self._arena = arena
        self._timeout_s = timeout_s
        self._index: Index | None = None
        self._all_here = not session.spec.names_needs
        self._view: RestoreView | None = None

    def decide(self) -> Decided | None:
        """Return what is restored, once it is confirmed; None: the attempt begins at step 0.

        Raises:
            CheckpointError: as ``restore.decide`` does.
        """
        naming = _Named(self._texts)
        decided = decide(
            self._session,
            self._arena,
            timeout_s=self._timeout_s,
            lost_is_fresh=False,
            naming=naming,
        )
        self._choose(naming)
        return decided

    @property
    def decision(self) -> Decision:
        """What was decided."""
        if self._view is None or self._view.decision.checkpoint is None:
            raise PreconditionError("no checkpoint was chosen")
        return self._view.decision

    def specs(self) -> Mapping[str, TensorSpec]:
        """Return every tensor of the checkpoint, as if one box held it.

        They come from headers that nobody has verified; those of the bytes that are read are.
        """
        if self._index is None and not self._all_here:
            self._index = self._find_index()
        if self._index is None:
            with self._open() as reader:
                return dict(reader.specs())
        return {
            t.fqn: TensorSpec(fqn=t.fqn, dtype=t.dtype, shape=t.shape, box=whole(t.shape))
            for t in self._index.tensors
        }

    def texts(self) -> tuple[bytes, bytes]:
        """Return the texts of rank 0 and of the rank whose state this one takes."""
        source = self._session.spec.rank % self.decision.world_size
        with self._open() as reader:
            return reader.blob(0), reader.blob(source)

    def read(self, wants: Sequence[Want]) -> None:
        """Fill every target, once its bytes are on this node and verified.

        Raises:
            NotReadyError: pieces of a tensor are missing.
            UnavailableError: the bytes did not come in time.
        """
        if self._index is not None:
            index = self._index
            self._name(lambda decision: self._boxes(decision, index, wants))
        try:
            with self._open() as reader:
                reader.read(wants)
                return
        except (NotReadyError, NotFoundError) as error:
            if self._all_here:
                raise
            log.warning("what was fetched may not have all (%s): fetching the others", error)
        self.fetch_all()
        with self._open() as reader:
            reader.read(wants)

    def fetch_all(self) -> None:
        """Have all of the checkpoint brought to this node, and wait for it."""
        self._name(lambda decision: self._own(decision, all_of_it=True))
        self._index, self._all_here = None, True

    def _open(self) -> Reader:
        assert self._view is not None
        segments = self._view.segments
        located = [(self._arena / segment.file_name, segment.shard) for segment in segments]
        held = {segment.shard.id: segment.ranges for segment in segments}
        return open_files(located, held, parse=self._session.headers.parse)

    def _find_index(self) -> Index | None:
        """Return the index of all heads; None: they are not to be had, and all is here now."""
        saved = self.decision.world_size
        try:
            if saved > HEADS_COUNT_MAX:
                raise NotReadyError(f"{saved} ranks saved it")
            checkpoint = self.decision.checkpoint
            assert checkpoint is not None
            return of_some(self._session.headers.of(checkpoint, range(saved)))
        except CheckpointError as error:
            log.info("all of the checkpoint is fetched: %s", error)
            self.fetch_all()
            return None

    def _name(self, needed: Callable[[Decision], Needs]) -> None:
        before = self._session.needs
        self._choose(_Named(needed, before.number if before else 0))

    def _choose(self, naming: _Named) -> None:
        view = choose(self._session, timeout_s=self._timeout_s, lost_is_fresh=False, naming=naming)
        before = self._view
        if before is not None and before.decision.checkpoint != view.decision.checkpoint:
            raise StaleGenerationError(
                "the catalogue was lost since a checkpoint was chosen, and now chooses another "
                "step: start the job again"
            )
        self._view = view

    def _own(self, decision: Decision, *, all_of_it: bool = False) -> Needs:
        return restore_needs.own_needs(decision, self._session.spec, 1, whole=all_of_it)

    def _texts(self, decision: Decision) -> Needs:
        """Return this rank's own segment and the text of rank 0: all of its, if need be."""
        own = self._own(decision)
        if own.whole or any(need.rank == 0 for need in own.shards):
            return own
        first = ShardNeed(rank=0)
        try:
            index = of_some(self._session.headers.of(own.checkpoint, [0]))
            first = byte_ranges.needs(index, [_text_of(index, 0)])[0]
        except CheckpointError as error:
            log.info("all of the segment of rank 0 is fetched: %s", error)
        return replace(own, shards=(first, *own.shards))

    def _boxes(self, decision: Decision, index: Index, wants: Sequence[Want]) -> Needs:
        """Return what holds ``wants``, and the texts; all, if that is in too many places."""
        own = self._own(decision)
        source = self._session.spec.rank % decision.world_size
        wanted = [_text_of(index, rank) for rank in {0, source}]
        wanted += [(want.name, want.box) for want in wants]
        try:
            return checked(replace(own, shards=byte_ranges.needs(index, wanted)))
        except CheckpointError as error:
            log.info("all of the checkpoint is fetched: %s", error)
            return replace(own, whole=True)


def _text_of(index: Index, rank: int) -> tuple[str, Box]:
    text = index.tensor(blob_name(rank))
    if text is None:
        raise NotReadyError(f"the header of rank {rank} names no text")
    return text.fqn, whole(text.shape)
