"""What is written in two places says the same: generated code, settings, links."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from holdfast_services.config.models import MODELS
from holdfast_services.config.page import replaced
from holdfast_services.kit.settings import unknown
from holdfast_services.kit.settings_file import SettingsFile

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
NAME = re.compile(r"\bHOLDFAST_[A-Z0-9_]*[A-Z0-9]\b")


def test_generated_code_is_what_the_protocol_files_say(tmp_path):
    protos = sorted(str(path) for path in (ROOT / "proto/holdfast/v1").glob("*.proto"))
    tools = Path(sys.prefix) / "proto/bin"
    assert tools.is_dir(), "the generator has an environment of its own: run `make setup`"
    subprocess.run(
        [tools / "python", "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}",
         *(f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
         *protos],
        check=True,
        env={"PATH": str(tools)},
    )  # fmt: skip
    made = {path.name: path.read_text() for path in (tmp_path / "holdfast/v1").iterdir()}
    committed = {
        path.name: path.read_text()
        for path in (ROOT / "sdk/holdfast/v1").glob("*.py*")
        if path.name != "__init__.py"
    }

    assert set(made) == set(committed), "run `make proto` and commit sdk/holdfast/v1"
    drifted = [name for name in made if made[name] != committed[name]]
    assert [] == drifted, "run `make proto` and commit sdk/holdfast/v1"


def settings_in_code():
    found = set()
    for folder in ("sdk/holdfast", "services/holdfast_services"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(NAME.findall(path.read_text()))
    return found


def test_settings_do_not_sprawl():
    """Rule 19: a new setting is seen in review."""
    listed = set((HERE / "settings.txt").read_text().split())
    found = settings_in_code()

    assert not found - listed, (
        f"new settings {sorted(found - listed)}: is a default not enough? then add them to "
        f"tests/tidy/settings.txt and docs/reference/environment.md"
    )
    assert not listed - found, f"take out of tests/tidy/settings.txt: {sorted(listed - found)}"


def test_every_setting_is_documented_in_docs():
    """Each has a row of its own that says what it means and what happens without it."""
    page = (ROOT / "docs/reference/environment.md").read_text()
    rows = re.findall(r"^\| `(HOLDFAST_\w+)` \| (.+) \| (.+) \|$", page, re.MULTILINE)
    documented = {name for name, meaning, default in rows if meaning.strip() and default.strip()}

    assert settings_in_code() == documented


def test_the_page_of_settings_is_what_the_models_say():
    page = (ROOT / "docs/reference/environment.md").read_text()
    fix = "run `python -m holdfast_services.config --page docs/reference/environment.md`"

    assert page == replaced(page), fix


def test_the_file_in_the_page_of_settings_is_one():
    page = (ROOT / "docs/reference/environment.md").read_text()
    text = re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1]
    top = {k: v for k, v in tomllib.loads(text).items() if not isinstance(v, dict)}
    tables = {k: v for k, v in tomllib.loads(text).items() if k not in top}
    file = SettingsFile(Path("page"), top, tables)

    assert {} == {
        k: v for service in tables for k, v in unknown(MODELS[service], file, service).items()
    }


def test_the_generated_code_runs_on_what_pyproject_allows():
    """Code of protobuf 6 runs on 6 and 7; gRPC's says itself which release it needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = dict(re.match(r"([\w-]+)>=([\d.]+)", one).groups() for one in project["dependencies"])
    for path in (ROOT / "sdk/holdfast/v1").glob("*_pb2*.py"):
        made_by = re.search(
            r"^(?:# Protobuf Python Version: |GRPC_GENERATED_VERSION = ')([\d.]+)",
            path.read_text(),
            re.MULTILINE,
        )
        needed = allowed["grpcio" if "_grpc" in path.name else "protobuf"]

        assert made_by[1] in (needed, f"{needed}.0"), "generate it with `make proto`"


