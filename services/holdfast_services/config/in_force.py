"""What is in force here: each setting with its value, where that comes from, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from holdfast.errors import InvalidRequestError
from holdfast_services.config.models import MODELS, all_settings
from holdfast_services.kit.masking import masked
from holdfast_services.kit.settings import NEEDED, Found, file_of, find, problem_of, unknown
from holdfast_services.kit.settings_file import MISPLACED, SettingsFile


def in_force(services: Sequence[str], environ: Mapping[str, str]) -> dict[str, object]:
    """Return the settings of some services as plain JSON values.

    ``problems`` are what a service would be refused for. Of a single one that is what its start
    would say, too: that something is not set. Of several some run elsewhere, told otherwise.

    Raises:
        InvalidRequestError: the file cannot be read.
    """
    file = file_of(environ)
    rows = [row for service in services for row in _rows(service, environ, file)]
    problems = [*(_unknown(services, file) if file else ())]
    problems += dict.fromkeys(row["problem"] for row in rows if row["problem"])
    if len(services) == 1 and not problems:
        problems += _refusal(services[0], environ)
    return {"file": str(file.path) if file else None, "settings": rows, "problems": problems}


def _refusal(service: str, environ: Mapping[str, str]) -> list[str]:
    """Return what the start of a service would say; nothing: it would start."""
    try:
        MODELS[service].from_env(environ)
    except InvalidRequestError as error:
        return [error.message]
    return []


def _rows(
    service: str, environ: Mapping[str, str], file: SettingsFile | None
) -> Iterator[dict[str, str]]:
    for each in all_settings(service):
        try:
            found = find(each, environ, file, service)
        except InvalidRequestError as error:
            yield _row(service, each.name, each.key, "", "file", error.message)
            continue
        value = masked(found.text) if found.text else _plain(each.default)
        yield _row(service, each.name, each.key, value, found.origin, _problem(found))


def _row(
    service: str, name: str, key: str, value: str, origin: str, problem: str
) -> dict[str, str]:
    return {
        "service": service,
        "name": name,
        "key": key,
        "value": value,
        "from": origin,
        "problem": problem,
    }


def _problem(found: Found) -> str:
    """Return what is wrong with a value; nothing is, where none is set."""
    return problem_of(found) if found.text else ""


def _unknown(services: Sequence[str], file: SettingsFile) -> list[str]:
    """Return what is said of keys that there are not; of two hints the one that is sure."""
    found: dict[str, str] = {}
    for service in services:
        for where, hint in unknown(MODELS[service], file, service).items():
            if where not in found or hint.startswith(MISPLACED):
                found[where] = hint
    return [file.refusal(*each) for each in found.items()]


def _plain(default: str) -> str:
    """Return a default without its Markdown."""
    return "" if default == NEEDED else default.replace("`", "")
