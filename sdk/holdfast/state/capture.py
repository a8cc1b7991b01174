"""The user's state mapping bound to one rank: walked, named, taken, put back.

Two kinds of state come out of it. The *survey* holds tensors with a lasting identity (modules,
optimizer state); it is made again only when ``Survey`` identities change. The *live* part is
everything else (plain data, groups, schedulers, scalers, loaders, RNG): taken at every save, on
the caller's thread, as JSON and a few tensors.

Which rank loads what: replicated tensors are found by name and box, whoever saved them. State of
one rank goes to the rank of the same number; rank ``r`` of a bigger world takes that of
``r % saved world size``. The random streams are restored exactly in the same world size; in another
one they are derived from (saved seed of rank 0, step, r), and ``load_parts`` gets those of others.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.core.budget import restored_bytes_of_part
from holdfast.errors import InvalidRequestError
from holdfast.format import blob as blobs
from holdfast.format.names import EXTRA_PREFIX, RESERVED
from holdfast.format.segment import TensorSpec
from holdfast.format.tree import Json
from holdfast.reading.reader import Segments
from holdfast.state import State, kinds, modules, optimizers, rng
from holdfast.state import ddp_buckets as buckets
from holdfast.state.boxes_here import LocalBoxes
from holdfast.state.dataloaders import ResumableLoader, StatefulLoader
from holdfast.state.frozen import declared_count, declared_tensors
from holdfast.state.inner_optimizers import announcing, dealt_out
from holdfast.state.kinds import Kind, Surveying, Taking, named
from holdfast.state.layouts import dims_in_memory
from holdfast.state.loader_makes import is_stateful_loader
from holdfast.state.loading import Differences, Loading
from holdfast.state.owners import Owners
from holdfast.state.positions import LoaderClock, Resumable
from holdfast.state.survey import Home, Identity, Survey
from holdfast.state.walk import Walk

_HEADER_BYTES_PER_TENSOR = 320
_BLOB_BYTES_MIN = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes of this rank's segment, and of a checkpoint of the same world size.

    Before anything is made. ``loaded_bytes`` are those of the tensors that this rank has to load;
    ``names_needs``: it can say which these are.
    """

    own_bytes: int
    loaded_bytes: int
    whole_bytes: int
    names_needs: bool

    def restored_bytes(self, *, named: bool, local_world_size: int, replicas: int) -> int:
        """Return what a node has to have of a checkpoint at once; ``named``: ranks name needs."""
        if not (named and self.names_needs):
            return self.whole_bytes
        return restored_bytes_of_part(
            own_bytes=self.own_bytes * local_world_size,
            loaded_bytes=self.loaded_bytes * local_world_size,
            whole_bytes=self.whole_bytes,
            replicas=replicas,
        )


@dataclass(slots=True)
class LiveState:
    """What one save takes besides the surveyed tensors, by global name.

    ``specs`` say how those of ``tensors`` are stored that are not whole ones of this rank's own.
    """

    text: bytes
    tensors: dict[str, torch.Tensor]
    objects: dict[str, Any]
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)


