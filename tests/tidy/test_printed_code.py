"""What pages print can be typed: commands are taken, names and arguments are there.

Pages whose code is run as well are in ``tests/e2e/test_docs.py``. A block of ``text`` is a part of
something, or of another program, and nobody looks at it.
"""

import ast
import importlib.util
import inspect
import itertools
import re
import shlex
from pathlib import Path

import pytest

from holdfast.cli.arguments import parser

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "examples/README.md"])
SETTINGS = set((Path(__file__).parent / "settings.txt").read_text().split())


def blocks(kind):
    return list(each_block(kind))


def each_block(kind):
    for page in PAGES:
        found = re.findall(
            rf"^( *)```{kind}\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL
        )
        for number, (indent, text) in enumerate(found):
            code = re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)
            yield pytest.param(code, id=f"{page.relative_to(ROOT)}:{number}")


def commands(code):
    """Yield what a shell would be given, word by word."""
    for line in code.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|;|\||\bdo\b", line):
            try:
                yield shlex.split(part, comments=True)
            except ValueError:  # a quotation that another part has the end of
                continue


@pytest.mark.parametrize("code", blocks("sh"))
def test_commands_are_taken(code):
    top = parser()
    for words in commands(code):
        here = words[1:] if words[:1] == ["export"] else words
        rest = list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), here))
        given = {word.split("=")[0] for word in here[: len(here) - len(rest)]}

        assert not {name for name in given if name.startswith("HOLDFAST_")} - SETTINGS
        if rest[:1] == ["holdfast"]:
            end = next((i for i, w in enumerate(rest) if re.match(r"\d?[<>&]", w)), len(rest))
            top.parse_args(rest[1:end])
        if rest[:2] == ["python", "-m"] and rest[2].startswith("holdfast"):
            assert importlib.util.find_spec(f"{rest[2]}.__main__")


def named(node):
    """Return a dotted name, empty for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{named(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def is_written(name):
    """Say whether a module that would import a framework of others has a name: it is not run."""
    module, _, last = name.rpartition(".")
    place = ROOT / "sdk" / module.replace(".", "/")
    files = [place.with_suffix(".py"), *place.glob("*.py")]
    code = "".join(file.read_text() for file in files if file.exists())
    own = ROOT / "sdk" / name.replace(".", "/")
    named = re.search(rf"^(def|class) {last}\b", code, re.MULTILINE)
    return named or own.is_dir() or own.with_suffix(".py").is_file()


def found(name):
    """Return what a name of ours stands for, imported as far as it is a module."""
    thing = importlib.import_module("holdfast")
    for part in name.split(".")[1:]:
        if not hasattr(thing, part):
            importlib.import_module(f"{thing.__name__}.{part}")
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("code", blocks("python"))
def test_names_and_arguments_are_there(code):
    tree = ast.parse(code)
    ours = {"holdfast": "holdfast"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast"):
            ours |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, _, rest = named(node.func).partition(".")
            if first not in ours:
                continue
            name = ".".join(filter(None, (ours[first], rest)))
            if name.startswith("holdfast.integrations."):
                assert is_written(name), name
                continue
            called = found(name)
            takes = inspect.signature(called).parameters.values()
            if all(one.kind is not one.VAR_KEYWORD for one in takes):
                keywords = {one.arg for one in node.keywords if one.arg}
                assert keywords <= {one.name for one in takes}, ast.unparse(node)
    for name in ours.values():
        assert is_written(name) if name.startswith("holdfast.integrations.") else found(name)
