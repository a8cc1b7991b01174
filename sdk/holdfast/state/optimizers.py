"""Optimizers: state named by parameter, taken and put back bit for bit.

``load_state_dict`` of torch casts state to the parameter's dtype; here every tensor keeps the
dtype it was saved with. A *strict* optimizer has only tensors in its state; others (LBFGS) go
through the blob and are copied before ``save()`` returns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from holdfast.errors import InvalidRequestError
from holdfast.format.blob import SavedOptimizer
from holdfast.reading.dtypes import TORCH
from holdfast.state.blanks import device_of
from holdfast.state.inner_optimizers import dealt_out, stepping
from holdfast.state.layouts import is_expanded
from holdfast.state.local_boxes import (
    is_nothing,
    is_part,
    is_piece,
    local,
    local_box,
    shape_of,
)
from holdfast.state.survey import Home, Survey
from holdfast.state.wants import Wants, fits

_STATE_COPIES = {
    "SGD": 1, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adagrad": 1,
    "RMSprop": 1, "Adadelta": 2, "Rprop": 2, "ASGD": 1, "Lion": 1, "Muon": 1,
}  # fmt: skip
_FP32_BYTES = 4


def has_own_saving(optimizer: Optimizer) -> bool:
    """Tell whether the class saves itself in its own way, so that ``state_dict()`` is called."""
    kind = type(stepping(optimizer))
    return (
        kind.state_dict is not Optimizer.state_dict
        or kind.load_state_dict is not Optimizer.load_state_dict
    )


def is_strict(optimizer: Optimizer) -> bool:
    """Tell whether all state is tensors, by parameter and by string key."""
    params = {id(p) for p in parameters(optimizer)}
    return all(
        id(p) in params
        and type(state) is dict
        and all(isinstance(key, str) for key in state)
        and all(isinstance(value, torch.Tensor) for value in state.values())
        for p, state in stepping(optimizer).state.items()
    )


def is_of_torch(optimizer: Optimizer) -> bool:
    """Tell whether torch wrote the class: what it keeps is like the parameter, or counts steps."""
    return type(stepping(optimizer)).__module__.startswith("torch.optim.")


def parameters(optimizer: Optimizer) -> Iterable[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def stepped_here(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters that this rank steps: others have the rest, or more of it.

    What is kept of a parameter is not known where it is not stepped.
    """
    return {id(p) for p in parameters(stepping(optimizer)) if not is_nothing(p)}


