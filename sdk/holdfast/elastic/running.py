"""Which micro-batch this process is at: what loaders say, and models and optimizers ask.

A process trains with one loader at a time; one that is read inside the loop of another, for an
evaluation, stands before it until it ends. Only the training thread comes here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.elastic.updates import Batching, Micro, split


class Loader(Protocol):
    """A loader, as a model that is trained with its batches sees it."""

    def follow(self, adaptation: Any) -> None:
        """Take noise and progress of a model."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The micro-batch that a loop was given last.

    ``number`` is that of its update, higher for each in this process. ``initial``: the batch size
    that the learning rate was chosen for. ``whole``: the update has as many samples as was asked
    for.
    """

    number: int
    micro: Micro
    batching: Batching
    initial: int

    @property
    def whole(self) -> bool:
        """Whether the update has as many samples as was asked for, and not what was left over."""
        return len(self.micro.of) == self.batching.size

    @property
    def scale(self) -> float:
        """How many initial batches an update is of."""
        return self.batching.size / self.initial

    @property
    def share(self) -> float:
        """How much of an update this one is."""
        return len(self.micro.of) / self.batching.size

    @property
    def growth(self) -> float:
        """What gradients of the micro-batches before are multiplied by, before these are added.

        So that a sum of means, each of its own number of samples, is one of samples.
        """
        micro = self.micro
        sizes = split(max(1, micro.samples), micro.count)
        return sizes[micro.index - 1] / sizes[micro.index] if micro.index else 1.0

    @property
    def portion(self) -> float:
        """This rank's share of an update, beside an equal one."""
        return self.batching.replicas * self.micro.samples / len(self.micro.of)

    @property
    def factor(self) -> float:
        """What a sum that heeded ``growth`` is multiplied by before ranks are averaged.

        So that the average is that over the samples of the update.
        """
        size = 0 if self.micro.spare else self.micro.end - self.micro.begin
        return self.batching.replicas * size / len(self.micro.of)

    @property
    def factor_of_plain_sum(self) -> float:
        """The same for a plain sum, as if micro-batches were equal."""
        return self.portion / self.micro.count


_held: list[tuple[Loader, Running]] = []
_numbers = 0
_synced_s = 0.0


def next_number() -> int:
    """Return a number for an update that is about to begin."""
    global _numbers  # noqa: PLW0603 - as one process has one training thread
    _numbers += 1
    return _numbers


def enter(loader: Loader, running: Running) -> None:
    """Say that ``loader`` has given a micro-batch."""
    leave(loader)
    _held.append((loader, running))


def leave(loader: Loader) -> None:
    """Say that the loop over ``loader`` has ended. Idempotent."""
    _held[:] = [held for held in _held if held[0] is not loader]


def current() -> Running | None:
    """Return the micro-batch that the innermost loop is at; None: no loader of ours is read."""
    return _held[-1][1] if _held else None


def trains(adaptation: object) -> None:
    """Say that a model has been stepped with the present micro-batch."""
    if _held:
        _held[-1][0].follow(adaptation)


def note_sync(seconds: float) -> None:
    """Say how long the present micro-batch has waited for gradients to be summed up."""
    global _synced_s  # noqa: PLW0603
    _synced_s += seconds


def take_sync_s() -> float:
    """Return what was waited since the last call, in seconds."""
    global _synced_s
    seconds, _synced_s = _synced_s, 0.0
    return seconds
