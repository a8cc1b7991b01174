"""The reference pages that are written by hand name all there is, and nothing else."""

import argparse
import ast
import contextlib
import inspect
import re
from pathlib import Path

import pytest

import holdfast
from holdfast import elastic
from holdfast.cli.arguments import parser

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OF_ALL = {"--help", "--json", "--dir", "--attempt"}
"""Said once for all commands, below and above their table."""
OPTIONS_ON = {"run": "docs/howto/run.md", "simulate": "docs/reference/simulate.md"}
"""Their row has the usual ones, that page the others."""


def commands():
    """Return the long options of each command; of two spellings the one with dashes."""
    (found,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {
        name: {
            option
            for action in one._actions
            if action.help is not argparse.SUPPRESS
            for option in action.option_strings
            if option.startswith("--") and "_" not in option
        }
        for name, one in found.choices.items()
    }


def rows():
    """Return what the table of commands calls each: its synopses, and all that its rows say."""
    calls, said = {}, {}
    for row in re.findall(r"^\| (`.+) \|$", (REFERENCE / "cli.md").read_text(), re.MULTILINE):
        first, rest = row.replace(r"\|", "/").split(" | ", 1)
        for synopsis in re.findall(r"`([^`]+)`", first):
            name = synopsis.split()[0]
            calls.setdefault(name, set()).update(OPTION.findall(synopsis.split(" -- ")[0]))
            said.setdefault(name, set()).update(OPTION.findall(synopsis + rest))
    return calls, said


def test_the_page_of_the_command_line_has_each_command_and_option():
    calls, said = rows()
    real = commands()
    real["run"] -= {"--auto-steps-by", "--fresh"}  # on the page about --auto
    for name, page in OPTIONS_ON.items():
        said[name] |= set(OPTION.findall((ROOT / page).read_text()))

    assert set(real) == set(calls)
    assert {} == {name: o for name in real if (o := real[name] - said[name] - OF_ALL)}, (
        "are missing"
    )
    assert {} == {name: o for name in real if (o := calls[name] - real[name])}, "there are not"


ROUTE = re.compile(r'@(?:app|router)\.(get|post|put|delete)\(\s*"([^"]+)"')
PREFIX = re.compile(r'APIRouter\(prefix="([^"]+)"')


def served(service):
    for path in (ROOT / f"services/holdfast_services/{service}/edges").glob("*.py"):
        code = path.read_text()
        prefix = (PREFIX.findall(code) or [""])[0]
        for method, where in ROUTE.findall(code):
            yield f"{method.upper()} {prefix}{where.replace(':path', '')}"


def listed(text):
    """Return what the first cells name: ``GET`` where they name no method."""
    for row in re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE):
        methods = re.findall(r"\b(?:GET|POST|PUT|DELETE)\b", row) or ["GET"]
        paths = re.findall(r"(?:^|[` ])([/…][^`?\[, ]*)", row)
        if any("/api/" in path or "…/" in path or path == "/healthz" for path in paths):
            whole = [path.replace("…/", "/api/v1/jobs/{job}/") for path in paths]
            pairs = zip(methods, whole, strict=True) if len(methods) == len(whole) else (
                (method, path) for method in methods for path in whole
            )  # fmt: skip
            yield from (" ".join(pair) for pair in pairs)


@pytest.mark.parametrize(("service", "part"), [("metadata", 0), ("scheduler", 1)])
def test_the_page_of_rest_has_each_route(service, part):
    sections = (REFERENCE / "rest.md").read_text().split("\n## ")
    text = sections[part].replace("…/checkpoints", "/api/v1/jobs/{job}/checkpoints")
    own = {"GET /", "GET /healthz", "GET /readyz", "GET /metrics"}

    assert set(served(service)) - own == set(listed(text)) - own


PAGE = (REFERENCE / "python.md").read_text()
GIVEN = {"Decided", "Restored", "SaveHandle", "Loaded", "State"}
"""Users are given these, and look at their attributes."""
ANYTHING = {"AnyOf", "track"}
"""These take any number of arguments."""


def calls_of(name):
    """Yield the page's calls of a name that read as a definition: its arguments, and defaults."""
    for begin in (found.end() for found in re.finditer(rf"\b{name}\(", PAGE)):
        depth, end = 1, begin
        while depth:
            depth += {"(": 1, ")": -1}.get(PAGE[end], 0)
            end += 1
        with contextlib.suppress(SyntaxError):
            made = ast.parse(f"def f({PAGE[begin : end - 1].strip()}): pass").body[0].args
            values = [*made.defaults, *(one for one in made.kw_defaults if one)]
            names = [one.arg for one in (*made.args, *made.kwonlyargs) if one.arg != "options"]
            yield names, [ast.unparse(value) for value in values]


def is_written(value, text):
    """Say whether the page's default is the code's; an object is made inside, of None."""
    try:
        return ast.literal_eval(text) == value
    except ValueError:
        return value is None


@pytest.mark.parametrize(
    ("room", "name"),
    [(holdfast, name) for name in holdfast.__all__ if name not in GIVEN | ANYTHING]
    + [(elastic, name) for name in ("AdaptiveDataLoader", "adapt", "device_mesh", "AdamScale")],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_the_page_of_python_has_each_argument(room, name):
    real = [
        one for one in inspect.signature(getattr(room, name)).parameters.values()
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]  # fmt: skip
    names = [one.name for one in real]
    given = [one.default for one in real if one.default is not inspect.Parameter.empty]

    assert any(
        names == shown and len(given) == len(defaults) and all(map(is_written, given, defaults))
        for shown, defaults in calls_of(name)
    ), f"docs/reference/python.md lacks {name}{inspect.signature(getattr(room, name))}"


@pytest.mark.parametrize("name", sorted(GIVEN))
def test_the_page_of_python_has_each_field_and_no_other(name):
    section = PAGE.split("\n## One-shot" if name == "Loaded" else f"\n## {name}\n")[1]
    section = section.split("\n## ")[0]
    kind = getattr(holdfast, name)
    code = "".join(map(inspect.getsource, kind.__mro__[:-1]))
    shown = re.findall(r"^\| `(\w+)", section, re.MULTILINE)
    fields = {one for one in getattr(kind, "__dataclass_fields__", ()) if not one.startswith("_")}

    assert [] == [one for one in fields if f"`{one}" not in section]
    assert [] == [one for one in shown if not re.search(rf"\b{one}\b(?=:|\(| =)", code)]


def test_messages_that_the_page_on_trouble_quotes_are_messages_of_the_code():
    """A reader looks for what stands in a log; the page has it as the code says it."""
    page = ROOT / "docs/howto/troubleshoot.md"
    quoted = {
        one
        for row in re.findall(r"^\| (\*.+?) \|", page.read_text(), re.MULTILINE)
        for one in re.findall(r"\*([^*]+)\*", row)
    }
    code = "".join(
        path.read_text()
        for room in ("sdk/holdfast", "services/holdfast_services")
        for path in (ROOT / room).rglob("*.py")
    )
    joined = re.sub(r'"\s*\n\s*f?"', "", code)

    assert len(quoted) > 10
    assert [] == sorted(one for one in quoted if one not in joined)
