"""Where a data loader is: its random stream, its live iterator, and how that is made again.

Making an iterator draws from the global generator (base seed, shuffle seed). A *live* iterator,
made before the save and not exhausted, was paid for by the original run already, so making it
again after a restore must not show. ``LoaderClock`` holds that rule for all loaders of a capture;
a loader that was not live draws from the restored stream like the original did.

An iterator is made again by *replay*: under the streams and places of the time it was made, the
batches already used are drawn once more. For that, its draws must not depend on the training
loop's: from the second batch on it draws from a stream apart. Where ranks have changed, what is
left of its epoch is dealt out anew instead (``deals``), and nothing is drawn twice.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch.utils.data import DataLoader

from holdfast.errors import InvalidRequestError, PreconditionError
from holdfast.state import rng
from holdfast.state.dealing import Order
from holdfast.state.deals import (
    ALONE,
    Dealing,
    Deals,
    Swap,
    deals_of,
    not_known,
    not_named,
    not_shared,
    told,
)
from holdfast.state.loader_makes import (
    check_loader,
    check_make,
    continues_by_itself,
    is_made_alike,
    make_of,
)
from holdfast.state.places import Marks, Places

log = logging.getLogger(__name__)


class LoaderClock:
    """Knows whether a batch was drawn since the restore, and which stream the restore set.

    ``world``: this rank, and how many there are. It knows no loader: one that is part of a cycle is
    let go by a collection only, and may wait 5 s there for each of its workers to end.
    """

    def __init__(self, world: tuple[int, int] = (0, 1)) -> None:
        self.world = world
        self.restored: Callable[[], None] | None = None
        self._has_drawn = False

    def arm(self, restored: Callable[[], None]) -> None:
        """From now on ``restored()`` sets the stream again, until the first batch."""
        self.restored, self._has_drawn = restored, False

    def drew(self) -> None:
        """Note that a loader has given a batch."""
        self._has_drawn = True

    def after_resume(self, before: rng.Stream) -> None:
        """Set the stream that the trainer must see after a live iterator was made again."""
        if self.restored is None or self._has_drawn:
            rng.put(before)
        else:
            self.restored()


class Resumable(Protocol):
    """A loader as a capture sees it."""

    def bind(self, clock: LoaderClock) -> None:
        """Take part in the rule of ``LoaderClock``."""

    def save_state(self) -> object:
        """Return plain data and tensors, without touching the random stream."""

    def load_state(self, state: object) -> None:
        """Continue from ``state`` with the next iterator."""


class Position:
    """Where one loader is: its live iterator, or what is left of the one to be made again.

    Args:
        loader: What is iterated over.
        make: Makes the loader's own iterator.
        counted: The training loop counts batches and never asks for one more than there are.
        what: Its name, for errors.
        beside: Other loaders that are drawn from with it.
        deals: Deal out what is left of an epoch to another number of ranks. Not where the loop
            counts on as many batches as it was promised.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        make: Callable[[], Any],
        *,
        counted: bool = False,
        what: str = "a data loader",
        beside: Sequence[DataLoader[Any]] = (),
        deals: bool = True,
    ) -> None:
        self._loaders = (loader, *beside)
        for one in self._loaders:
            check_loader(one, what)
        self._what = what
        self._taken_in_turn = False
        self.places = Places(*self._loaders)
        self.clock: LoaderClock | None = None
        self._loader = loader
        self._make = make
        self._counted = counted
        self._left_by_counting = False
        self._current: weakref.ref[Epoch] | None = None
        self._resume: dict[str, Any] | None = None
        self._may_deal = deals
        self._deals: Deals | None = None if beside or not deals else deals_of(loader)
        self._rest: Dealing | None = None
        self._is_dealt_anew = False
        self._swap: Swap | None = None
        self._over: dict[str, Any] | None = None
        self._is_over_restored = False

    @property
    def _world(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        if self.clock is not None:
            return self.clock.world
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def begin(self) -> Epoch:
        """Return the next iterator: one that was live in the checkpoint, or a new one."""
        self._note_end()
        self.swap_back()
        resume, self._resume = self._resume, None
        if resume is None:
            resume = self._what_others_end()
        self._over = None
        if resume is None:
            epoch = Epoch(self, made=self.places.take(), stream=rng.take())
            epoch.inner = self._made()
        else:
            before = rng.take()
            epoch = self._anew(resume) if self._is_dealt_anew else self._again(resume)
            if self.clock is not None:
                self.clock.after_resume(before)
            else:
                rng.put(before)
        self._current = weakref.ref(epoch)
        if self._deals is not None and self._deals.begins_at_once:
            self.note_deal(epoch)
        return epoch

    def _what_others_end(self) -> dict[str, Any] | None:
        """Return the state of an epoch without anything left, if it is the next pass; else None.

        A rank that has a batch less than others may have asked for one more when these were in
        their last step. That was saved: the script is in that epoch still, and begins it again.

        Raises:
            InvalidRequestError: the epoch had ended here for all.
        """
        over, deals = self._over, self._deals
        if over is None or deals is None or deals.uneven_epoch != over["order"]["epoch"]:
            return None
        if not (over["is_short"] and self._is_over_restored):
            raise InvalidRequestError(not_named(over["order"]["epoch"]))
        self._rest, self._is_dealt_anew = deals.nothing(Order(**over["order"])), True
        return {"now": self.places.take()}

    def ended(self, epoch: Epoch) -> None:
        """Note that an iterator has nothing left, though others may have where they are uneven."""
        self.swap_back()
        if self._deals is None or self._deals.uneven_epoch is None:
            return
        self.note_deal(epoch)
        if epoch.dealt is not None:
            self._over = {"order": asdict(epoch.dealt.order), "is_short": epoch.dealt.is_short}
            self._is_over_restored = False

    def note_deal(self, epoch: Epoch) -> None:
        """Note what an iterator deals out, which the script may change for the next one."""
        if self._deals is not None and epoch.dealt is None:
            epoch.dealt = self._deals.begun(
                alone=self._world[1] == 1, made=epoch.stream, first=epoch.first
            )

    def drew(self, epoch: Epoch) -> None:
        """Note that an iterator gave a batch: which one lives cannot be told if it is not the last.

        An older one that is kept and never drawn from does no harm: scripts look at a first batch.
        """
        if self.clock is not None:
            self.clock.drew()
        if not self._taken_in_turn and (self._current is None or self._current() is not epoch):
            self._taken_in_turn = True
            log.error("%s; training goes on, but nothing is saved from now on", self._refusal())

    def _refusal(self) -> str:
        return (
            f"two iterators of {self._what} are used in turn, but only one can be restored: make "
            f"another DataLoader for the second, for example for evaluation inside an epoch"
        )

    def is_used_up(self) -> bool:
        """Tell whether the live iterator has given as many batches as the loader says it has."""
        epoch = self._current() if self._current is not None else None
        return epoch is not None and epoch.is_used_up()

    def left(self, epoch: Epoch) -> None:
        """Note that an iterator went away."""
        self._left_by_counting = not epoch.ended and epoch.is_used_up()

    def _note_end(self) -> None:
        """Remember, before a new iterator is made, whether the one before was left by counting."""
        epoch = self._current() if self._current is not None else None
        if epoch is not None:
            self.left(epoch)
        if self._left_by_counting and not self._counted:
            self._counted = True
            log.warning(
                "the training loop counts the batches of a data loader and does not exhaust it; a "
                "restart from the last step of the first epoch would begin with an empty epoch: "
                "use holdfast.ResumableLoader(loader, counted=True)"
            )
        self._left_by_counting = False

    def save(self) -> dict[str, object]:
        """Return plain data and tensors, without touching the random stream.

        Raises:
            InvalidRequestError: an iterator was drawn from after a newer one had been made.
        """
        if self._taken_in_turn:
            raise InvalidRequestError(self._refusal())
        if self._resume is not None:
            return self._resume
        epoch = self._current() if self._current is not None else None
        state: dict[str, object] = {
            "now": self.places.take(),
            "live": False,
            "counted": self._counted,
            "over": self._over,
        }
        if epoch is None or epoch.ended or (self._counted and epoch.is_used_up()):
            return state
        by_itself = continues_by_itself(self._loader) and hasattr(epoch.inner, "state_dict")
        by_itself = by_itself and not epoch.anew
        own = epoch.inner.state_dict() if by_itself else None
        return state | {
            "live": True,
            "made": epoch.made,
            "stream": epoch.stream,
            "first": epoch.first or epoch.stream,  # so that a save has always the same tensors
            "apart": epoch.apart.take() if epoch.apart else rng.without_devices(epoch.stream),
            "count": epoch.count,
            "failed": list(epoch.failed),
            "own": own,
            "make": [make_of(loader) for loader in self._loaders],
            "dealt": epoch.told_dealt(),
            "anew": epoch.anew,
            "world": list(self._world),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state`` with the next iterator.

        Raises:
            InvalidRequestError: it was saved inside an epoch that cannot be gone on with here.
        """
        self._is_dealt_anew = bool(state["live"]) and self._must_deal(state)
        self._current = None
        self._taken_in_turn = False
        self._counted = self._counted or bool(state["counted"])
        self._resume = dict(state) if state["live"] else None
        self._over, self._is_over_restored = state.get("over"), True
        self.places.put(state["now"])

    def _must_deal(self, state: Mapping[str, Any]) -> bool:
        """Tell whether the rest of an epoch must be dealt out anew, and note it."""
        saved, self._rest = state.get("dealt"), None
        alike = list(self._world) == state.get("world", list(self._world))
        alone = self._world[1] == 1
        shared = self._deals is not None and self._deals.is_shared
        own = saved is None or (saved["order"]["of"] == ALONE and not state["anew"])
        if saved is not None and (alone or shared or not own):
            if self._deals is None:
                raise InvalidRequestError(not_shared(self._loader, saved["ranks"]))
            self._rest = self._deals.rest(saved, alone=alone)
            alike = alike and not self._deals.is_dealt_anew(saved, self._rest)
            return not (alike and is_made_alike(self._loader, *state["make"]))
        if shared and "dealt" in state:
            if state["count"]:
                raise InvalidRequestError(not_known(state["world"][1]))
            return not alike  # nothing is on its way yet, and nothing was used
        for loader, make in zip(self._loaders, state["make"], strict=True):
            check_make(loader, make)
        if not alike and self._may_deal:
            log.warning("%s", told(self._loader, state["world"][1], self._world[1]))
        return False

    def _anew(self, resume: dict[str, Any]) -> Epoch:
        """Begin with what all ranks have left of the epoch; what they have used is not drawn."""
        self.places.put(resume["now"])
        epoch = Epoch(self, made=self.places.take(), stream=rng.take())
        epoch.dealt, epoch.anew = self._rest, self._rest is not None
        epoch.inner = self._made_of(epoch)
        return epoch

    def _made(self) -> Any:
        if self._deals is not None:
            self._deals.prepare()
        return self._make()

    def _made_of(self, epoch: Epoch) -> Any:
        if not epoch.anew:
            return self._made()
        assert self._deals is not None
        assert epoch.dealt is not None
        self._swap = swap = self._deals.swap(epoch.dealt)
        inner = self._make()
        if swap.is_taken_by(inner):
            self.swap_back()
        return inner

    def swap_back(self) -> None:
        """Let the next iterator be of the loader's own sampler again.

        Raises:
            PreconditionError: the one that was made did not take its indices from the rest.
        """
        swap, self._swap = self._swap, None
        if swap is not None:
            swap.back()

    def _again(self, resume: dict[str, Any]) -> Epoch:
        own = resume["own"]
        self.places.put(resume["made" if own is None else "now"])
        rng.put(resume["stream"])
        epoch = Epoch(self, made=resume["made"], stream=resume["stream"])
        epoch.anew = resume.get("anew", False)
        if resume.get("dealt") and self._deals is not None:
            epoch.dealt = self._deals.read(resume["dealt"])
        if own is None:
            epoch.inner = self._made_of(epoch)
            first = resume["first"] if resume["count"] else None
            epoch.skip(resume["count"], first, resume.get("failed", ()))
            self.places.put(resume["now"])
        else:
            cast("Any", self._loader).load_state_dict(own)
            epoch.inner = self._made()
            epoch.count = resume["count"]
            epoch.first = resume["first"] if epoch.count else None
            # Values are left alone: parts keep there what they were told until they begin.
            self.places.put_generators(resume["now"])
        if epoch.count:
            epoch.apart = rng.Apart()
            epoch.apart.put(resume["apart"])
        return epoch


class Epoch:
    """The iterator that a training loop is given: counts, and keeps its draws apart.

    ``made`` and ``stream`` are places and streams before the loader's own iterator was made,
    ``first`` the stream before the first batch. ``failed``: numbers of the batches that
    raised an error; they are counted. ``dealt``: what it deals out, if that is known; ``anew``: it
    was told what, and its sampler says something else.
    """

    inner: Any

    def __init__(self, owner: Position, *, made: Marks, stream: rng.Stream) -> None:
        self.made = made
        self.stream = stream
        self.first: rng.Stream | None = None
        self.apart: rng.Apart | None = None
        self.count = 0
        self.failed: list[int] = []
        self.ended = False
        self.dealt: Dealing | None = None
        self._dealt_value: dict[str, object] | None = None
        self.anew = False
        self._owner = owner

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.inner)

    def __next__(self) -> Any:
        batch = self._next()
        self._owner.drew(self)
        return batch

    def __del__(self) -> None:
        self._owner.left(self)

    def told_dealt(self) -> dict[str, object] | None:
        """Return as plain data what it deals out, and how much of that all ranks have used."""
        if self.dealt is None:
            return None
        if self._dealt_value is None:
            self._dealt_value = self.dealt.value()
        return {**self._dealt_value, **self.dealt.after(self.count)}

    def is_used_up(self) -> bool:
        """Tell whether as many batches were drawn as the loader says that it has."""
        try:
            whole = self.dealt.batches if self.dealt is not None else len(self.inner)
        except (AttributeError, TypeError):
            return False  # an iterable dataset need not know
        return self.count >= whole > 0

    def skip(self, count: int, first: rng.Stream | None, failed: Collection[int]) -> None:
        """Draw and drop ``count`` batches, of which ``failed`` may fail again.

        ``first`` is the stream before the first one.
        """
        if first is not None:
            # Without workers the sampler draws its seed at the first batch, not before.
            rng.put(first)
        for done in range(count):
            try:
                with suppress(Exception) if done in failed else nullcontext():
                    self._next()
            except StopIteration as cause:
                raise PreconditionError(
                    f"the data loader ended after {done} batches, but training had used {count} "
                    f"before the checkpoint: its data have changed; restore with the same data"
                ) from cause

    def _next(self) -> Any:
        number = self.count
        try:
            if self.apart is None:
                self.first = rng.take()
                batch = next(self.inner)
            else:
                with self.apart.used():
                    batch = next(self.inner)
        except StopIteration:
            self.ended = True
            self._owner.ended(self)
            raise
        except Exception:  # of the dataset: the loader goes on, so whoever catches it may too
            self.failed.append(number)
            self._count()
            raise
        self._count()
        return batch

    def _count(self) -> None:
        self.count += 1
        if self.apart is None:
            self.apart = rng.Apart()  # before the training loop draws
            self._owner.swap_back()
            self._owner.places.look()
            self._owner.note_deal(self)
