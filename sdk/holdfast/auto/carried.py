"""Names that training loops carry from batch to batch: counters, hidden states, best values.

Found in the source of all frames of the script that wait for a batch. Each begins anew in a
resumed script, unless something saves it.
"""

from __future__ import annotations

import ast
import inspect
import json
import linecache
import random
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum
from types import FrameType, GeneratorType

import torch

from holdfast.auto.counters import follows
from holdfast.auto.flow import Flow, Function, Functions, functions_of, hooks_of, path_of
from holdfast.auto.gathering import KINDS
from holdfast.auto.passes import Pass

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_INSTALLED = ("/site-packages/", "/dist-packages/")  # a venv may see those of another Python, too
_CHANGEABLE = (list, dict, set, deque, bytearray, torch.Tensor)
_STREAMS: tuple[type, ...] = (torch.Generator, random.Random)
_COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
Loop = ast.For | ast.While
IsKept = Callable[[object], bool]


def carried_names(
    is_kept: IsKept, tracked: Collection[str] = (), variables: Collection[str] = ()
) -> list[str]:
    """Return the names that loops of the script carry, of those frames that wait for a batch.

    Args:
        is_kept: Tells whether something is saved, so that it does not matter who changes it.
        tracked: Names of attributes that are.
        variables: Names of variables of closures that are.
    """
    found: set[str] = set()
    asking = Asking.EACH
    for frame in _script_frames():
        found.update(_streams(frame, is_kept))
        tree = _tree(frame.f_code.co_filename)
        if tree is None:
            continue
        function, loops = _around(tree, _place(frame))
        functions, hooks = functions_of(tree), hooks_of(tree)
        for loop in loops:
            names = carried(loop, function, functions, hooks)
            found.update(name for name in names if _counts(name, frame, is_kept))
        if asking is not Asking.NOT:
            by_itself, asking = _asks(frame, function, loops, asking)
            found.update(by_itself)
    found.difference_update(variables)
    return sorted(name for name in found if name.split(".")[-1] not in tracked or "." not in name)


def how_to_keep(names: Sequence[str]) -> str:
    """Return the end of a sentence about names that are carried: the lines that keep them.

    An attribute of a class stands for that of an object of it.

    >>> print("carried" + how_to_keep(["Net.rate", "step"]))
    carried; to keep them, write before the loop
        kept = holdfast.track(step=step)
        holdfast.track(net, "rate")
    and use kept.step in it
    """
    variables = [name for name in names if name.isidentifier()]
    attributes = [name for name in names if re.fullmatch(r"\w+(\.\w+)+", name)]
    if not variables and not attributes:
        return "; holdfast.track keeps variables and attributes"
    lines = ["; to keep them, write before the loop"]
    if variables:
        lines.append(f"    kept = holdfast.track({', '.join(f'{n}={n}' for n in variables)})")
    owners: dict[str, list[str]] = {}
    for owner, _, attribute in (name.rpartition(".") for name in attributes):
        owners.setdefault(owner.lower() if owner[0].isupper() else owner, []).append(attribute)
    for owner, its in owners.items():
        lines.append(f"    holdfast.track({', '.join([owner, *(json.dumps(one) for one in its)])})")
    if variables:
        lines.append(f"and use {', '.join(f'kept.{name}' for name in variables)} in it")
    return "\n".join(lines)


def carried(
    loop: Loop, function: ast.AST, functions: Functions, hooks: Sequence[ast.stmt] = ()
) -> set[str]:
    """Return what ``loop``, in ``function``, carries from one round to the next or behind it.

    ``hooks`` are called in it, by others.
    """
    flow = Flow([*hooks, *loop.body], functions, seen=frozenset())
    later = _read_behind(function, loop)
    targets = _targets(loop)
    return (flow.carried | flow.unsure & later) - targets - {"self"}


class Asking(Enum):
    """How a frame asks for what is inside it: for each batch of a pass, or more loosely."""

    NOT = "it calls a function that goes over a whole pass"
    EACH = "for each batch of one pass"
    ANY = "for one at a time, or for those of several passes"