class Capture:
    """The user's state mapping bound to this rank.

    Invariants: the mapping stays the user's; it is read at every save and written by ``load``
    only. Data loaders of torchdata get a subclass of their own until ``release``.

    Raises:
        InvalidRequestError: a value that cannot be saved (yet), named by its key; two State
            objects of one name; a plain torch ``DataLoader``.
    """

    def __init__(
        self,
        state: MutableMapping[str, object],
        *,
        rank: int,
        world_size: int,
        rng: bool = True,
    ) -> None:
        self.state = state
        self.rank = rank
        self.world_size = world_size
        self._rng = rng
        self._clock = LoaderClock((rank, world_size))
        self._loaders: dict[int, Resumable] = {}
        self._restored: Callable[[], None] | None = None
        self._objects: dict[str, Any] = {}
        self._known: dict[int, tuple[object, Kind]] = {}
        self._handlers_count = 0
        self._trained: dict[str, tuple[Optimizer, Mapping[int, str]]] = {}
        self._written: set[str] = set()
        self._frozen: dict[str, weakref.ref[torch.Tensor]] = {}
        self._thawed: set[str] = set()
        self._changed: dict[str, str] = {}
        self._orders: dict[str, buckets.BucketOrder] = {}
        self._found: Survey | None = None
        self._seen: Identity | None = None
        self.check()

    def check(self) -> None:
        """Take the mapping as it is now, and as it stays until ``forget``: it is not walked again.

        Raises:
            InvalidRequestError: as the class says.
        """
        objects = self._walk().objects
        _check_names(objects)
        alike = self._are_same(objects) and self._handlers_count == kinds.handlers_count()
        if self._seen is None or not alike or not self._seen.holds():
            self._found = survey = self.survey()
            self._seen = Identity(survey)
            self._seen.let_go()

    def forget(self) -> None:
        """Let go of what ``check`` has found: the mapping may change from here on."""
        self._found = self._seen = None

    def _checked(self) -> Survey:
        return self.survey() if self._found is None else self._found

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Every captured torch optimizer that steps, in order; the gate watches them."""
        return [announcing(optimizer) for optimizer in self._optimizers]

    @property
    def _optimizers(self) -> Sequence[Optimizer]:
        return [value for value in self._objects.values() if isinstance(value, Optimizer)]

    @property
    def names_needs(self) -> bool:
        """Whether this rank can say what of a checkpoint it needs, because that is a part of it.

        It shares no tensor with another, or has boxes of tensors that others hold, too.
        """
        return self._names_needs(self._checked())

    def _names_needs(self, survey: Survey) -> bool:
        alone = all(tensor.home is Home.RANK for tensor in survey.tensors)
        cut = alone or bool(survey.mesh_of or survey.elsewhere)
        return self.world_size > 1 and bool(survey.tensors) and cut

    @property
    def boxes(self) -> LocalBoxes | None:
        """What is here of the tensors that several ranks hold; None: there are no such tensors."""
        survey = self._checked()
        if not (survey.mesh_of or survey.elsewhere) or self.world_size == 1:
            return None
        return LocalBoxes.of(survey)

    def survey(self) -> Survey:
        """Walk modules and optimizers anew and name their tensors."""
        self.forget()
        self._objects = objects = self._walk().objects
        stepped = {id(p): p for o in self._optimizers for p in optimizers.parameters(o)}
        survey = Survey(declared=declared_tensors(), thawed=self._thawed)
        self._handlers_count = kinds.handlers_count()
        found = {path: kinds.kind_of(path, value) for path, value in objects.items()}
        self._known = {id(objects[path]): (objects[path], k) for path, k in found.items() if k}
        at = Surveying(
            survey=survey,
            rank=self.rank,
            replicated=self.world_size == 1,
            deferred=lambda fqn, tensor: (
                id(tensor) in stepped and tensor.requires_grad and fqn not in self._written
            ),
            found_module=lambda path, module: self._find_orders(survey, path, module),
        )
        survey.keys.append(lambda: [declared_count()])
        for path, value in self._in_turn(objects):
            self._kind(path, value).survey(at, path, value)
        self._watch_frozen(survey)
        survey.watch_gradients(stepped.values())
        self._check_trained(survey)
        return survey

    def _watch_frozen(self, survey: Survey) -> None:
        """Note what is frozen, and what stands in the place of another that was."""
        frozen = {
            t.fqn: t.tensor if t.outer is None else t.outer for t in survey.tensors if t.frozen
        }
        survey.watch_gradients(frozen.values())
        for fqn, tensor in frozen.items():
            before = self._frozen.get(fqn)
            if before is not None and before() is not tensor:
                self._changed[fqn] = "was replaced by another one, which is copied"
        self._frozen = {fqn: weakref.ref(tensor) for fqn, tensor in frozen.items()}

    def _check_trained(self, survey: Survey) -> None:
        """Refuse an optimizer that trains what the model has replaced since the last survey."""
        trained: dict[str, tuple[Optimizer, Mapping[int, str]]] = {}
        for path, value in self._objects.items():
            if isinstance(value, Optimizer):
                last, names = self._trained.get(path, (None, {}))
                optimizers.check_trained(path, value, names if last is value else {}, survey)
                trained[path] = value, optimizers.names_of(value, survey)
        self._trained = trained

    def _find_orders(self, survey: Survey, path: str, root: nn.Module) -> None:
        for name, ddp in modules.wrappers(path, root):
            known = self._orders.get(name)
            if buckets.is_rebuilt(ddp) and (known is None or known.ddp is not ddp):
                self._orders[name] = known = buckets.BucketOrder(
                    ddp, lambda p: survey.fqn_of.get(id(p), "")
                )
            if known is not None and self.rank == 0:  # whom torch, too, makes speak for all
                survey.sources.append(lambda order=known: [order.known()])  # type: ignore[misc]

    def put_orders(self, segments: Segments) -> list[str]:
        """Let DDP add gradients up in the order of the run that was saved; collective.

        Returns:
            For each wrapper for which it cannot be done, its name and why.
        """
        if not self._orders:
            return []
        saved = blobs.decode(segments.blob(0)).static.buckets or {}
        reasons = {
            name: order.put(saved[name]) for name, order in self._orders.items() if name in saved
        }
        return [f"{name}: {reason}" for name, reason in reasons.items() if reason]

    def never_defer(self, fqns: Iterable[str]) -> None:
        """Copy these parameters before a save returns from now on: others write them too."""
        self._written.update(fqns)

    def thaw(self, fqns: Iterable[str], why: str) -> None:
        """Take these for frozen no more: they have changed, as ``why`` says."""
        for fqn in fqns:
            self._thawed.add(fqn)
            self._changed[fqn] = f"{why}: it is copied at each save from now on"

    @property
    def surprises(self) -> Sequence[str]:
        """What has changed though it was declared frozen: for each way, one sentence."""
        by_way: dict[str, list[str]] = {}
        for fqn, what in self._changed.items():
            by_way.setdefault(what, []).append(fqn)
        return [
            f"tensor {first!r} was declared frozen and {what}"
            + (f"; so it is with {len(more)} more, such as {more[0]!r}" if more else "")
            for what, (first, *more) in by_way.items()
        ]

    def identity(self, survey: Survey) -> Identity:
        """Return what must stay the same for ``survey`` to hold."""
        return Identity(survey)

    def same_objects(self, live: LiveState) -> bool:
        """Tell whether ``live`` was taken of the very objects of the last survey."""
        return self._are_same(live.objects)

    def _are_same(self, objects: Mapping[str, object]) -> bool:
        return list(objects) == list(self._objects) and all(
            map(operator.is_, objects.values(), self._objects.values())
        )

    def live(self, survey: Survey) -> LiveState:
        """Take everything that is not in the survey, as of now.

        Raises:
            InvalidRequestError: a value that only pickle could express, or an object in the state
                of another one; named by its path.
        """
        walk = self._walk()
        objects = dict(walk.objects)
        groups: dict[str, Json] = {}
        loose: dict[str, Json] = {}
        saved: dict[str, Json] = {}
        extra: dict[str, Json] = {}
        for name, module in survey.extras:
            with named("taking", name):
                extra[name] = walk.encode(module.get_extra_state(), f"{EXTRA_PREFIX}{name}")
        at = Taking(
            survey=survey, encode=walk.encode, loaders=self._loaders,
            groups=groups, loose=loose, objects=saved,
        )  # fmt: skip
        for path, value in objects.items():
            with named("taking", path):
                self._kind(path, value).live(at, path, value)
        streams = walk.encode(rng.take(), "holdfast.rng") if self._rng else None
        _check_no_more(walk.objects, objects)
        turned = ((name, t) for name, t in walk.tensors.items() if not t.is_contiguous())
        live = blobs.Live(
            tree=walk.tree, groups=groups, loose=loose, objects=saved, extra=extra, rng=streams,
            layouts={name: dims_in_memory(tensor) for name, tensor in turned},
        )  # fmt: skip
        return LiveState(live.encode(), walk.tensors, objects)

    def static_text(self, survey: Survey) -> bytes:
        """Return the part of the blob that stays the same while the survey holds."""
        speaks = self.rank == 0 and self._orders
        meshes = {t.mesh for t in survey.tensors if t.mesh and len(t.mesh) < self.world_size}
        return blobs.Static(
            objects=survey.static,
            aliases=survey.aliases,
            world_size=self.world_size,
            buckets={name: order.known() for name, order in self._orders.items()}
            if speaks
            else None,
            meshes=sorted(meshes) if self.world_size > 1 else None,
        ).encode()

    def estimate(self) -> Estimate:
        """Return the bytes to reserve: state as known, else as its optimizer's class makes it."""
        survey = self._checked()
        shared = own = loaded = everywhere = 0

        def count(here: int, home: Home, holders: int, mesh: Sequence[int], of_mesh: int) -> None:
            nonlocal shared, own, loaded, everywhere
            loaded += here
            if home in (Home.SHARED, Home.FIRST):
                shared += here
                everywhere += here
            else:
                own += -(-here // holders)
                # Not this rank's times the others: of a tensor of few rows it may have none.
                everywhere += of_mesh * (self.world_size // max(1, len(mesh)))

        for t in survey.tensors:
            here, whole = t.tensor.nbytes, math.prod(t.shape) * t.tensor.element_size()
            each = t.home is not Home.HOLDERS or not t.shape
            count(here, t.home, 1 if each else len(t.holders), () if each else t.mesh, whole)
        for optimizer in self._optimizers:
            homes = {survey.home_of.get(id(p)) for p in optimizers.parameters(optimizer)}
            group = dealt_out(optimizer)
            home = Home.SHARED if homes == {Home.SHARED} and not group else Home.RANK
            for p, here, whole in optimizers.expected_state(optimizer):
                mesh = group or survey.mesh_of.get(id(p), ())
                holders = 1 if group else survey.holders_of.get(id(p), 1)
                count(here, home, holders, mesh, whole)
        walk = self._walk()
        rest = sum(tensor.nbytes for tensor in walk.tensors.values()) + _BLOB_BYTES_MIN
        rest += _HEADER_BYTES_PER_TENSOR * len(survey.tensors)
        count(rest, Home.RANK, 1, (), rest)
        return Estimate(
            own_bytes=own + -(-shared // self.world_size),
            loaded_bytes=loaded,
            whole_bytes=everywhere,
            names_needs=self._names_needs(survey),
        )

    def load(
        self,
        segments: Segments,
        *,
        step: int,
        strict: bool = True,
        only: Collection[str] | None = None,
        streams: bool = True,
        knows_all: bool = False,
    ) -> Differences:
        """Put the checkpoint into the mapping, in place; then the random streams.

        Args:
            segments: Where it is read from.
            step: Its step, from which streams of another world size are derived.
            strict: Refuse what is only here, or only there; else load the rest (F20).
            only: Names of the mapping to load; what is under others is left alone.
            streams: Put the random streams in place too, if they are captured.
            knows_all: What is here was chosen by the headers of all ranks.

        Returns:
            What was only here, and only there; nothing if ``strict``.

        Raises:
            NotReadyError: a tensor is missing; named with its box.
            InvalidRequestError: the state here has another structure than the saved one.
        """
        source = self.rank if self.rank < segments.world_size else self.rank % segments.world_size
        blob = blobs.decode(segments.blob(source))
        owners = Owners(segments, blob, source, world_size=self.world_size, knows_all=knows_all)
        loading = Loading(
            self.state, segments, blob, owners, rank=self.rank, strict=strict, only=only
        )
        survey = self._checked()
        restored = None
        if streams and self._rng and blob.live.rng is not None:
            restored = self._rng_setter(segments, blob.live.rng, loading, step)
        objects = dict(self._in_turn(self._objects))
        loading.run(survey, objects, self._walk().tensors, self._loaders, self._kind)
        if restored is not None:
            self._restored = restored
            self._clock.arm(restored)
            restored()
        return loading.differences

    def apply_rng(self) -> None:
        """Set the restored random streams again; nothing if there was no restore."""
        if self._restored is not None:
            self._restored()

    def release(self) -> None:
        """Give captured torchdata loaders their own class back."""
        for loader in self._loaders.values():
            if isinstance(loader, StatefulLoader):
                loader.release()

    def _rng_setter(
        self, segments: Segments, saved: Json, loading: Loading, step: int
    ) -> Callable[[], None]:
        if segments.world_size != self.world_size:
            first = blobs.decode(segments.blob(0)).live.rng
            saved_seed = first.get("seed") if isinstance(first, dict) else None
            seed = saved_seed if type(saved_seed) is int else 0
            return partial(rng.put_derived, seed=seed, step=step, rank=self.rank)
        return partial(rng.put, cast("rng.Stream", loading.decode(saved)))

    def _kind(self, path: str, value: object) -> Kind:
        known = self._known.get(id(value))
        found = known[1] if known is not None else kinds.kind_of(path, value)
        assert found is not None, "a value of no kind is no object of the walk"
        return found

    def _in_turn(self, objects: Mapping[str, object]) -> list[tuple[str, object]]:
        return sorted(objects.items(), key=lambda item: self._kind(*item).turn)

    def _walk(self) -> Walk:
        walk = Walk(self._known)
        for key, value in self.state.items():
            if type(key) is not str or key in RESERVED or not key:
                raise InvalidRequestError(
                    f"state key {key!r} cannot be used: use texts, except "
                    f"{' and '.join(sorted(RESERVED))}",
                    key=key,
                )
            walk.take(key, value)
        for path, value in walk.objects.items():
            if id(value) in self._loaders or isinstance(value, (nn.Module, Optimizer)):
                continue
            entry: Resumable | None = value if isinstance(value, ResumableLoader) else None
            if entry is None and is_stateful_loader(value):
                entry = StatefulLoader(value, path=path)
            if entry is not None:
                entry.bind(self._clock)
                self._loaders[id(value)] = entry
        return walk


def _check_no_more(found: Mapping[str, object], objects: Mapping[str, object]) -> None:
    """Refuse an object that came with the state of another one: nobody would save its own."""
    path = next((path for path in found if path not in objects), None)
    if path is not None:
        raise InvalidRequestError(
            f"state {path!r} is a {type(found[path]).__name__} inside the state of another object, "
            f"where only tensors and plain data are saved: put its state_dict() there, or the "
            f"object itself under a key of its own",
            key=path,
        )


def _check_names(objects: Mapping[str, object]) -> None:
    seen: dict[str, str] = {}
    for path, value in objects.items():
        if isinstance(value, State) and seen.setdefault(value.name, path) != path:
            raise InvalidRequestError(
                f"state {path!r} and {seen[value.name]!r} are both named {value.name!r}: give each "
                f"State object a name of its own",
                key=path,
            )
