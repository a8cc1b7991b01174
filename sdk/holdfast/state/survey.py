"""What a walk over the state finds: named tensors, where they belong, and how to notice a change.

A *survey* is made on a plan change only. Between changes ``Identity.holds`` compares identities,
and what the objects are called, in loops that run in C.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.format.blob import Saved
from holdfast.format.boxes import Box
from holdfast.reading.dtypes import is_freed
from holdfast.state.local_boxes import is_parameter, local_box
from holdfast.state.tensor_looks import LOOKED_AT_ONCE, Looks, kinds


class Home(Enum):
    """Whose segment holds a tensor."""

    SHARED = "shared"  # equal on all ranks: one of them saves it
    FIRST = "first"  # rank 0's value counts: it saves it
    RANK = "rank"  # each rank's own
    HOLDERS = "holders"  # a box that its holders have alike: one of them saves it


class CapturedTensor(NamedTuple):
    """One tensor under its global name, or the box of it that this rank holds.

    ``tensor`` is the memory to copy, ``shape`` that of the whole tensor. If ``home`` says so,
    ``holders`` are the ranks that have the same box, and ``mesh`` those that have any of it: others
    may have another tensor of this name. ``deferred``: only an optimizer's step writes it;
    ``parameter``: autograd counts how often it was written; ``known_to_all``: those of ``mesh``
    that have nothing of it know of it, too; ``idle``: a parameter without gradient, or declared
    frozen, which most likely stays as it is; ``frozen``: declared so, and not seen changed;
    ``outer``: what the state has, if that is not ``tensor`` but a DTensor.
    """

    fqn: str
    tensor: torch.Tensor
    home: Home
    deferred: bool
    shape: tuple[int, ...]
    box: Box
    holders: tuple[int, ...] = ()
    mesh: tuple[int, ...] = ()
    parameter: bool = False
    known_to_all: bool = True
    idle: bool = False
    frozen: bool = False
    outer: torch.Tensor | None = None


Source = Callable[[], Iterable[object]]
_LOCAL = operator.attrgetter("_local_tensor")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class Identity:
    """The objects that a survey saw, in order, and where its tensors lay.

    Holds references, so no id is used twice. Places of *all* tensors count, of those too that
    another rank saves: all ranks share them out anew when ``.data =`` changes a size. ``places`` is
    another list each time ``holds`` found that a tensor lies elsewhere, or otherwise.
    """

    places: Sequence[torch.Tensor]

    def __init__(self, survey: Survey) -> None:
        self._sources, self._keys = survey.sources, survey.keys
        self._seen, self._called = self._now(self._sources), self._now(self._keys)
        self._tensors = [captured.tensor for captured in survey.tensors]
        self._learning = survey.learning
        self._look()

    def holds(self) -> bool:
        """Tell whether every source still gives the very same objects, of the same sizes.

        And on the same devices, for ``Module.to`` keeps its parameters and gives them other memory;
        and whether they are called as they were: equal texts are the same, whichever objects.
        """
        now = self._now(self._sources)
        if len(now) != len(self._seen) or not all(map(operator.is_, now, self._seen)):
            return False
        if self._now(self._keys) != self._called:
            return False
        with torch.enable_grad():  # in `no_grad` nothing seems to require a gradient
            if all(map(Looks.hold, self._parts)):
                return True
        if any(map(is_freed, self._tensors)):
            return False
        before = self._kinds, self._grads
        self._look()
        return (self._kinds, self._grads) == before

    def let_go(self) -> None:
        """Keep no memory that a script lets go: for whom ``places`` do not matter."""
        self.places = ()

    def _look(self) -> None:
        tensors = self._tensors
        self._kinds, self._grads = kinds(tensors), list(map(_REQUIRES_GRAD, self._learning))
        self.places = [tensor.detach() for tensor in tensors if is_near(tensor)]
        size = LOOKED_AT_ONCE
        with torch.enable_grad():
            self._parts = [Looks(tensors[i : i + size]) for i in range(0, len(tensors), size)]

    @staticmethod
    def _now(sources: Iterable[Source]) -> list[object]:
        found: list[object] = []
        for source in sources:
            found.extend(source())
        return found


def is_near(tensor: torch.Tensor) -> bool:
    """Tell whether a second tensor of the same memory may be kept, so that its place stays taken.

    Not on a device, where it would hold memory that a script has let go; not of a subclass that
    answers for its memory itself.
    """
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return plain and tensor.is_cpu


@dataclass(slots=True)
class Survey:
    """All that does not change from save to save; built by one walk, then left alone.

    ``sources`` give what must stay the same object, ``keys`` the names and counts that go with it;
    of those of ``tensors`` that are ``learning``, whether they require a gradient must, too.
    ``elsewhere`` are the places of what is kept, of parameters that are here, by other ranks alone;
    ``dealt`` the optimizers that deal their parameters out to ranks. ``declared`` are the ids of
    tensors declared frozen, ``thawed`` names of such that have changed all the same.
    ``takes_over``: something wants the states of ranks that are no more, too.
    """

    declared: Collection[int] = frozenset()
    thawed: Collection[str] = frozenset()

    tensors: list[CapturedTensor] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    static: dict[str, Saved] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)
    keys: list[Source] = field(default_factory=list)
    fqn_of: dict[int, str] = field(default_factory=dict)
    home_of: dict[int, Home] = field(default_factory=dict)
    extras: list[tuple[str, nn.Module]] = field(default_factory=list)
    loose: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    dealt: set[str] = field(default_factory=set)
    takes_over: bool = False
    mesh_of: dict[int, tuple[int, ...]] = field(default_factory=dict)
    holders_of: dict[int, int] = field(default_factory=dict)
    learning: list[torch.Tensor] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _sharded: list[torch.Tensor] = field(default_factory=list)

    def add(
        self,
        fqn: str,
        tensor: torch.Tensor,
        *,
        home: Home,
        deferred: bool,
        mesh: tuple[int, ...] = (),
        holders: tuple[int, ...] | None = None,
        of: torch.Tensor | None = None,
        known_to_all: bool = True,
    ) -> None:
        """Take ``tensor`` in under ``fqn``; the second name of one tensor becomes an alias.

        Args:
            fqn: Its name.
            tensor: A plain one, or a DTensor or a piece of a flattened one: then where it belongs
                is known, whatever ``home`` is.
            home: Whose segment holds it.
            deferred: Only an optimizer's step writes it.
            mesh: The ranks that hold it, if ``home`` is ``HOLDERS``.
            holders: Those of them of which one saves it; None: any may.
            of: The parameter of which an optimizer keeps it.
            known_to_all: Those of ``mesh`` that have nothing of it know of it, too.

        Raises:
            InvalidRequestError: its name is taken, or it cannot be saved; see ``local_box``.
        """
        here = local_box(fqn, tensor, of)
        holders = mesh if holders is None else holders
        if here.holders is not None:
            home, holders, mesh = Home.HOLDERS, here.holders, here.mesh
        if fqn in self._names:
            raise InvalidRequestError(
                f"two tensors of the state have the same name {fqn!r}: rename one of them", key=fqn
            )
        self._names.add(fqn)
        known = self.fqn_of.get(id(tensor))
        if known is not None:
            self.aliases[fqn] = known
            return
        self.fqn_of[id(tensor)] = fqn
        self.home_of[id(tensor)] = home
        if mesh:
            self.mesh_of[id(tensor)], self.holders_of[id(tensor)] = mesh, len(holders)
        if here.tensor is not tensor:
            self._sharded.append(tensor)
            if len(self._sharded) == 1:
                # What a module's ``to()`` replaces is not the DTensor but what is in it.
                self.sources.append(lambda: map(_LOCAL, self._sharded))
        declared, parameter = id(tensor) in self.declared, is_parameter(tensor)
        self.tensors.append(
            CapturedTensor(
                fqn, here.tensor, home, deferred, here.shape, here.box, holders, mesh,
                parameter=parameter,
                known_to_all=known_to_all,
                idle=declared or (parameter and not tensor.requires_grad),
                frozen=declared and fqn not in self.thawed,
                outer=None if here.tensor is tensor else tensor,
            )
        )  # fmt: skip

    def watch_gradients(self, stepped: Collection[torch.Tensor]) -> None:
        """Have it noticed when one of the parameters ``stepped`` is trained no more, or is again.

        All other tensors were added before.
        """
        looked_at = {id(captured.tensor) for captured in self.tensors}
        self.learning += [p for p in stepped if id(p) in looked_at]
        apart = [p for p in stepped if id(p) not in looked_at]
        if apart:
            self.sources.append(lambda: map(_REQUIRES_GRAD, apart))
