"""The house rules of the style guide: a failure names every place and the fix.

A rule is one test, not one for each file: these would be half of all that is collected.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = str(Path(__file__).relative_to(ROOT))
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


def test_a_file_is_short():
    counts = {name: len((ROOT / name).read_text().splitlines()) for name in PYTHON}
    long = {name: count for name, count in counts.items() if count > FILE_LINES_MAX}

    assert not long, f"over {FILE_LINES_MAX} lines; split them by what changes together: {long}"


def test_functions_are_short():
    """Migrations are exempt: they are history, one list of statements each."""
    long = [
        f"{name}:{node.lineno} {node.name}"
        for name in PYTHON
        if "/migrations/" not in name
        for node in ast.walk(parsed(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    ]

    assert [] == long, f"over {FUNCTION_LINES_MAX} lines; give the steps names: {long}"


def catches_everything(node):
    if not isinstance(node, ast.ExceptHandler):
        return False
    caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    names = {item.id for item in caught if isinstance(item, ast.Name)}
    return node.type is None or bool(names & {"Exception", "BaseException"})


def test_errors_are_caught_by_name():
    """Broad catches hide torn saves; they stand at process edges only."""
    broad = [
        f"{name}:{node.lineno}"
        for name in SOURCES
        if name not in BROAD_EXCEPT
        for node in ast.walk(parsed(name))
        if catches_everything(node)
    ]

    assert [] == broad, (
        f"these catch everything: name the errors, or list the file with its reason in "
        f"tests/tidy/broad_except.txt: {broad}"
    )


def test_the_list_of_broad_catches_names_files_that_exist():
    gone = {name for name in BROAD_EXCEPT if not (ROOT / name).is_file()}

    assert not gone, f"remove from tests/tidy/broad_except.txt: {gone}"


def public_names(name):
    for node in parsed(name).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [item.value for item in node.value.elts]
    return []


def test_public_names_are_sorted():
    listed = {name: public_names(name) for name in SOURCES}
    unsorted = [name for name, names in listed.items() if sorted(names) != names]

    assert any(listed.values())
    assert [] == unsorted, f"sort __all__ of {unsorted}"


def test_a_module_says_what_it_is():
    silent = [name for name in SOURCES if not ast.get_docstring(parsed(name))]

    assert [] == silent, f"begin with one line that says what it owns: {silent}"


def test_no_module_is_a_drawer():
    stems = {"utils", "util", "helpers", "common", "misc"}
    drawers = [name for name in SOURCES if Path(name).stem in stems]

    assert [] == drawers, f"name each by what it owns: {drawers}"


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


def test_no_secret_and_no_place_of_one_machine_is_tracked():
    texts = {name: (ROOT / name).read_text(errors="replace") for name in TEXTS if name != HERE}
    found = {name: SECRET.search(text) or PLACE.search(text) for name, text in texts.items()}
    held = {name: match[0] for name, match in found.items() if match}

    assert not held, f"take it out, also out of the history: {held}"


FEATURES = set((Path(__file__).parent / "criteria.txt").read_text().split())


def cited(name):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    docs = [
        ast.get_docstring(node) or "" for node in ast.walk(parsed(name)) if isinstance(node, kinds)
    ]
    return {number for doc in docs for number in re.findall(r"\b[FGP][1-9][0-9]{0,2}\b", doc)}


def test_criteria_that_tests_cite_exist():
    by_test = {name: cited(name) for name in PYTHON if name.startswith("tests/")}
    unknown = {name: sorted(them - FEATURES) for name, them in by_test.items() if them - FEATURES}

    assert any(by_test.values())
    assert not unknown, f"see tests/tidy/criteria.txt: {unknown}"
