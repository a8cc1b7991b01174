"""What samplers, datasets and collate functions remember between batches, by attribute.

Two kinds of *places* are known: generators (torch, NumPy, ``random``), and plain values that have
changed since the loader was wrapped. They are found in the attributes of the loader's parts and of
what these hold, a few levels down, and put back under the same names.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, TypeAlias, cast

import torch
from torch.utils.data import DataLoader

from holdfast.errors import InvalidRequestError
from holdfast.format.tree import PLAIN, decode, encode
from holdfast.state.values import make_numpy

DEPTH_MAX = 4
HOLDERS_MAX = 256
"""Objects whose attributes are looked at, the loader's parts first."""
ITEMS_MAX = 1_024
"""Of one attribute of a sampler; longer ones are taken for what they are made from."""
TEXT_MAX = 16 << 10
"""Characters or bytes of one attribute; longer ones are data."""

Marks: TypeAlias = dict[str, dict[str, Any]]
_JSON_MAX = 8 * TEXT_MAX
_GAUSS_NEXT = ".0.gauss_next"
"""An attribute of Python's generators that belongs to their state."""
_NOTHING = object()
_SCALARS = (type(None), bool, int, float, str, bytes)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_PLAIN = frozenset({*_SCALARS, *_CONTAINERS})
_OPAQUE = (
    *(type, ModuleType, FunctionType, MethodType, torch.Tensor, torch.device),
    *(logging.Filterer, logging.Manager),  # loggers lead to all handlers of the process
)


class Places:
    """The places of loaders; ``take`` reads them as they are now, ``put`` writes them.

    Paths of the second loader begin with ``1/``, and so on.
    """

    def __init__(self, *loaders: DataLoader[Any]) -> None:
        self._loaders = loaders
        self._found: dict[str, tuple[dict[str, Any], str]] = {}
        self.look()
        self._first = {path: table.get(name) for path, (table, name) in self._found.items()}
        self._before = self._values()

    def look(self) -> None:
        """Look for the places anew: parts may have got new attributes."""
        self._found = {
            (f"{number}/{path}" if number else path): place
            for number, loader in enumerate(self._loaders)
            for path, place in _walk(loader)
        }

    def take(self) -> Marks:
        """Return the states of generators, and the values that are not what they were at first."""
        now = self._values(skip=self._first)
        return {
            "generators": {
                path: state
                for path, (table, name) in self._found.items()
                if (state := _generator_state(table.get(name))) is not None
            },
            "values": {path: text for path, text in now.items() if self._before.get(path) != text},
        }

    def put(self, marks: Marks) -> None:
        """Write the saved values back into the places.

        Raises:
            InvalidRequestError: the loader here lacks one of them, named.
        """
        self.put_generators(marks)
        values = {**self._before, **marks["values"]}  # what had not changed is as at first
        now = self._values()
        done = {f"{path}{end}" for path in marks["generators"] for end in ("", _GAUSS_NEXT)}
        for path, text in values.items():
            if now.get(path) != text and path not in done:
                table, name = self._at(path)
                saved = decode(json.loads(text), leaf=str, numpy=make_numpy, size=torch.Size)
                table[name] = saved

    def put_generators(self, marks: Marks) -> None:
        """Write the saved states back into the generators; see ``put``."""
        self.look()
        for path, state in marks["generators"].items():
            table, name = self._at(path)
            table[name] = _with_state(table.get(name), state)

    def _at(self, path: str) -> tuple[dict[str, Any], str]:
        if path in self._found:
            return self._found[path]
        holder, _, name = path.rpartition(".")
        for other, (table, _) in self._found.items():
            if other.rpartition(".")[0] == holder:
                return table, name
        raise InvalidRequestError(
            f"the data loader had {path!r} when it was saved, and lacks it now: build it as then"
        )

    def _values(self, *, skip: Mapping[str, object] = MappingProxyType({})) -> dict[str, str]:
        """Return plain values as texts, without numbers that are the very objects in ``skip``."""
        texts: dict[str, str] = {}
        for path, (table, name) in self._found.items():
            value = table.get(name)
            if type(value) in _SCALARS and skip.get(path, _NOTHING) is value:
                continue
            text = _text(value, whole="dataset." not in path[: path.find(".") + 1])
            if text is not None:
                texts[path] = text
        return texts


