"""The state blob: what a rank saves besides tensors, as one JSON text.

``docs/reference/format-v1.md`` section 4 is normative; this module is that page as code, and
``format.tree`` the values inside. Nothing is believed before it was checked, and lists of a
hundred thousand names are checked in bulk. Pure.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar, NoReturn, TypeAlias, cast

from holdfast.core.ids import WORLD_SIZE_MAX
from holdfast.errors import ManifestError
from holdfast.format.segment import DIMS_COUNT_MAX
from holdfast.format.tree import Json

BLOB_BYTES_MAX = 256 << 20
ENTRIES_MAX = 1_000_000
"""How many objects, aliases, names of one list, or layouts there may be."""

Trees: TypeAlias = Mapping[str, Json]
"""A tree for each name."""


@dataclass(frozen=True, slots=True)
class SavedModule:
    """A module: its tensors are named by its path.

    ``section``: it is a section of a model, and a name in it means the same tensor on every rank.
    """

    kind: ClassVar[str] = "module"
    section: bool = False


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """An optimizer.

    ``params`` are the names of each group's parameters. ``strict``: all its state is tensors, and
    ``state`` says which keys (first) which parameters (second) have.
    """

    kind: ClassVar[str] = "optimizer"
    strict: bool
    params: Sequence[Sequence[str]]
    state: Sequence[Sequence[Sequence[str]]]


def is_section(saved: Saved | None) -> bool:
    """Tell whether what was saved is a section of a model."""
    return isinstance(saved, SavedModule) and saved.section


Saved: TypeAlias = SavedModule | SavedOptimizer
"""An object whose tensors are named one by one; all others are in ``Live.objects``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """The part of a state blob that stays the same for a plan.

    ``objects`` are modules and optimizers by path, ``aliases`` second names of tensors,
    ``buckets`` the order of each DDP wrapper, ``meshes`` the groups of ranks, other than all, that
    have tensors in common with this one; None: not said.
    """

    objects: Mapping[str, Saved]
    aliases: Mapping[str, str]
    world_size: int
    buckets: Trees | None = None
    meshes: Sequence[Sequence[int]] | None = None

    def encode(self) -> bytes:
        """Return the text of this part."""
        return _text(
            {
                "objects": {path: _saved(value) for path, value in self.objects.items()},
                "aliases": self.aliases,
                "world_size": self.world_size,
                **({} if self.buckets is None else {"buckets": self.buckets}),
                **({} if self.meshes is None else {"meshes": self.meshes}),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The part of a state blob that is taken at each save: trees by path.

    ``tree`` is the user's mapping by key. ``groups`` and ``loose`` are those of optimizers,
    ``objects`` what objects with an own way of saving gave, ``extra`` the extra states of modules,
    ``layouts`` the dims of tensors that are not in C order. None: not said.
    """

    tree: Trees = field(default_factory=dict)
    groups: Trees = field(default_factory=dict)
    loose: Trees = field(default_factory=dict)
    objects: Trees = field(default_factory=dict)
    extra: Trees = field(default_factory=dict)
    rng: Json = None
    layouts: Mapping[str, Sequence[int]] | None = None

    def encode(self) -> bytes:
        """Return the text of this part."""
        return _text(
            {
                "tree": self.tree,
                "groups": self.groups,
                "loose": self.loose,
                "objects": self.objects,
                "extra": self.extra,
                **({} if self.rng is None else {"rng": self.rng}),
                **({} if self.layouts is None else {"layouts": self.layouts}),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBlob:
    """The state blob of a rank: both parts.

    Invariants: groups are there for every optimizer, and loose state for those that are not
    strict.
    """

    static: Static
    live: Live


def join(static: bytes, live: bytes, imported: Trees | None = None) -> bytes:
    """Return the text of a rank from what ``Static.encode`` and ``Live.encode`` returned.

    ``imported`` are values that another tool had saved; nothing reads them back.
    """
    more = b"" if imported is None else b',"imported":' + _text(imported)
    return b'{"static":' + static + b',"live":' + live + more + b"}"


def parse(data: bytes) -> dict[str, Json]:
    """Return the JSON object in the text of a rank; its rules are not checked.

    Raises:
        ManifestError: longer than ``BLOB_BYTES_MAX``, no JSON object, a key twice, no number.
    """
    if len(data) > BLOB_BYTES_MAX:
        raise ManifestError(f"state of {len(data)} bytes exceeds {BLOB_BYTES_MAX}")
    try:
        value = json.loads(data, object_pairs_hook=_unique, parse_constant=_constant)
    except (ValueError, RecursionError) as cause:
        raise ManifestError(f"state is not JSON: {cause}") from cause
    return cast("dict[str, Json]", _object(value, "state"))


def decode(data: bytes) -> StateBlob:
    """Return the text of a rank, padding or not.

    Raises:
        ManifestError: a rule of the format is broken; the message names it.
    """
    raw = parse(data)
    blob = StateBlob(static=_read_static(raw.get("static")), live=_read_live(raw.get("live")))
    for path, saved in blob.static.objects.items():
        if not isinstance(saved, SavedOptimizer):
            continue
        groups = blob.live.groups.get(path)
        if not isinstance(groups, list) or len(groups) != len(saved.params):
            raise ManifestError(f"state has no groups of optimizer {path[:80]!r}")
        if not saved.strict and not isinstance(blob.live.loose.get(path), dict):
            raise ManifestError(f"state has no state of optimizer {path[:80]!r}")
    return blob


_ENCODER = json.JSONEncoder(separators=(",", ":"))  # made once: `dumps` makes one at each save


def _text(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


def _saved(value: Saved) -> dict[str, object]:
    if isinstance(value, SavedModule):
        return {"kind": value.kind, **({"section": True} if value.section else {})}
    return {
        "kind": value.kind,
        "strict": value.strict,
        "params": value.params,
        "state": value.state,
    }


def _read_static(value: object) -> Static:
    raw = _object(value, "static")
    objects = _object(raw.get("objects"), "static.objects")
    aliases = _object(raw.get("aliases"), "static.aliases")
    _check_texts(aliases.values(), "static.aliases")
    size = raw.get("world_size")
    if type(size) is not int or not 1 <= size <= WORLD_SIZE_MAX:
        raise ManifestError(f"static.world_size is not a number in 1..{WORLD_SIZE_MAX}")
    return Static(
        objects={path: _read_saved(path, item) for path, item in objects.items()},
        aliases=cast("dict[str, str]", aliases),
        world_size=size,
        buckets=_trees(raw, "static", "buckets") if "buckets" in raw else None,
        meshes=_read_meshes(raw["meshes"]) if "meshes" in raw else None,
    )


def _read_meshes(value: object) -> list[list[int]]:
    meshes = _lists(value, "static.meshes")
    if len(meshes) > ENTRIES_MAX or any(len(ranks) > WORLD_SIZE_MAX for ranks in meshes):
        raise ManifestError("static.meshes has more groups or ranks than there can be")
    if not all(meshes):
        raise ManifestError("static.meshes has a group of nobody")
    if not set(map(type, chain.from_iterable(meshes))) <= {int}:
        raise ManifestError("static.meshes is not of numbers")
    return cast("list[list[int]]", meshes)


def _read_saved(path: str, value: object) -> Saved:
    what = f"object {path[:80]!r}"
    raw = _object(value, what)
    kind = raw.get("kind")
    if kind == SavedModule.kind:
        return SavedModule(section=raw.get("section") is True)
    if kind != SavedOptimizer.kind:
        raise ManifestError(f"{what} is of the unknown kind {str(kind)[:40]!r}")
    strict = raw.get("strict")
    if type(strict) is not bool:
        raise ManifestError(f"{what} does not say whether it is strict")
    params = _name_lists(raw.get("params"), f"params of {what}")
    pairs = _lists(raw.get("state"), f"state of {what}")
    if any(len(pair) != 2 for pair in pairs):
        raise ManifestError(f"state of {what} is not a list of pairs")
    state = [_name_lists(pair, f"state of {what}") for pair in pairs]
    known = [*chain.from_iterable(params)]
    named = [*chain.from_iterable(of for _, of in state)]
    # As a rule all have the same keys, and then the lists are equal.
    if named != known and not set(known).issuperset(named):
        raise ManifestError(f"state of {what} is of a parameter that it does not have")
    return SavedOptimizer(strict, params, state)


def _read_live(value: object) -> Live:
    raw = _object(value, "live")
    names = ("tree", "groups", "loose", "objects", "extra")
    tree, groups, loose, objects, extra = (_trees(raw, "live", name) for name in names)
    layouts = _object(raw.get("layouts", {}), "live.layouts")
    dims = _lists(list(layouts.values()), "live.layouts")
    if any(len(row) > DIMS_COUNT_MAX for row in dims):
        raise ManifestError(f"live.layouts has more than {DIMS_COUNT_MAX} dims")
    if not set(map(type, chain.from_iterable(dims))) <= {int}:
        raise ManifestError("live.layouts is not of numbers")
    return Live(
        tree=tree, groups=groups, loose=loose, objects=objects, extra=extra,
        rng=cast("Json", raw.get("rng")), layouts=cast("Mapping[str, Sequence[int]]", layouts),
    )  # fmt: skip


def _trees(raw: Mapping[str, object], of: str, name: str) -> Trees:
    return cast("Trees", _object(raw.get(name), f"{of}.{name}"))


def _object(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ManifestError(f"{what} is not a JSON object")
    if len(value) > ENTRIES_MAX:
        raise ManifestError(f"{what} has {len(value)} entries, more than {ENTRIES_MAX}")
    return value


def _lists(value: object, what: str) -> list[list[object]]:
    if not isinstance(value, list) or not set(map(type, value)) <= {list}:
        raise ManifestError(f"{what} is not a list of lists")
    return value


def _name_lists(value: object, what: str) -> list[list[str]]:
    for names in _lists(value, what):
        if len(names) > ENTRIES_MAX:
            raise ManifestError(f"{what} has {len(names)} names, more than {ENTRIES_MAX}")
        _check_texts(names, what)
    return cast("list[list[str]]", value)


def _check_texts(values: Iterable[object], what: str) -> None:
    if not set(map(type, values)) <= {str}:
        raise ManifestError(f"{what} is not of texts")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ManifestError(f"key {twice[:80]!r} stands twice in the state")
    return table


def _constant(text: str) -> NoReturn:
    raise ManifestError(f"state holds {text}, which is not a number of JSON")
