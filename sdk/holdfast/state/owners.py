"""Whose tensors a checkpoint has under a name, and which of them is meant here.

A name is everybody's, or a rank's own, or that of a group of ranks: the tensor is then stored for
the first of them. Which groups there were, the texts of their ranks say. Knows names and texts, and
reads no tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

from holdfast.errors import NotReadyError
from holdfast.format import blob as blobs
from holdfast.format.blob import StateBlob
from holdfast.format.names import blob_name, is_under, own_name, own_rank, unranked
from holdfast.reading.reader import Segments


class Owners:
    """The names of one checkpoint, for the rank that takes the state of the rank ``source``.

    Args:
        segments: What is here of the checkpoint.
        blob: The text of ``source``.
        source: A rank of those that saved.
        world_size: How many ranks there are now.
        knows_all: What is here was chosen by the headers of all ranks: who has saved any of what
            this rank looks for is here.
    """

    def __init__(
        self,
        segments: Segments,
        blob: StateBlob,
        source: int,
        *,
        world_size: int,
        knows_all: bool = False,
    ) -> None:
        self.source = source
        self.world_size = world_size
        self.aliases = blob.static.aliases
        self._segments = segments
        self._specs = segments.specs()
        self._texts = {source: blob}
        self._meshes = None if blob.static.meshes is None else set(map(tuple, blob.static.meshes))
        self._alike = segments.world_size == world_size
        self._knows_all = knows_all or segments.is_whole
        objects = blob.static.objects
        self._sections = {path for path, saved in objects.items() if blobs.is_section(saved)}

    def own(self, name: str) -> str:
        """Return under which name ``source`` saved its own tensor ``name``."""
        return own_name(name, self.source)

    def is_of_section(self, name: str) -> bool:
        """Tell whether a name was saved as one of a section, so that it means one tensor."""
        return is_under(name, self._sections)

    def find(
        self,
        fqn: str,
        mesh: tuple[int, ...] | None,
        *,
        of_model: bool = False,
        of_all: bool = False,
    ) -> Sequence[str]:
        """Return what a tensor is called in the checkpoint; several names: they must be equal.

        It is everybody's, or the source rank's own. If several ranks hold it here, or its name is
        one ``of_model``, the same on all ranks, it may be of any group of ranks: of the very same
        one, else of all that have one of this name. ``of_all``: all ranks have it alike here, so
        that what each saved as its own must be equal.

        Raises:
            NotReadyError: others may have saved it, of whom nothing is here.
        """
        names = dict.fromkeys((fqn, self.aliases.get(fqn, fqn)))
        for name in names:
            meant = self._of_mesh(name, mesh) if mesh else self._of_rank(name, of_model, of_all)
            for stored in (name, meant):
                if stored in self._specs:
                    return [stored]
        self.require_all(fqn)
        found = next(filter(None, map(self._owned.get, names)), [])
        if mesh or of_model:
            return found or self._owned.get(self._second_names.get(fqn, fqn), [])
        if of_all or self.own(fqn) in found:
            return found
        return [stored for stored in found if own_rank(stored) not in self._alone]

    def _of_mesh(self, name: str, mesh: tuple[int, ...]) -> str:
        """Return what the ranks of ``mesh`` have saved together as ``name``; empty: not known."""
        if not self._alike or not (self._meshes is None or mesh in self._meshes):
            return ""
        # If one alone has it, it is the first one's or not here, and nobody needs to look.
        several = len(self._owned.get(name, ())) > 1
        if several and any(own_name(name, rank) in self._specs for rank in mesh[1:]):
            return ""  # they had other groups
        return own_name(name, mesh[0])

    def _of_rank(self, name: str, of_model: bool, of_all: bool) -> str:
        """Return what the source saved of ``name`` for itself; empty: maybe for a group of ranks.

        That has the name of its first rank. Where every rank has saved one, none was a group's.
        """
        own = self.own(name)
        if of_model or of_all:
            return ""
        if self._alike or not self._leads or own not in self._specs:
            return own
        return own if len(self._owned[name]) == self._segments.world_size else ""

    @cached_property
    def _leads(self) -> bool:
        """Whether the source is the first of a group of several ranks, as far as its text says."""
        return any(len(mesh) > 1 and mesh[0] == self.source for mesh in self._meshes or ())

    @cached_property
    def _alone(self) -> Collection[int]:
        """Ranks that are the first of no group, as their texts say: what they have is their own."""
        firsts = {rank: text.static.meshes for rank, text in self.texts()}
        return {
            rank
            for rank, meshes in firsts.items()
            if meshes is not None and rank not in [mesh[0] for mesh in meshes]
        }

    @cached_property
    def _second_names(self) -> Mapping[str, str]:
        """Names that were second ones on any rank, with those under which it saved the tensors."""
        return {name: of for _, text in self.texts() for name, of in text.static.aliases.items()}

    @cached_property
    def _owned(self) -> Mapping[str, list[str]]:
        """Names in the checkpoint of what some ranks have saved as their own, by its name."""
        found: dict[str, list[str]] = {}
        for stored in self._specs:
            name = unranked(stored)
            if name != stored:
                found.setdefault(name, []).append(stored)
        return found

    def texts(self) -> Iterator[tuple[int, StateBlob]]:
        """Yield rank and text of the source, then of each other rank of which it is here."""
        yield from self.nearest()
        for rank in range(self._segments.world_size):
            if rank != self.source and blob_name(rank) in self._specs:
                if rank not in self._texts:
                    self._texts[rank] = blobs.decode(self._segments.blob(rank))
                yield rank, self._texts[rank]

    def nearest(self) -> Iterator[tuple[int, StateBlob]]:
        """Yield the source's rank and text."""
        yield self.source, self._texts[self.source]

    def require_all(self, what: str) -> None:
        """Do nothing if all that this rank looks for is known to be here.

        Raises:
            NotReadyError: it is not; names ``what`` was looked for.
        """
        if not self._knows_all:
            raise NotReadyError(
                f"a part of the checkpoint does not tell which ranks saved {what!r}", fqn=what
            )


def told(stored: Sequence[str]) -> str:
    """Return whose these are, as text.

    >>> told(["rank.0.w", "rank.2.w"])
    'by the ranks of the group of rank 0 and by those of rank 2'
    """
    ranks = [f"rank {own_rank(name)}" for name in stored]
    return "by the ranks of the group of " + " and by those of ".join(ranks)