def _walk(loader: DataLoader[Any]) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    """Yield every attribute that may be a place, with the table it stands in, parents first."""
    yield "generator", (vars(loader), "generator")
    todo: deque[tuple[str, object, int]] = deque(
        (name, getattr(loader, name, None), 0)
        for name in ("sampler", "batch_sampler", "dataset", "collate_fn")
    )
    seen = {id(loader)}
    while todo and len(seen) < HOLDERS_MAX:
        path, holder, depth = todo.popleft()
        table = getattr(holder, "__dict__", None)
        if id(holder) in seen or isinstance(holder, _OPAQUE) or not isinstance(table, dict):
            continue
        seen.add(id(holder))
        for name, value in list(table.items()):
            yield f"{path}.{name}", (table, name)
            held = value if type(value) in (list, tuple) and len(value) <= HOLDERS_MAX else [value]
            if depth < DEPTH_MAX:
                todo.extend((f"{path}.{name}.{i}", item, depth + 1) for i, item in enumerate(held))


def _text(value: object, *, whole: bool) -> str | None:
    """Return a plain value as text, which later changes leave alone; None if it is none."""
    if isinstance(value, str | bytes) and len(value) > TEXT_MAX:
        return None
    if type(value) not in _SCALARS and not (
        whole and _may_be_plain(value) and _count(value) <= ITEMS_MAX
    ):
        return None
    try:
        text = json.dumps(encode(value, path="", leaf=lambda *_: None))
    except InvalidRequestError:
        return None
    return text if len(text) <= _JSON_MAX else None


def _may_be_plain(value: object) -> bool:
    """Tell whether it is worth a try: a refusal costs more than all the rest."""
    kind = type(value)
    return kind in PLAIN or isinstance(value, _CONTAINERS) or kind.__module__ == "numpy"


def _count(value: object) -> int:
    """Return how many values are in plain containers, or more than ``ITEMS_MAX``."""
    count, level = 0, [value]
    while level and count <= ITEMS_MAX:
        count += len(level)
        inner: list[object] = []
        for item in level:
            if isinstance(item, _CONTAINERS) and len(item) <= ITEMS_MAX:
                inner.extend(item.values() if isinstance(item, dict) else item)
            elif isinstance(item, _CONTAINERS):
                count += len(item)
            elif isinstance(item, str | bytes | bytearray):
                count += len(item) >> 4
            elif type(item).__module__ == "numpy":
                count += int(getattr(item, "size", 1))
        level = inner
    return count


def _generator_state(value: object) -> list[object] | None:
    """Return kind and state of a random generator; None for anything else."""
    if type(value) in _PLAIN:
        return None
    if isinstance(value, torch.Generator):
        return ["torch", value.get_state()]
    if isinstance(value, random.Random) and type(value).getstate is random.Random.getstate:
        return ["random", value.getstate()]
    if "numpy" in sys.modules:
        np = cast("Any", sys.modules["numpy"])
        if isinstance(value, np.random.Generator):
            return ["numpy", cast("Any", value).bit_generator.state]
        if isinstance(value, np.random.RandomState):
            return ["numpy.old", cast("Any", value).get_state(legacy=False)]
    return None


def _with_state(value: object, saved: list[Any]) -> object:
    """Return ``value`` in that state, or a new generator if it is none of that kind."""
    kind, state = saved
    held = _generator_state(value)
    same = held is not None and held[0] == kind
    made: Any = value if same else None
    if kind == "torch":
        made = made if same else torch.Generator()
        made.set_state(state)
    elif kind == "random":
        made = made if same else random.Random()  # noqa: S311 - the user's own kind
        made.setstate(state)
    else:
        made = _numpy_with_state(made, kind, state)
    return cast("object", made)


def _numpy_with_state(made: Any, kind: str, state: dict[str, Any]) -> object:
    import numpy as np  # noqa: PLC0415 - only where it was used

    bits = state["bit_generator"]
    if made is None or cast("Any", _generator_state(made))[1]["bit_generator"] != bits:
        known = getattr(np.random, bits, None)
        if not isinstance(known, type) or not issubclass(known, np.random.BitGenerator):
            raise InvalidRequestError(
                f"the data loader had a generator of {bits!r}, which NumPy here cannot make: build "
                f"it as then"
            )
        made = (np.random.Generator if kind == "numpy" else np.random.RandomState)(known())
    if kind == "numpy":
        made.bit_generator.state = state
    else:
        made.set_state(state)
    return cast("object", made)