def _asks(
    frame: FrameType, function: ast.AST, loops: list[Loop], asking: Asking
) -> tuple[set[str], Asking]:
    """Return what a frame counts by itself, and how its caller asks it.

    A loop *over* the batches of a pass ends when they do. One that asks for them in its body, or
    goes over those of several passes, counts anew.
    """
    makes = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
    place = _place(frame)
    inside = [
        node
        for node in ast.walk(function)  # outer ones come first
        if isinstance(node, _COMPREHENSIONS) and _holds(node, place)
    ]
    if inside:  # those but generators have no frame of their own from Python 3.12 on
        return set(), asking if isinstance(inside[-1], ast.GeneratorExp) else Asking.NOT
    if not loops:
        return set(), Asking.ANY
    last = loops[-1]
    over = isinstance(last, ast.For) and place < _begin(last.body[0])
    if over and asking is Asking.EACH:
        several = Asking.ANY if len(loops) > 1 else Asking.EACH
        return set(), several if makes else Asking.NOT
    return {name for loop in loops for name in _targets(loop)}, Asking.ANY if makes else Asking.NOT


def _script_frames() -> Iterator[FrameType]:
    """Yield the frames that are of no library, innermost first; what runs the script is none."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - what inspect.currentframe returns
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "runpy":
            return
        if not (module.startswith("holdfast.") or _is_installed(frame.f_code.co_filename)):
            yield frame
        frame = frame.f_back


def _is_installed(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(folder in file for folder in _INSTALLED)


def _tree(name: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError):
        return None


def _place(frame: FrameType) -> tuple[int, int]:
    """Return line and column of what a frame is doing."""
    positions = list(frame.f_code.co_positions())
    line, _, column, _ = positions[frame.f_lasti // 2]
    return line or frame.f_lineno, column or 0


def _around(tree: ast.Module, place: tuple[int, int]) -> tuple[ast.AST, list[Loop]]:
    """Return the innermost function that ``place`` is in, or the file, and its loops around it."""
    function: ast.AST = tree
    loops: list[Loop] = []
    for node in ast.walk(tree):  # outer ones come first
        if isinstance(node, Loop | Function) and _holds(node, place):
            function, loops = (
                (node, []) if isinstance(node, Function) else (function, [*loops, node])
            )
    return function, loops


def _begin(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _holds(node: ast.stmt | ast.expr, place: tuple[int, int]) -> bool:
    return _begin(node) <= place < (node.end_lineno or 0, node.end_col_offset or 0)


def _targets(loop: Loop) -> set[str]:
    nodes = ast.walk(loop.target) if isinstance(loop, ast.For) else ()
    return {name for node in nodes if (name := path_of(node))}


def _read_behind(function: ast.AST, loop: Loop) -> set[str]:
    """Return what is read below a loop, and for attributes anywhere in the function."""
    end = loop.end_lineno or 0
    return {
        name
        for node in ast.walk(function)
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
        if (name := path_of(node)) and (node.lineno > end or "." in name)
    }


def _counts(name: str, frame: FrameType, is_kept: IsKept) -> bool:
    """Tell whether a name that is carried matters: it is not saved, and no library's."""
    value: object = None
    for number, part in enumerate(name.split(".")):
        if number == 0:
            if part not in frame.f_locals and part not in frame.f_globals:
                return True
            value = frame.f_locals.get(part, frame.f_globals.get(part))
        else:
            try:
                value = inspect.getattr_static(value, part)
            except AttributeError:
                return True
        if isinstance(value, KINDS) or is_kept(value):
            return False
    if isinstance(value, GeneratorType):
        return not (value.gi_running or follows(value, Pass))
    return isinstance(value, _CHANGEABLE) or not _is_of_a_library(type(value))


def _is_of_a_library(kind: type) -> bool:
    """Tell whether a class is in a file of a library, as bars of progress and iterators are."""
    name = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    if kind.__module__.startswith("holdfast."):
        return True
    return _is_installed(name) and kind.__module__ != "numpy"


def _streams(frame: FrameType, is_kept: IsKept) -> Iterator[str]:
    """Yield the names of the random streams of the script's own."""
    numpy = sys.modules.get("numpy.random")
    kinds = (*_STREAMS, *((numpy.Generator, numpy.RandomState) if numpy else ()))
    owner = frame.f_locals.get("self")
    scopes: list[tuple[str, Collection[tuple[str, object]]]] = [
        ("", [*frame.f_locals.items(), *frame.f_globals.items()]),
        ("self.", list(getattr(owner, "__dict__", {}).items())),
    ]
    for prefix, items in scopes:
        for name, value in items:
            if isinstance(value, kinds) and not is_kept(value):
                yield prefix + name
