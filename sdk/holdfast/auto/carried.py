"""Names that a training loop carries from batch to batch: counters, hidden states, best values.

Found in the source: what the body of a loop reads before it sets it, and sets somewhere. Each
begins anew in a resumed script, unless something saves it.
"""

from __future__ import annotations

import ast
import linecache
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
Loop = ast.For | ast.While
Function = ast.FunctionDef | ast.AsyncFunctionDef


def carried_names() -> list[str]:
    """Return the names that the loops around the calling script's line carry; empty: unknown."""
    frame = _script_frame(sys._getframe(1))  # noqa: SLF001 - what inspect.currentframe returns
    if frame is None:
        return []
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    return sorted({name for loop in _loops_around(tree, frame.f_lineno) for name in carried(loop)})


def carried(loop: Loop) -> set[str]:
    """Return what the body of ``loop`` sets, but reads before that."""
    read: set[str] = set()
    written: set[str] = set()
    for name, is_read in (one for statement in loop.body for one in _uses(statement)):
        if not is_read:
            written.add(name)
        elif name not in written:
            read.add(name)
    targets = {name for name, _ in _uses(loop.target)} if isinstance(loop, ast.For) else set()
    return (read & written) - targets


def _script_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that is of no library."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not (module.startswith("holdfast.") or frame.f_code.co_filename.startswith(_LIBRARIES)):
            return frame
        frame = frame.f_back
    return None


def _loops_around(tree: ast.AST, line: int) -> list[Loop]:
    """Return the loops of the innermost function that ``line`` is in, and that hold it."""
    around: list[Loop] = []
    for node in ast.walk(tree):  # outer ones come first
        if isinstance(node, ast.For | ast.While | Function) and _holds(node, line):
            around = [] if isinstance(node, Function) else [*around, node]
    return around


def _holds(node: Loop | Function, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _uses(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield names in the order in which they are read (True) and set (False)."""
    match node:
        case ast.Name(id=name, ctx=ctx):
            yield name, isinstance(ctx, ast.Load)
        case ast.AugAssign(target=ast.Name(id=name), value=value):
            yield name, True
            yield from _uses(value)
            yield name, False
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name, False
        case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return  # names of their own
        case _:
            for child in _in_order(node):
                yield from _uses(child)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is below a node as it is run: what is assigned to comes after its value."""
    late = [getattr(node, name, None) for name in ("target", "targets")]
    first = "iter" if isinstance(node, ast.For) else "value"
    value = getattr(node, first, None)
    yield from [value] if isinstance(value, ast.AST) else []
    for target in late:
        yield from target if isinstance(target, list) else [target] if target else []
    for name, child in ast.iter_fields(node):
        if name not in (first, "target", "targets"):
            children = child if isinstance(child, list) else [child]
            yield from (one for one in children if isinstance(one, ast.AST))
