"""The tables of ``docs/reference/environment.md`` about services, made from their models."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast_services.config.models import MODELS
from holdfast_services.kit.settings import FILE, READY, Setting, settings_of, settings_of_all

BEGIN = (
    "<!-- made from the settings of the services: `python -m holdfast_services.config --page` -->"
)
END = "<!-- end -->"
TITLES = {
    "metadata": "Metadata",
    "agent": "Agent",
    "persistence": "Persistence worker",
    "scheduler": "Scheduler",
    "operator": "Operator",
}
HEAD = ("| variable | meaning | default |", "|---|---|---|")
FILE_ROW = (
    f"| `{FILE}` | a [file](#a-file) with settings, TOML; a variable that is set goes before it "
    "| none |"
)


def tables() -> str:
    """Return the tables of all services, with headings."""
    parts = [
        "\n".join(
            ["## All services", "", *HEAD, FILE_ROW, *_rows(settings_of_all()), _ready_row()]
        ),
        *map(_service, MODELS),
    ]
    return "\n\n".join(parts)


def replaced(page: str) -> str:
    """Return a page with the tables of today between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def _service(service: str) -> str:
    own = (each for each in settings_of(MODELS[service]) if each.meaning != READY)
    title = f"## {TITLES[service]}: `python -m holdfast_services.{service}`"
    return "\n".join([title, "", *HEAD, *_rows(own)])


def _rows(settings: Iterable[Setting]) -> list[str]:
    return [f"| `{each.name}` | {each.meaning} | {each.default} |" for each in settings]


def _ready_row() -> str:
    return f"| `HOLDFAST_READY_FILE` | {READY} | none |"
