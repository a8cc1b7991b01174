"""What a piece of source carries over: names that it reads before it sets them, and sets somewhere.

Of attributes and elements the whole path counts (``self.step``, ``ema``). Functions that the same
file defines are followed where they are called. A loop is taken to go round at least once.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef
Functions = Mapping[str, Sequence[Function]]
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_CHANGING = frozenset(
    {
        "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop",
        "popitem", "popleft", "remove", "reverse", "rotate", "setdefault", "sort", "update",
    }
)  # fmt: skip
"""Methods of containers that change them; those of tensors end in an underscore."""


class Flow:
    """What one run through some statements does with names.

    ``carried``: as the module says. ``unsure``: set on some ways through only, so that a name has
    a value of an earlier run on others. ``changed``: those of ``carried`` whose object is changed,
    not the name.
    """

    def __init__(
        self, body: Sequence[ast.stmt], functions: Functions, *, seen: frozenset[str]
    ) -> None:
        self._functions = functions
        self._seen = seen
        self._read: set[str] = set()
        self._set: set[str] = set()
        self.changed: set[str] = set()
        sure = self._run(body, set())
        self.unsure = self._set - (self._set if sure is None else sure)
        self.carried = self._read & self._set | self.changed

    def _run(self, body: Sequence[ast.stmt], sure: set[str]) -> set[str] | None:
        """Return what is set for sure behind ``body``; None: it is left before its end."""
        for statement in body:
            after = self._statement(statement, sure)
            if after is None:
                return None
            sure = after
        return sure

    def _statement(self, statement: ast.stmt, sure: set[str]) -> set[str] | None:
        match statement:
            case ast.If(test=test, body=body, orelse=orelse):
                self._look(test, sure)
                return _both(self._run(body, set(sure)), self._run(orelse, set(sure)))
            case (
                ast.For(iter=head, body=body, orelse=orelse)
                | ast.While(test=head, body=body, orelse=orelse)
            ):
                return self._loop(head, getattr(statement, "target", None), body, orelse, sure)
            case ast.Match(subject=subject, cases=cases):
                return self._branches(subject, [[], *(one.body for one in cases)], sure)
            case ast.Try():
                return self._try(statement, sure)
        return self._straight(statement, sure)

    def _straight(self, statement: ast.stmt, sure: set[str]) -> set[str] | None:
        """Run through a statement without branches of its own."""
        if isinstance(statement, ast.With):
            for item in statement.items:
                self._look(item, sure)
            return self._run(statement.body, sure)
        if isinstance(statement, Function):
            sure.add(statement.name)
        else:
            self._look(statement, sure)
        leaves = isinstance(statement, ast.Continue | ast.Break | ast.Return | ast.Raise)
        return None if leaves else sure

    def _branches(
        self, head: ast.expr, bodies: Sequence[Sequence[ast.stmt]], sure: set[str]
    ) -> set[str] | None:
        self._look(head, sure)
        behind = self._run(bodies[0], set(sure))
        for body in bodies[1:]:
            behind = _both(behind, self._run(body, set(sure)))
        return behind

    def _loop(
        self,
        head: ast.expr,
        target: ast.expr | None,
        body: Sequence[ast.stmt],
        orelse: Sequence[ast.stmt],
        sure: set[str],
    ) -> set[str] | None:
        self._look(head, sure)
        if target is not None:
            self._look(target, sure)
        inside = self._run(body, set(sure))
        return self._run(orelse, sure if inside is None else inside)

    def _try(self, statement: ast.Try, sure: set[str]) -> set[str] | None:
        behind = self._run([*statement.body, *statement.orelse], set(sure))
        for handler in statement.handlers:
            behind = _both(behind, self._run(handler.body, set(sure)))
        return None if behind is None else self._run(statement.finalbody, behind)

    def _look(self, node: ast.AST, sure: set[str]) -> None:
        for what, name in self._events(node):
            fresh = any(part in sure for part in _prefixes(name))
            if what == "set":
                self._set.add(name)
                sure.add(name)
            elif not fresh:
                (self._read if what == "read" else self.changed).add(name)

    def _events(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """Yield what is read, set and changed, in the order in which it is."""
        if isinstance(node, ast.Name | ast.Attribute) and (name := path_of(node)):
            reads = isinstance(node.ctx, ast.Load)
            *owners, whole = _prefixes(name)
            yield from (("read", owner) for owner in owners)
            yield ("read" if reads else "set"), whole
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            yield from self._events(node.slice)
            yield from _changes(node)
        elif isinstance(node, ast.AugAssign):
            yield from self._events(node.value)
            if name := path_of(node.target):
                yield "read", name
            yield from self._events(node.target)
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif not isinstance(node, _SCOPES):
            for child in _in_order(node):
                yield from self._events(child)

    def _call(self, call: ast.Call) -> Iterator[tuple[str, str]]:
        for child in (call.func, *call.args, *call.keywords):
            yield from self._events(child)
        is_method = isinstance(call.func, ast.Attribute)
        called = call.func.attr if is_method else getattr(call.func, "id", "")  # type: ignore[attr-defined]
        if is_method and (called in _CHANGING or _is_in_place(called)):
            yield from _changes(call.func)
        elif called == "next" and call.args and (name := path_of(call.args[0])):
            yield "changed", name
        if called not in self._functions:
            called = "__call__"  # of an object of a class of the file, perhaps
        if called in self._seen:
            return
        for function in self._functions.get(called, ()):
            inside = Flow(function.body, self._functions, seen=self._seen | {called})
            own = _locals(function)
            for name in sorted(n for n in inside.carried if n.split(".")[0] not in own):
                yield "read", name
                yield ("changed" if name in inside.changed else "set"), name


def functions_of(tree: ast.AST) -> Functions:
    """Return the functions and methods of a file by name."""
    found: dict[str, list[Function]] = {}
    for node in ast.walk(tree):
        if isinstance(node, Function):
            found.setdefault(node.name, []).append(node)
    return found


def hooks_of(tree: ast.AST) -> list[ast.stmt]:
    """Return calls of the functions that a file gives to ``register_..._hook`` and the like."""
    given = (
        argument
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if node.func.attr.startswith("register_")
        for argument in node.args
        if path_of(argument)
    )
    return [ast.Expr(ast.Call(function, [], [])) for function in given]


def path_of(node: ast.AST) -> str:
    """Return ``a.b.c`` of a name with attributes, empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := path_of(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the path whose object is changed by a method or an element of it."""
    assert isinstance(node, ast.Attribute | ast.Subscript)
    owner: ast.AST = node.value
    while not path_of(owner) and isinstance(owner, ast.Attribute | ast.Subscript):
        owner = owner.value
    if name := path_of(owner):
        yield "changed", name


def _is_in_place(method: str) -> bool:
    return method.endswith("_") and not method.startswith("_") and method != "requires_grad_"


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _both(one: set[str] | None, other: set[str] | None) -> set[str] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _locals(function: Function) -> set[str]:
    """Return the names of a function's own, but for ``self``, whose attributes outlive it."""
    nodes = list(ast.walk(function))
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)} | arguments
    for node in nodes:
        if isinstance(node, ast.Global | ast.Nonlocal):
            own.difference_update(node.names)
    return own - {"self"}


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is below a node as it is run: what is assigned to comes after its value."""
    late = [getattr(node, name, None) for name in ("target", "targets")]
    value = getattr(node, "value", None)
    yield from [value] if isinstance(value, ast.AST) else []
    for target in late:
        yield from target if isinstance(target, list) else [target] if target else []
    for name, child in ast.iter_fields(node):
        if name not in ("value", "target", "targets"):
            children = child if isinstance(child, list) else [child]
            yield from (one for one in children if isinstance(one, ast.AST))
