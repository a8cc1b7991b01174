"""The house rules of the style guide, by file, so that a failure names the place and the fix."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
BROAD_EXCEPT = {
    line.split("#")[0].strip()
    for line in (Path(__file__).parent / "broad_except.txt").read_text().splitlines()
    if line.split("#")[0].strip()
}


def tracked(*patterns):
    listed = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    return [name for name in names if not name.startswith("sdk/holdfast/v1/")]


PYTHON = tracked("*.py")
SOURCES = [name for name in PYTHON if name.startswith(("sdk/", "services/"))]
TEXTS = [name for name in tracked() if not name.endswith((".bin", ".png", ".ico", ".woff2"))]


def parsed(name):
    return ast.parse((ROOT / name).read_text(), name)


@pytest.mark.parametrize("name", PYTHON)
def test_a_file_is_short(name):
    count = len((ROOT / name).read_text().splitlines())

    assert count <= FILE_LINES_MAX, f"{name} has {count} lines: split it by what changes together"


@pytest.mark.parametrize("name", [name for name in PYTHON if "/migrations/" not in name])
def test_functions_are_short(name):
    """Migrations are exempt: they are history, one list of statements each."""
    long = [
        f"{name}:{node.lineno} {node.name}"
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    ]

    assert [] == long, f"over {FUNCTION_LINES_MAX} lines; give the steps names: {long}"


@pytest.mark.parametrize("name", SOURCES)
def test_errors_are_caught_by_name(name):
    """Broad catches hide torn saves; they stand at process edges only."""
    broad = {"Exception", "BaseException"}
    for node in ast.walk(parsed(name)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = {item.id for item in caught if isinstance(item, ast.Name)}
        if node.type is None or names & broad:
            assert name in BROAD_EXCEPT, (
                f"{name}:{node.lineno} catches everything: name the errors, or list the file "
                f"with its reason in tests/tidy/broad_except.txt"
            )


def test_the_list_of_broad_catches_names_files_that_exist():
    gone = {name for name in BROAD_EXCEPT if not (ROOT / name).is_file()}

    assert not gone, f"remove from tests/tidy/broad_except.txt: {gone}"


@pytest.mark.parametrize("name", SOURCES)
def test_public_names_are_sorted(name):
    for node in parsed(name).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            listed = [item.value for item in node.value.elts]

            assert sorted(listed) == listed, f"{name}: sort __all__"


@pytest.mark.parametrize("name", SOURCES)
def test_a_module_says_what_it_is(name):
    assert ast.get_docstring(parsed(name)), f"{name}: begin with one line that says what it owns"


@pytest.mark.parametrize("name", [name for name in SOURCES if not name.endswith("__init__.py")])
def test_no_module_is_a_drawer(name):
    drawers = {"utils", "util", "helpers", "common", "misc"}

    assert Path(name).stem not in drawers, f"{name}: name it by what it owns"


def test_importing_holdfast_is_light():
    """Rule 27: neither torch nor grpc, and no module but itself, until a name is used."""
    seen = subprocess.run(
        [sys.executable, "-c", "import sys, holdfast; print(*sys.modules)"],
        env={"PYTHONPATH": str(ROOT / "sdk")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    heavy = {"torch", "grpc", "numpy", "google.protobuf"}.intersection(seen)
    ours = {name for name in seen if name.startswith("holdfast.")}

    assert not heavy | ours, f"import holdfast pulled {sorted(heavy | ours)}: import it on use"


def test_a_restart_imports_nothing_that_most_ranks_do_not_ask_for():
    """Naming what a rank needs, and the search for an embedded stack: 5 ms of each restart."""
    seen = subprocess.run(
        [sys.executable, "-c", "import sys, holdfast; holdfast.Checkpointer; print(*sys.modules)"],
        env={"PYTHONPATH": str(ROOT / "sdk")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    rare = {"holdfast.training.restore_needs", "holdfast.format.index", "holdfast.embedded"}

    assert not rare.intersection(seen), "import it where it is asked for"


def test_every_public_name_can_be_loaded():
    import holdfast

    assert sorted(holdfast.__all__) == holdfast.__all__
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = holdfast.Nonsense


SECRET = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{30}|"
    r"\bsk-[A-Za-z0-9_-]{20}|\bpypi-[A-Za-z0-9_-]{20}"
)
PLACE = re.compile(
    r"/work/(main|shared)\b|/home/[a-z]+/|/Users/|(?i:artifactory|nexus|devpi|pypi\.org/simple)|"
    r"--(extra-)?index-url|/opt/pypi"
)


@pytest.mark.parametrize("name", TEXTS)
def test_no_secret_and_no_place_of_one_machine_is_tracked(name):
    if name == "tests/tidy/test_house_rules.py":
        return
    text = (ROOT / name).read_text(errors="replace")
    found = SECRET.search(text) or PLACE.search(text)

    assert found is None, f"{name} holds {found[0]!r}: take it out, also out of the history"


FEATURES = set((Path(__file__).parent / "criteria.txt").read_text().split())


@pytest.mark.parametrize("name", [name for name in PYTHON if name.startswith("tests/")])
def test_criteria_that_tests_cite_exist(name):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docs = [
        ast.get_docstring(node) or "" for node in ast.walk(parsed(name)) if isinstance(node, kinds)
    ]
    cited = {number for doc in docs for number in re.findall(r"\b[FGP][1-9][0-9]{0,2}\b", doc)}

    assert cited <= FEATURES, (
        f"{name} cites {sorted(cited - FEATURES)}: see tests/tidy/criteria.txt"
    )
