"""An optimizer from the texts of several ranks: each had one of its own, for its parameters.

A stage of a pipeline has an optimizer for what lies on it. On another number of stages parameters
of several of these come together, or of one of them some; what belongs to a parameter, its name
tells. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from holdfast.errors import InvalidRequestError
from holdfast.format.blob import SavedOptimizer, StateBlob
from holdfast.format.tree import Json


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """What a rank saved of a group of parameters, beside their names."""

    rank: int
    tree: Json


@dataclass(frozen=True, slots=True)
class GatheredOptimizer:
    """An optimizer as if it had been saved with the groups that it has now.

    ``called`` are the names under which the state of parameters was saved, where they differ.
    """

    saved: SavedOptimizer
    groups: Sequence[SavedGroup]
    called: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Found:
    group: SavedGroup
    keys: Sequence[str] | None  # None: its rank does not know


def gather(
    path: str,
    names: Sequence[Sequence[str]],
    texts: Iterable[tuple[int, StateBlob]],
    *,
    aliases_here: Mapping[str, str],
    some: bool,
    not_here: Collection[str] = (),
) -> GatheredOptimizer | None:
    """Return what was saved of the parameters ``names``, by group; None: not of all of them.

    Args:
        path: The optimizer's name.
        names: Its parameters by group, as they are now.
        texts: Rank and text, the nearest first.
        aliases_here: Second names that tensors have now.
        some: Other ranks have the rest: what was saved of more parameters is theirs.
        not_here: Parameters of which only others have anything.

    Raises:
        InvalidRequestError: parameters of one group were in groups that differ.
    """
    wanted = set(chain.from_iterable(names))
    found: dict[str, _Found] = {}
    aliases: dict[str, str] = {}
    for rank, text in texts:
        aliases |= text.static.aliases
        _note(found, path, rank, text)
        if some and all(name in found or aliases.get(name) in found for name in wanted):
            break
    called = {name: aliases[name] for name in wanted - found.keys() if aliases.get(name) in found}
    of = {name: found.get(called.get(name, name)) for name in wanted}
    here = wanted | set(called.values())
    extra = {name for name in found.keys() - here if aliases_here.get(name) not in here}
    extra.difference_update(not_here)
    if None in of.values() or (extra and not some) or not all(names):
        return None
    keys: dict[tuple[str, ...], list[str]] = {}
    for name in chain.from_iterable(names):
        known = of[name].keys  # type: ignore[union-attr]
        if known is not None:
            keys.setdefault(tuple(known), []).append(name)
    return GatheredOptimizer(
        SavedOptimizer(True, names, [[list(held), params] for held, params in keys.items()]),
        [_one_group(path, {name: of[name].group for name in params}) for params in names],  # type: ignore[union-attr]
        called,
    )


def _note(found: dict[str, _Found], path: str, rank: int, text: StateBlob) -> None:
    """Take in what the text of ``rank`` says of each parameter of which none has said it yet."""
    saved, groups = text.static.objects.get(path), text.live.groups.get(path)
    if not (isinstance(saved, SavedOptimizer) and saved.strict and isinstance(groups, list)):
        return
    keys = {name: held for held, of in saved.state for name in of}
    for params, tree in zip(saved.params, groups, strict=True):
        for name in params:
            before = found.setdefault(name, _Found(SavedGroup(rank, tree), keys.get(name)))
            if before.keys is None and name in keys:
                found[name] = _Found(before.group, keys[name])


def _one_group(path: str, groups: Mapping[str, SavedGroup]) -> SavedGroup:
    """Return the group that all these parameters were in, by name, whoever had it."""
    first, *others = groups
    for other in others:
        one, two = groups[first], groups[other]
        tensors = one.rank != two.rank and "$ref" in str(one.tree)
        if one.tree != two.tree or tensors:
            raise InvalidRequestError(
                f"optimizer {path!r} has {first!r} and {other!r} in one group, and ranks "
                f"{one.rank} and {two.rank} saved them in groups with other settings: make as many "
                f"groups as then",
                key=path,
            )
    return groups[first]
