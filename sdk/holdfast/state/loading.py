"""Puts a checkpoint into the user's mapping: in place, by name, all of it or what matches.

First everything is compared and collected, then read at once, then put in place. Knows the text
that ``capture`` wrote and where tensors come from, not how they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holdfast.errors import InvalidRequestError, NotReadyError
from holdfast.format.blob import SavedOptimizer, StateBlob
from holdfast.format.names import is_under, name_for, own_name, unranked
from holdfast.format.tree import Json, decode
from holdfast.reading.reader import Segments
from holdfast.state import blanks, modules, optimizers
from holdfast.state.deals import check_agreed
from holdfast.state.gathered import GatheredOptimizer, gather
from holdfast.state.inner_optimizers import dealt_out, stepping
from holdfast.state.kinds import Kind, named
from holdfast.state.local_boxes import local, shape_of
from holdfast.state.name_differences import name_differences, numbered_alike
from holdfast.state.other_classes import warn_of_optimizer, warn_of_scheduler
from holdfast.state.owners import Owners, told
from holdfast.state.positions import Resumable
from holdfast.state.sections import Section
from holdfast.state.survey import Home, Survey
from holdfast.state.values import ABSENT, check_keys, make_numpy, merge
from holdfast.state.wants import Wants


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Names of state that is only here (``missing``), or only in the checkpoint."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class Loading:
    """One restore: reads tensors by name, fills objects and containers.

    ``differences`` is complete once ``run`` has returned. Until the first byte is read nothing of
    the user's has changed: what does not match is refused before.
    """

    def __init__(
        self,
        state: MutableMapping[str, object],
        segments: Segments,
        blob: StateBlob,
        owners: Owners,
        *,
        rank: int,
        strict: bool,
        only: Collection[str] | None,
    ) -> None:
        self._state = state
        self._specs = segments.specs()
        self._saved_world_size = segments.world_size
        self._wants = Wants(segments)
        self._owners = owners
        self._rank = rank
        self._strict = strict
        self._only = only
        self._static = blob.static.objects
        self._live = blob.live
        self._objects: Mapping[str, Any] = {}
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._loaders: Mapping[int, Resumable] = {}
        self._survey = Survey()
        self._filled: dict[int, tuple[str, str]] = {}
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._passed_over: set[int] = set()

    @property
    def differences(self) -> Differences:
        """What was only here, and only in the checkpoint, each name once."""
        return Differences(
            missing=tuple(dict.fromkeys(self._missing)),
            unexpected=tuple(dict.fromkeys(self._unexpected)),
        )

    def run(
        self,
        survey: Survey,
        objects: Mapping[str, object],
        tensors: Mapping[str, torch.Tensor],
        loaders: Mapping[int, Resumable],
        kind_of: Callable[[str, object], Kind],
    ) -> None:
        """Fill everything; tensors first, so that whoever looks at them afterwards sees them.

        Args:
            survey: What was just found here.
            objects: Every object of the mapping by path, in the order in which they are loaded.
            tensors: Those beside objects, by path.
            loaders: The captured data loaders by identity.
            kind_of: Tells how a value is saved.
        """
        self._objects, self._loaders, self._survey = objects, loaders, survey
        self._tensors = tensors
        for path, value in self._both(objects).items():
            kind = kind_of(path, value)
            self._check_kind(path, value, kind)
            kind.load(self, path, value)
        self._load_tree()
        self._wants.run()

    def _load_tree(self) -> None:
        self._wants.then(self._wants.read_alone)
        stay = frozenset() if self._strict else frozenset(map(id, self._objects.values()))
        saved = {key: tree for key, tree in self._live.tree.items() if self._chosen(key)}
        for key, tree in saved.items():
            if self._strict or key in self._state:
                held = self.decode(tree)
                if not self._strict:
                    check_keys(self._state[key], held, key)
                self._wants.then(partial(self._merge, key, held, stay))
            else:
                self._unexpected.append(key)
        if not self._strict:
            here = filter(self._chosen, self._state)
            self._missing += [key for key in here if key not in saved]

    def _merge(self, key: str, held: object, stay: Collection[int]) -> None:
        here = self._state.get(key)
        self._state[key] = merge(here, held, key, exact=self._strict, objects=stay)

    def _chosen(self, path: str) -> bool:
        return self._only is None or is_under(path, self._only)

    def _both(self, objects: Mapping[str, object]) -> dict[str, object]:
        """Return the chosen objects that are here and in the checkpoint; note the others."""
        known = dict.fromkeys(filter(self._chosen, [*self._static, *self._live.objects]))
        here = {path: value for path, value in objects.items() if self._chosen(path)}
        lost = [path for path in here if path not in known]
        extra = [path for path in known if path not in here]
        if self._strict and (lost or extra):
            self._check_plain(lost, extra)
            raise InvalidRequestError(
                f"{name_differences('state', lost, extra)}; strict=False loads the rest",
                key=(lost + extra)[0],
            )
        self._missing += lost
        self._unexpected += extra
        return {path: value for path, value in here.items() if path in known}

    def _check_plain(self, lost: Sequence[str], extra: Sequence[str]) -> None:
        """Refuse what is an object on one side and plain data, its state_dict(), on the other."""
        plain_there = next((path for path in lost if path in self._live.tree), None)
        if plain_there is not None:
            raise InvalidRequestError(
                f"state {plain_there!r} is a {type(self._objects[plain_there]).__name__} now and "
                f"was saved as plain data: load it into an empty dict, and give that to "
                f"load_state_dict()",
                key=plain_there,
            )
        plain_here = next((path for path in extra if path in self._state), None)
        if plain_here is not None:
            raise InvalidRequestError(
                f"state {plain_here!r} is a {type(self._state[plain_here]).__name__} now and was "
                f"saved as an object: put the object into the state, not its state_dict()",
                key=plain_here,
            )

    @property
    def loaders(self) -> Mapping[int, Resumable]:
        """See ``kinds.Restoring``."""
        return self._loaders

    def want_module(self, path: str, module: nn.Module, section: Section | None) -> None:
        """See ``kinds.Restoring``."""
        blanks.check_buffers(path, module)
        before = len(self._missing)
        rename = section.name if section else str
        names = self._names(path) if section is None else []  # the others' are on other ranks
        extra = modules.load_module(path, module, self._fill, names, rename)
        lost = self._missing[before:]
        if self._strict and (lost or extra):
            advice = self._advice(names, lost, extra)
            text = f"{name_differences('tensor', lost, extra)}; {advice}"
            if lost:
                raise NotReadyError(text, fqn=lost[0])
            raise InvalidRequestError(text, key=extra[0])
        self._unexpected += extra
        shared = section is not None or self._owners.is_of_section(path)
        for inner, part in modules.extra_states(path, module):
            name = modules.named_in_model(path, inner, rename)
            for rank, blob in self._owners.texts() if shared else self._owners.nearest():
                if name in blob.live.extra:
                    held = self.decode(blob.live.extra[name], rank)
                    self._wants.then(partial(part.set_extra_state, held))
                    break
            else:
                self._only_here(f"{name}.extra_state")

    def _advice(self, names: Sequence[str], lost: Sequence[str], extra: Sequence[str]) -> str:
        """Say what to do about tensors of a module that are only here, or only there.

        Args:
            names: All that were saved below the module's path.
            lost: Those that are only here.
            extra: Those of ``names`` that are only there.
        """
        saved, now = self._saved_world_size, self._owners.world_size
        kept = set(names) - set(extra)
        if saved == now or not (numbered_alike(lost, names) or numbered_alike(extra, kept)):
            return "strict=False loads the rest"
        return (
            f"{saved} ranks saved it and {now} load it: if these are stages of a pipeline, or "
            f"experts, each is to say what its layers are called in the whole model, "
            f"holdfast.Section(module, names), before it is saved; what was saved without comes "
            f"back on {saved} ranks"
        )

    def want_object(self, path: str, value: Any, put: Callable[[Any], None]) -> None:
        """See ``kinds.Restoring``."""
        if isinstance(value, nn.Module):
            blanks.check_own_saving(path, value)
        if id(getattr(value, "optimizer", None)) in self._passed_over:
            self._pass_over(path)  # a scheduler counts for the groups of its optimizer
            return
        tree = self.decode(self._live.objects[path])
        if isinstance(value, LRScheduler) and isinstance(tree, dict):
            warn_of_scheduler(path, value, tree)
        self._wants.then(partial(_put, path, put, tree))

    @property
    def ranks_changed(self) -> bool:
        """See ``kinds.Restoring``."""
        return self._saved_world_size != self._owners.world_size

    def want_parts(self, path: str, value: Any, put: Callable[[Any, list[Any]], None]) -> None:
        """See ``kinds.Restoring``.

        Raises:
            NotReadyError: the text of a rank that falls to this one is not here.
        """
        texts = dict(self._owners.texts())
        ranks = range(self._rank, self._saved_world_size, self._owners.world_size)
        parts = []
        for rank in ranks:
            if rank not in texts:
                raise NotReadyError(
                    f"state {path!r} of rank {rank}, which this rank takes over, is not here",
                    fqn=path,
                )
            if path in texts[rank].live.objects:
                parts.append(self.decode(texts[rank].live.objects[path], rank))
        self.want_object(path, value, lambda tree: put(tree, parts))

    def check_agreed(self, path: str) -> None:
        """See ``kinds.Restoring``."""
        if self.ranks_changed:
            texts = self._owners.texts()
            trees = {rank: blob.live.objects.get(path) for rank, blob in texts}
            check_agreed(path, {rank: tree for rank, tree in trees.items() if tree is not None})

    def _fill(self, fqn: str, target: torch.Tensor) -> None:
        shared = self._survey.home_of.get(id(target)) is Home.SHARED
        stored = self._find(fqn, target, of_all=shared and self._owners.world_size > 1)
        before = self._filled.get(id(target))
        if stored is None:
            if before is None:
                self._keep(fqn, target)
        elif before is None:
            self._filled[id(target)] = fqn, stored
            fill = self._wants.make if blanks.is_blank(target) else self._wants.fill
            fill(fqn, target, stored)
        elif stored != before[1]:
            why = (
                f"tensors {before[0]!r} and {fqn!r} are one tensor here and were saved with other "
                f"values each: tie them, or keep both equal, before you save"
            )
            self._wants.equal(fqn, target, (before[1], stored), why)

    def _keep(self, fqn: str, target: torch.Tensor) -> None:
        """Note that a tensor keeps its values, if it has any."""
        if not self._strict and blanks.is_blank(target):
            raise NotReadyError(
                f"tensor {fqn!r} is on the meta device and the checkpoint lacks it: call "
                f"to_empty(device=...) on its module before the restore, and give it values",
                fqn=fqn,
            )
        self._missing.append(fqn)

    def _stored(
        self, fqn: str, parameter: torch.Tensor, *, of_torch: bool, group: tuple[int, ...]
    ) -> tuple[str, torch.Tensor]:
        """Return what a tensor of an optimizer is called there, and what it is made like here.

        ``group`` are the ranks of which one has it, if the optimizer deals parameters out to them.

        Not a piece of a tensor of the mesh, but what that rank alone had for its piece, is a tensor
        of another shape than the parameter; and one of its shape, if all ranks have that and each
        its own of this: an optimizer that is not ``of_torch`` may keep such.
        """
        # Another object, which does not stand for a piece of the parameter.
        own, here = self._owners.own(fqn), local(parameter).detach()
        if self._wants.has(own):
            shape = self._wants.spec(own).shape
            if shape == shape_of(parameter):
                alone = shape == tuple(here.shape) and not of_torch and self._is_of_all(parameter)
            elif shape in ((), tuple(here.shape)):
                alone = True
            else:
                raise InvalidRequestError(
                    f"{fqn!r} was saved as {shape}, by a rank with another piece of the parameter, "
                    f"of which this one has {tuple(here.shape)}: restore it on the mesh that saved "
                    f"it",
                    key=fqn,
                )
            if alone:
                return own, here
        stored = self._find(fqn, parameter, group=group)
        if stored is None:
            raise NotReadyError(f"the checkpoint has no tensor {fqn!r}", fqn=fqn)
        return stored, parameter

    def _is_of_all(self, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter was saved as one that all ranks hold together."""
        fqn = self._survey.fqn_of.get(id(parameter), "")
        return self._wants.has(fqn) or self._wants.has(self._owners.aliases.get(fqn, fqn))

    def _find(
        self, fqn: str, target: torch.Tensor, *, of_all: bool = False, group: tuple[int, ...] = ()
    ) -> str | None:
        """Return what a tensor is called in the checkpoint, None: it is not there.

        ``target`` is what will hold it, or the parameter that it is state of; ``of_all``: DDP has
        it alike on all ranks; ``group``: see ``_stored``.
        """
        mesh = group or self._survey.mesh_of.get(id(target))
        of_model = self._owners.is_of_section(self._survey.fqn_of.get(id(target), fqn))
        stored = self._owners.find(fqn, mesh, of_model=of_model, of_all=of_all)
        if len(stored) > 1:
            why = (
                f"tensor {fqn!r} was saved by several groups of ranks, each its own: "
                f"{told(stored)}; they differ, and which is meant here cannot be known. If these "
                f"are stages of a pipeline or experts, restore on the ranks that saved them, with "
                f"holdfast.Section, which says what each is called in the whole model; save then"
            )
            self._wants.equal(fqn, target, stored, why)
        return stored[0] if stored else None

    def _only_here(self, fqn: str) -> None:
        if self._strict:
            raise NotReadyError(f"the checkpoint has no tensor {fqn!r}", fqn=fqn)
        self._missing.append(fqn)

    def want_optimizer(self, path: str, optimizer: Optimizer) -> None:
        """See ``kinds.Restoring``."""
        saved = self._static[path]
        assert isinstance(saved, SavedOptimizer), "objects of another kind were refused"
        names = optimizers.parameter_names(optimizer, self._survey.fqn_of)
        found = self._gathered(path, names, saved, optimizer) if names != saved.params else None
        if not self._strict and names != saved.params and found is None:
            self._pass_over(path)
            self._passed_over.add(id(optimizer))
            return
        loose, called = None, found.called if found else {}
        if found is not None:
            saved = found.saved
            groups = [self.decode(group.tree, group.rank) for group in found.groups]
        else:
            groups = cast("list[object]", self.decode(self._live.groups[path]))
        warn_of_optimizer(path, stepping(optimizer), cast("list[dict[str, object]]", groups))
        if saved.strict:
            of = zip(chain(*names), optimizers.parameters(optimizer), strict=True)
            steps = optimizers.stepped_here(optimizer)
            here = [name for name, p in of if id(p) in steps]
            saved = self._with_all_keys(path, saved, here, called)
        else:
            loose = cast("dict[str, dict[str, object]]", self.decode(self._live.loose[path]))
        of_torch, group = optimizers.is_of_torch(optimizer), dealt_out(optimizer)
        optimizers.load_optimizer(
            path,
            optimizer,
            saved,
            cast("list[dict[str, object]]", groups),
            loose,
            fqn_of=self._survey.fqn_of,
            find=lambda name, key, p: self._stored(
                f"{path}.state.{called.get(name, name)}.{key}",
                p,
                of_torch=of_torch,
                group=group,
            ),
            wants=self._wants,
        )

    def _gathered(
        self, path: str, names: list[list[str]], saved: SavedOptimizer, optimizer: Optimizer
    ) -> GatheredOptimizer | None:
        """Return what several ranks have saved of an optimizer's parameters; None: not of all.

        Raises:
            NotReadyError: others may have saved it, of whom nothing is here.
        """
        if not saved.strict or set(chain(*names)) == set(chain(*saved.params)):
            return None
        if not all(id(p) in self._survey.fqn_of for p in optimizers.parameters(optimizer)):
            return None  # numbers in the place of names mean others on each rank
        mesh_of, world_size = self._survey.mesh_of, self._owners.world_size
        meshes = (mesh_of.get(id(p), ()) for p in optimizers.parameters(optimizer))
        some = any(mesh and len(mesh) < world_size for mesh in meshes)
        found = gather(
            path, names, self._owners.texts(), aliases_here=self._survey.aliases, some=some,
            not_here={t.fqn for t in self._survey.tensors if t.mesh and not t.tensor.numel()},
        )  # fmt: skip
        if found is None:
            self._owners.require_all(path)
        return found

    def _with_all_keys(
        self, path: str, saved: SavedOptimizer, here: Sequence[str], called: Mapping[str, str]
    ) -> SavedOptimizer:
        """Return an optimizer with what others have saved of parameters ``here``.

        A rank that had nothing of a flattened parameter does not know what is kept of it: its text
        says nothing of it, not even that it has no state.

        Raises:
            NotReadyError: nothing is here of those who know.
        """
        known = set(chain.from_iterable(of for _, of in saved.state))
        open_here = [name for name in here if name not in known]
        if not open_here:
            return saved
        self._owners.require_all(path)
        found: dict[str, set[str]] = {}
        for fqn in map(unranked, self._specs):
            of, _, key = fqn.rpartition(".")
            found.setdefault(of, set()).add(key)
        pairs = [*saved.state]
        for name in open_here:
            keys = found.get(f"{path}.state.{called.get(name, name)}", set())
            in_order = (others for others, _ in saved.state if set(others) == keys)
            pairs.append([list(next(in_order, sorted(keys))), [name]])
        return replace(saved, state=pairs)

    def _pass_over(self, path: str) -> None:
        self._missing.append(path)
        self._unexpected.append(path)

    def decode(self, saved: Json, rank: int | None = None) -> object:
        """Return a saved tree; its tensors, which ``run`` fills, are those here, or new memory.

        ``rank`` is whose text it is of; None: the source's.
        """
        leaf = partial(self._leaf, rank=rank)
        return decode(saved, leaf=leaf, numpy=make_numpy, size=torch.Size)

    def _leaf(self, name: str, rank: int | None = None) -> object:
        held = self._objects.get(name)
        if held is not None:
            return held
        if name in self._static or name in self._live.objects:
            return ABSENT
        # A writer that keeps no state for each rank has the tensors of its tree in common.
        own = self._owners.own(name) if rank is None else own_name(name, rank)
        stored = name if self._wants.has(name) and not self._wants.has(own) else own
        here = self._tensors.get(name)
        if here is not None and self._wants.fill_alone(name, here, stored):
            return here
        return self._wants.new(stored, (self._live.layouts or {}).get(name))

    def _check_kind(self, path: str, value: object, kind: Kind) -> None:
        """Refuse a value that was saved in another way."""
        saved = self._static.get(path)
        if (type(saved) if saved else None) is not kind.saved:
            raise InvalidRequestError(
                f"state {path!r} is a {type(value).__name__} now and was saved as "
                f"{saved.kind if saved else 'something else'}: use the same kind of object as then",
                key=path,
            )

    def _names(self, path: str) -> list[str]:
        """Return the names of all that was saved and could be a module's, called ``path``."""
        if self._owners.is_of_section(path):
            return list(dict.fromkeys(map(unranked, self._specs)))
        named = (name_for(stored, self._owners.source) for stored in self._specs)
        return [name for name in named if name is not None]


def _put(path: str, put: Callable[[Any], None], tree: object) -> None:
    with named("loading", path):
        put(tree)
