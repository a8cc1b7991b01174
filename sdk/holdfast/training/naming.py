"""What of a checkpoint a restore is asked for, and how a rank names what it needs of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from holdfast.core.decision import Decision
from holdfast.core.needs import Needs
from holdfast.errors import InvalidRequestError
from holdfast.state.boxes_here import LocalBoxes
from holdfast.training.session import AgentSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What of a checkpoint is loaded: names of the state (None: all), and how they must match."""

    strict: bool = True
    only: tuple[str, ...] | None = None

    @classmethod
    def of(cls, names: Collection[str], *, strict: bool, only: Collection[str] | None) -> Scope:
        """Return the scope that a user asks for, of a state that has ``names``.

        Raises:
            InvalidRequestError: ``only`` names something else, or is one text.
        """
        if isinstance(only, str) or not set(only or ()) <= set(names):
            raise InvalidRequestError(f"only={only!r}: pass names of state, {sorted(names)}")
        return cls(strict=strict, only=None if only is None else tuple(only))


class Namer(Protocol):
    """Says what a rank needs of a checkpoint that is proposed."""

    def suffices(self, needs: Needs) -> bool:
        """Tell whether what was named is enough."""
        ...

    def needs(self, decision: Decision, session: AgentSession) -> tuple[Needs, bool]:
        """Return what is needed of the decision's checkpoint, and whether that is of all groups."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """How a rank names what it needs of a checkpoint.

    ``whole``: all of it. ``only``: what is under these names of the state. ``boxes``: what this
    rank has of tensors that others hold, too; None: all that it loads is in one segment. ``far``:
    these may lie in anybody's segment. ``after``: the number of the needs that did not suffice.
    ``admit_whole`` is called before all of it is named, and raises if that does not fit (P8).
    """

    whole: bool = False
    only: tuple[str, ...] | None = None
    boxes: LocalBoxes | None = None
    far: bool = False
    after: int = 0
    admit_whole: Callable[[], object] = lambda: None

    @classmethod
    def of(
        cls,
        scope: Scope,
        boxes: LocalBoxes | None,
        admit_whole: Callable[[], object] = lambda: None,
    ) -> Naming:
        """Return how it is named for what ``scope`` asks for: what may be missing, everywhere."""
        return cls(whole=not scope.strict, only=scope.only, boxes=boxes, admit_whole=admit_whole)

    def wider(self, needs: Needs) -> Naming:
        """Return how it is named if ``needs`` did not suffice: more by ranges, whole, then all.

        Of boxes it is what anybody's header tells; of the rest all of its own segment.
        """
        if self.boxes is not None and not self.far:
            return replace(self, far=True, after=needs.number)
        whole = self.boxes is not None or not needs.in_parts
        return Naming(whole=whole, admit_whole=self.admit_whole)

    def suffices(self, needs: Needs) -> bool:
        """Tell whether what was named is what this would name."""
        in_parts = self.only is not None or self.boxes is not None
        if needs.whole or needs.number <= self.after:
            return needs.whole
        return not (self.whole or (needs.in_parts and not in_parts))

    def needs(self, decision: Decision, session: AgentSession) -> tuple[Needs, bool]:
        """Return what is needed of the decision's checkpoint; may ask the agent for heads.

        Beside it: whether what any group of ranks has saved of what this rank has is among it.

        Raises:
            ExhaustedError: all of it is, and this node has no room for that.
        """
        found, of_all = self._needs(decision, session)
        if found.whole:
            self.admit_whole()
        return found, of_all

    def _needs(self, decision: Decision, session: AgentSession) -> tuple[Needs, bool]:
        from holdfast.training import restore_needs  # noqa: PLC0415 - few ask, and it takes 6 ms

        number = session.needs.number + 1 if session.needs else 1
        own = restore_needs.own_needs(decision, session.spec, number, whole=self.whole)
        source = session.spec.rank % decision.world_size
        if self.boxes is not None:
            return restore_needs.of_boxes(
                own, source, self.boxes, self.only, session.headers,
                saved=decision.world_size, world_size=session.spec.world_size, far=self.far,
            )  # fmt: skip
        if self.only is not None:
            return restore_needs.of_names(own, source, self.only, session.headers), False
        return own, own.whole