def parameter_names(optimizer: Optimizer, fqn_of: Mapping[int, str]) -> list[list[str]]:
    """Return the names of each group's parameters; ``param_<group>_<index>`` for unknown ones."""
    return [
        [fqn_of.get(id(p), f"param_{g}_{i}") for i, p in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def names_of(optimizer: Optimizer, survey: Survey) -> dict[int, str]:
    """Return the names of those of its parameters that a module of the state has, by identity."""
    found = ((id(p), survey.fqn_of.get(id(p))) for p in parameters(optimizer))
    return {key: name for key, name in found if name is not None}


def check_trained(
    path: str, optimizer: Optimizer, before: Mapping[int, str], survey: Survey
) -> None:
    """Refuse an optimizer whose parameters the model has all replaced: what it keeps is of no use.

    So ``fully_shard`` does, and whoever makes another optimizer then may not have told the state.

    Args:
        path: The optimizer's name.
        optimizer: One that was in the state before.
        before: The names that its parameters had then, by identity.
        survey: What is found now.

    Raises:
        InvalidRequestError: the model has other tensors under these names now; names the first.
    """
    lost = {name for key, name in before.items() if key not in survey.fqn_of}
    replaced = next((t.fqn for t in survey.tensors if t.fqn in lost), None)
    if replaced and len(lost) == len(before):
        raise InvalidRequestError(
            f"{path!r} is a {type(optimizer).__name__} of parameters that the model no more has: "
            f"{replaced!r} is another tensor now. Make the optimizer after fully_shard() or what "
            f"else replaced them, and put it into the state before the restore",
            key=path,
        )


def survey_optimizer(
    survey: Survey, path: str, optimizer: Optimizer, *, replicated: bool, strict: bool
) -> None:
    """Add the state of ``optimizer`` to the survey; its parameters' modules came before it.

    Raises:
        InvalidRequestError: what is kept of its parameters cannot be saved; names it.
    """
    names = parameter_names(optimizer, survey.fqn_of)
    keys: dict[tuple[str, ...], list[str]] = defaultdict(list)
    group = dealt_out(optimizer)
    if group and not strict:
        raise InvalidRequestError(
            f"{path!r} is a {type(optimizer).__name__} whose inner optimizer keeps more than "
            f"tensors by parameter: use an optimizer that keeps only such",
            key=path,
        )
    if group:
        survey.dealt.add(path)
    if strict:
        inner = stepping(optimizer)
        steps = {id(p) for p in parameters(inner)}
        shared = replicated or all(
            survey.home_of.get(id(p)) is Home.SHARED for p in parameters(optimizer)
        )
        keeping = _Keeping(Home.SHARED if shared else Home.RANK, group, is_of_torch(optimizer))
        for name, p in zip(chain.from_iterable(names), parameters(optimizer), strict=True):
            state = cast("dict[str, torch.Tensor]", inner.state.get(p, {}))
            if id(p) not in steps:
                survey.elsewhere.add(f"{path}.state.{name}")
            elif not is_nothing(p) or (state and not keeping.alike):
                keys[tuple(state)].append(name)
                _survey_state(survey, f"{path}.state.{name}", p, state, keeping)
    else:
        survey.loose.add(path)
    pairs = [[list(held), of] for held, of in keys.items()]
    survey.static[path] = SavedOptimizer(strict, names, pairs)
    survey.sources.append(lambda: _identities(optimizer, strict=strict))
    survey.keys.append(lambda: _keys(optimizer, strict=strict))


class _Keeping(NamedTuple):
    """How an optimizer keeps what it keeps: the same for all of its parameters.

    ``alone`` is where a tensor belongs that no group of ranks has in common, ``group`` what
    ``dealt_out`` says. ``alike``: numbers count steps; another's may be of the piece that is here.
    """

    alone: Home
    group: tuple[int, ...]
    alike: bool


def _survey_state(
    survey: Survey,
    path: str,
    p: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    keeping: _Keeping,
) -> None:
    """Add the state of ``p`` under names that begin with ``path``."""
    part, group = is_part(p), keeping.group
    if part and id(p) not in survey.mesh_of:  # its module may not be in the state
        survey.mesh_of[id(p)] = local_box(path, p).mesh
    mesh_of_p = survey.mesh_of.get(id(p), ())
    holders = (dist.get_rank(),) if group else None
    known_to_all = not (group or is_piece(p))
    for key, tensor in state.items():
        # A group of ranks that has a plain parameter has all of its state alike, too.
        common = not part or (keeping.alike and not tensor.dim())
        mesh = group or (mesh_of_p if common else ())
        survey.add(
            f"{path}.{key}",
            tensor,
            home=Home.HOLDERS if mesh else keeping.alone,
            deferred=True,
            mesh=mesh,
            holders=holders,
            of=p,
            known_to_all=known_to_all,
        )


def live_groups(optimizer: Optimizer) -> list[dict[str, object]]:
    """Return every group without its parameters, as the next step goes by it.

    What steps fills a group that was added with settings that the outer optimizer has only then.
    """
    pairs = zip(stepping(optimizer).param_groups, optimizer.param_groups, strict=True)
    return [{k: v for k, v in {**inner, **g}.items() if k != "params"} for inner, g in pairs]


def loose_state(optimizer: Optimizer, fqn_of: Mapping[int, str]) -> dict[str, object]:
    """Return the state of an optimizer that is not strict, by parameter name."""
    names = chain.from_iterable(parameter_names(optimizer, fqn_of))
    by_id = dict(zip(map(id, parameters(optimizer)), names, strict=True))
    kept = stepping(optimizer).state
    unknown = [p for p in kept if id(p) not in by_id]
    if unknown:
        raise InvalidRequestError(
            f"{type(optimizer).__name__} keeps state under {str(unknown[0])[:40]!r}, which is not "
            f"one of its parameters: such an optimizer cannot be saved"
        )
    return {by_id[id(p)]: dict(state) for p, state in kept.items()}


def load_optimizer(
    path: str,
    optimizer: Optimizer,
    saved: SavedOptimizer,
    groups: list[dict[str, object]],
    loose: Mapping[str, dict[str, object]] | None,
    *,
    fqn_of: Mapping[int, str],
    find: Callable[[str, str, torch.Tensor], tuple[str, torch.Tensor]],
    wants: Wants,
) -> None:
    """Have ``wants`` read state and groups and then put them back; what fits is filled in place.

    Args:
        path: The optimizer's name.
        optimizer: It has the saved state once ``wants.run`` has returned, and is as it was until
            then.
        saved: What the survey wrote of it.
        groups: Its groups without their parameters.
        loose: State that is not only tensors, by parameter; None: all of it is.
        fqn_of: Names of parameters by identity.
        find: Gives a tensor's name in the checkpoint, and what it is made like if it is new, by the
            name of its parameter here, its key, and the parameter.
        wants: What this restore reads.

    Raises:
        InvalidRequestError: the groups hold other parameters than the saved ones did.
    """
    names = parameter_names(optimizer, fqn_of)
    if names != saved.params or len(groups) != len(optimizer.param_groups):
        raise InvalidRequestError(
            f"optimizer {path!r} has other parameters than when it was saved: "
            f"{_difference(names, saved.params)}"
        )
    steps = {id(p) for p in parameters(stepping(optimizer))}
    each = zip(chain.from_iterable(names), parameters(optimizer), strict=True)
    by_name = {name: p for name, p in each if id(p) in steps}
    wanted: dict[str, Mapping[str, object]] = {}
    if loose is None:
        on_device = _steps_on_device(optimizer)
        for keys, of in saved.state:
            for name in filter(by_name.__contains__, of):
                p = by_name[name]
                before = stepping(optimizer).state.get(p, {})
                state = wanted[name] = {}
                for key in keys:
                    fqn = f"{path}.state.{name}.{key}"
                    device = _device_of(key, p, on_device)
                    stored, like = find(name, key, p)
                    state[key] = _target(fqn, before.get(key), stored, device, like, wants)
    wants.then(lambda: _put_state(optimizer, by_name, wanted, loose))
    wants.then(lambda: _put_groups(optimizer, groups))


def expected_state(optimizer: Optimizer) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield parameters of which nothing is kept here yet, with the bytes of what will be.

    First those here, then those on all ranks that hold any of the parameter. If its optimizer has
    made any state, these are the parameters that other ranks step.
    """
    here, begun = stepped_here(optimizer), bool(stepping(optimizer).state)
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in here:
                yield p, 0, _state_bytes(optimizer, group, p, math.prod(shape_of(p)))
            elif not begun:
                yield (
                    p,
                    _state_bytes(optimizer, group, p, local(p).numel()),
                    _state_bytes(optimizer, group, p, math.prod(shape_of(p))),
                )


def _state_bytes(
    optimizer: Optimizer, group: Mapping[str, object], p: torch.Tensor, elements_count: int
) -> int:
    kind = type(stepping(optimizer)).__name__
    copies = _STATE_COPIES.get(kind)
    if copies is None:
        return 2 * _FP32_BYTES * elements_count
    if kind == "SGD" and not group.get("momentum"):
        return 0
    moments = copies + bool(group.get("amsgrad"))
    return moments * elements_count * p.element_size() + _FP32_BYTES


def _identities(optimizer: Optimizer, *, strict: bool) -> Iterable[object]:
    lists = [group["params"] for group in optimizer.param_groups]
    found: Iterable[object] = chain(lists, chain.from_iterable(lists))
    if strict:
        kept = stepping(optimizer).state
        found = chain(found, kept, chain.from_iterable(map(dict.values, kept.values())))
    return found


def _keys(optimizer: Optimizer, *, strict: bool) -> Iterable[object]:
    """Return how many parameters each group has, and what each of them has and what that is called.

    One that moves from the end of a group to the begin of the next is the same one in the same
    order, and so is state that is handed on to another parameter.
    """
    counts: Iterable[object] = [len(group["params"]) for group in optimizer.param_groups]
    if strict:
        kept = stepping(optimizer).state.values()
        counts = chain(counts, map(len, kept), chain.from_iterable(kept))
    return counts


def _put_state(
    optimizer: Optimizer,
    by_name: Mapping[str, torch.Tensor],
    wanted: Mapping[str, Mapping[str, object]],
    loose: Mapping[str, Mapping[str, object]] | None,
) -> None:
    """Let the optimizer have what was read: ``wanted`` as it is, ``loose`` in memory that fits."""
    on_device, kept = _steps_on_device(optimizer), stepping(optimizer).state
    for name, p in by_name.items():
        values = (wanted if loose is None else loose).get(name, {})
        if not values:
            kept.pop(p, None)
            continue
        state = cast("dict[str, object]", kept[p])
        for key in [key for key in state if key not in values]:
            del state[key]
        for key, value in values.items():
            device = _device_of(key, p, on_device)
            state[key] = value if loose is None else _fit(state.get(key), value, device, like=p)


def _put_groups(optimizer: Optimizer, groups: list[dict[str, object]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            group[key] = _fit(group.get(key), value)


def _device_of(key: str, p: torch.Tensor, on_device: set[int]) -> torch.device:
    on_cpu = key == "step" and id(p) not in on_device
    return torch.device("cpu") if on_cpu else device_of(p)


def _steps_on_device(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters whose ``step`` lies on their device, not on the CPU."""
    groups = (g for g in optimizer.param_groups if g.get("capturable") or g.get("fused"))
    return {id(p) for group in groups for p in group["params"]}


def _target(
    fqn: str, here: object, stored: str, device: torch.device, like: torch.Tensor, wants: Wants
) -> torch.Tensor:
    """Return what will hold the tensor ``stored``: what is here if it fits, else new memory."""
    spec = wants.spec(stored)
    if isinstance(here, torch.Tensor) and fits(here, spec, like) and not is_expanded(here):
        target = here
    else:
        target = _fresh(spec.shape, TORCH[spec.dtype], device, like)
    wants.fill(fqn, target, stored, of=like)
    return target


def _fresh(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, like: torch.Tensor | None
) -> torch.Tensor:
    """Return new memory; made like ``like`` if it has its shape."""
    if like is not None and shape_of(like) == tuple(shape):
        # As torch's optimizers make it: fused kernels pair the two by their places in memory.
        return torch.empty_like(like, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device)


def _fit(
    target: object,
    value: object,
    device: torch.device | None = None,
    like: torch.Tensor | None = None,
) -> object:
    """Return what holds ``value`` from now on: ``target`` if it can, in place."""
    if not isinstance(value, torch.Tensor):
        return value
    if (
        isinstance(target, torch.Tensor)
        and target.shape == value.shape
        and target.dtype == value.dtype
        and not is_expanded(target)
    ):
        into = target
    else:
        if device is None:
            device = target.device if isinstance(target, torch.Tensor) else torch.device("cpu")
        if device == value.device and (like is None or shape_of(like) != tuple(value.shape)):
            return value
        into = _fresh(value.shape, value.dtype, device, like)
    with torch.no_grad():
        return into.copy_(value)


def _difference(here: Sequence[Sequence[str]], there: Sequence[Sequence[str]]) -> str:
    now, then = set(chain.from_iterable(here)), set(chain.from_iterable(there))
    if now == then:
        return "the same parameters in another order or in other groups"
    name = min(now ^ then)
    return f"{name!r} exists only in the {'script' if name in now else 'checkpoint'}"