@pytest.mark.parametrize(("gpu", "said"), [("", True), ("/dev/nvidia0", False)])
def test_setting_up_says_what_it_fetches_for_no_gpu(gpu, said):
    planned = subprocess.run(
        ["make", "--dry-run", "--always-make", "setup", f"GPU={gpu}"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip

    assert said is ("NO_GPU" in planned.stdout)


IMPORTED_AS = {
    "grpcio": "grpc",
    "megatron-core": "megatron.core",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "prometheus-client": "prometheus_client",
    "protobuf": "google.protobuf",
}
NOT_IMPORTED = {"psycopg", "pyeclib", "torchdata"}
"""SQLAlchemy imports the first by the URL of the database; the second brings a library that is
called by its path; the user makes objects of the last."""


def test_every_dependency_of_users_is_imported():
    """Defect X10: boto3 was asked for, and only its core is used."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {
        *project["dependencies"],
        *(one for key in extras if key != "dev" for one in extras[key]),
    }
    names = {re.match(r"[\w-]+", one)[0] for one in asked} - NOT_IMPORTED
    code = "\n".join(
        path.read_text() for room in ("sdk", "services") for path in (ROOT / room).rglob("*.py")
    )
    modules = {IMPORTED_AS.get(name, name) for name in names}

    assert [] == [
        name for name in sorted(modules)
        if not re.search(rf"^\s*(import|from) {re.escape(name)}\b", code, re.MULTILINE)
    ]  # fmt: skip


PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_docs_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page

        assert file.exists(), f"{page.name}: {target} leads nowhere"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target} names no heading"


def test_every_page_is_listed():
    """A page that the index lacks is not found."""
    docs = ROOT / "docs"
    for folder, index in ((docs, docs / "index.md"), (docs / "adr", docs / "adr/index.md")):
        links = re.findall(r"\]\(([^)#\s]+)", index.read_text())
        below = folder.rglob("*.md") if folder == docs else folder.glob("*.md")
        pages = {str(page.relative_to(folder)) for page in below} - {"index.md"}
        if folder == docs:
            pages = {page for page in pages if not page.startswith("adr/")}

        assert not pages - set(links), f"{index.relative_to(ROOT)} lacks {pages - set(links)}"


def test_decisions_have_numbers_of_their_own():
    numbers = [path.name[:4] for path in (ROOT / "docs/adr").glob("[0-9]*.md")]

    assert len(set(numbers)) == len(numbers), "two decisions share a number: renumber the later one"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_pages_name_exist(page):
    """A promise is proven by what its row names, in the file that it names."""
    for names, file in re.findall(
        r"((?:`test_\w+`(?:, | and )?)*)(?: in )?`(tests/[\w/]+\.\w+)`", page.read_text()
    ):
        assert (ROOT / file).is_file(), f"{page.name}: {file} does not exist"
        for name in re.findall(r"\w+", names.replace(" and ", " ")):
            assert re.search(rf"\bdef {name}\(", (ROOT / file).read_text()), (
                f"{page.name}: {file} has no {name}"
            )


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_the_menu_of_the_site_is_the_index():
    """In the order of Diátaxis; each page once."""
    menu = runpy.run_path(str(ROOT / "deploy/site/pages.py"))["menu"]
    made = menu((ROOT / "docs/index.md").read_text())
    linked = re.findall(r"\]\(([^)#]+\.md)", (ROOT / "docs/index.md").read_text())

    names = [next(iter(entry)) for entry in made]
    assert ["Home", "Tutorial", "How-to", "Explanation", "Reference", "Decisions"] == names
    assert {"holdfast run": "docs/howto/run.md"} == made[2]["How-to"][0]["Run a training"][0]
    pages = re.findall(r"'([^']+\.md)'", str(made))
    assert len(set(pages)) == len(pages)
    assert {os.path.normpath(f"docs/{page}") for page in linked} <= set(pages)
