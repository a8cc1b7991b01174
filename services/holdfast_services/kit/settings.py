"""Settings of a service: one typed model, from the environment, a file, or by default.

A field of the model is a ``Setting``: its variable, how its text is read, what it means. The key in
the file is the variable's name without ``HOLDFAST_``, in small letters; see ``settings_file``.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from holdfast.core import env
from holdfast.core.ids import node_name
from holdfast.errors import CheckpointError, InvalidRequestError
from holdfast.rpc.tls import TLS
from holdfast_services.kit.settings_file import SettingsFile, read_file
from holdfast_services.kit.visitors import read_names

PREFIX = "HOLDFAST_"
FILE = "HOLDFAST_CONFIG"
READY = "file that the service writes when it is ready"
NEEDED = "–"  # noqa: RUF001 - as tables of the pages have it
"""The default of what has none: the service does not start without it, or has no such part."""
SETTING = "setting"
HOST = "HOLDFAST_LISTEN_HOST"
LISTENS = ("HOLDFAST_LISTEN", "HOLDFAST_REST_LISTEN", "HOLDFAST_METRICS_LISTEN")
INSECURE = "HOLDFAST_INSECURE"

M = TypeVar("M")
Read = Callable[[Mapping[str, str], str], Any]
"""Reads one name of a mapping; refuses what cannot be, naming it; see ``core.env``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. ``meaning`` and ``default`` are for people, in Markdown."""

    name: str
    read: Read
    meaning: str
    default: str

    @property
    def key(self) -> str:
        """Its key in a file."""
        return self.name.removeprefix(PREFIX).lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is in force of a setting; ``origin`` says where it comes from.

    ``label`` is how an error names it. ``text`` empty: the default is.
    """

    setting: Setting
    text: str
    label: str
    origin: str

    def value(self) -> Any:
        """Return the value.

        Raises:
            InvalidRequestError: it is missing, or cannot be read; names where it was set.
        """
        return self.setting.read({self.label: self.text} if self.text else {}, self.label)


def setting(name: str, read: Read, meaning: str, default: str = "none") -> Any:
    """Return a field of a model."""
    return field(
        metadata={SETTING: Setting(name=name, read=read, meaning=meaning, default=default)}
    )


def text(default: str = "") -> Read:
    """Return a reader of any text."""
    return lambda environ, name: environ.get(name) or default


def required(meaning: str) -> Read:
    """Return a reader of a text that must be set; ``meaning`` says to what."""
    return lambda environ, name: env.required(environ, name, meaning)


def path(environ: Mapping[str, str], name: str) -> Path | None:
    """Read a path; None: not set."""
    named = environ.get(name)
    return Path(named) if named else None


def node_called(default: Callable[[], str]) -> Read:
    """Return a reader of a name that a node can have."""

    def read(environ: Mapping[str, str], name: str) -> str:
        try:
            return node_name(environ.get(name) or default())
        except InvalidRequestError as cause:
            raise InvalidRequestError(f"{name}: {cause.message}") from cause

    return read


def load(model: type[M], environ: Mapping[str, str], service: str) -> M:
    """Return the settings of a service, which has those of its log besides.

    Raises:
        InvalidRequestError: a setting is missing or not what it should be, or the file has keys
            that there are not; names the variable, or the file and the key. Or the service would
            answer other machines without TLS, and nobody has asked for that.
    """
    file = file_of(environ)
    refused = unknown(model, file, service) if file is not None else {}
    if file is not None and refused:
        raise InvalidRequestError("; ".join(file.refusal(*each) for each in refused.items()))
    network = _made(NetworkSettings, environ, file, service)
    made = _made(model, environ, file, service)
    if network.tls is None and not network.insecure:
        _check_unseen(made)
    return made


def _check_unseen(made: object) -> None:
    """Refuse an address that other machines reach.

    Raises:
        InvalidRequestError: there is one; names the setting.
    """
    for field_name, each in _by_field(type(made)).items():
        said = getattr(made, field_name) if each.name in (HOST, *LISTENS) else ""
        host = said if each.name == HOST else said.rpartition(":")[0]
        if host and not _loopback(host):
            raise InvalidRequestError(
                f"{each.name}={said} would answer whoever reaches it: set {TLS} to a folder with "
                f"certificates, which `holdfast certs` makes, or {INSECURE}=1 where the network is "
                "closed to others"
            )


def _loopback(host: str) -> bool:
    """Tell whether only this machine reaches an address; of a name nobody knows but localhost.

    >>> [_loopback(one) for one in ("127.0.0.1", "[::1]", "localhost", "0.0.0.0", "agent-1")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def load_log(environ: Mapping[str, str], service: str) -> LogSettings:
    """Return how a service is to log.

    Raises:
        InvalidRequestError: there is no such level, or format; or no such file.
    """
    return _made(LogSettings, environ, file_of(environ), service)


def load_network(environ: Mapping[str, str], service: str) -> NetworkSettings:
    """Return how a service speaks with others; errors as in ``load_log``."""
    return _made(NetworkSettings, environ, file_of(environ), service)


def unknown(model: type[Any], file: SettingsFile, service: str) -> dict[str, str]:
    """Return keys of a file that neither the model of a service nor all services have, as hints."""
    known = {each.key for each in (*settings_of(model), *settings_of_all())}
    return file.unknown(service, known)


def _made(model: type[M], environ: Mapping[str, str], file: SettingsFile | None, service: str) -> M:
    values = {
        name: find(each, environ, file, service).value() for name, each in _by_field(model).items()
    }
    return model(**values)


def file_of(environ: Mapping[str, str]) -> SettingsFile | None:
    """Return the file that ``HOLDFAST_CONFIG`` names; None: it names none.

    Raises:
        InvalidRequestError: it cannot be read.
    """
    named = environ.get(FILE)
    return read_file(Path(named), FILE) if named else None


def find(
    each: Setting, environ: Mapping[str, str], file: SettingsFile | None, service: str
) -> Found:
    """Return what is in force: the environment's, else the file's, else the default."""
    said = environ.get(each.name)
    if said:
        return Found(setting=each, text=said, label=each.name, origin="environment")
    there = file.find(service, each.key) if file is not None else None
    if there is not None:
        return Found(setting=each, text=there.text, label=there.label, origin=there.label)
    return Found(setting=each, text="", label=each.name, origin="default")


def settings_of(model: type[Any]) -> Iterator[Setting]:
    """Return the settings of a model, in its order."""
    yield from _by_field(model).values()


def settings_of_all() -> Iterator[Setting]:
    """Return the settings that every service has beside its own."""
    yield from settings_of(NetworkSettings)
    yield from settings_of(LogSettings)


def _by_field(model: type[Any]) -> dict[str, Setting]:
    return {each.name: each.metadata[SETTING] for each in fields(model) if SETTING in each.metadata}


def log_level(environ: Mapping[str, str], name: str) -> str:
    """Read a level of the log.

    Raises:
        InvalidRequestError: there is no such level.
    """
    level = (environ.get(name) or "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        raise InvalidRequestError(f"{name}={level} is no level; use DEBUG, INFO or WARNING")
    return level


def log_format(environ: Mapping[str, str], name: str) -> str:
    """Read a format of the log.

    Raises:
        InvalidRequestError: there is no such format.
    """
    form = environ.get(name) or "text"
    if form not in ("text", "json"):
        raise InvalidRequestError(f"{name}={form} is neither text nor json")
    return form


def _collector(environ: Mapping[str, str], name: str) -> str:
    url = environ.get(name, "")
    if url and not url.startswith(("http://", "https://")):
        raise InvalidRequestError(
            f"{name}={url[:80]!r} is not the address of a collector for OTLP over HTTP, such as "
            f"http://127.0.0.1:4318"
        )
    return url


def _share(environ: Mapping[str, str], name: str) -> float:
    text = environ.get(name) or "1"
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise InvalidRequestError(f"{name}={text[:80]!r} is not a share, from 0 to 1")
    return share


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """How a service logs: what every service is told beside its own settings."""

    level: str = setting("HOLDFAST_LOG", log_level, "log level, to standard error", "`INFO`")
    form: str = setting(
        "HOLDFAST_LOG_FORMAT",
        log_format,
        "`text`, or `json`: a line of JSON for each record, with `at` (UTC), `level`, `service`, "
        "`logger`, `message`, and what it is about: `job`, `run`, `step`, `generation`, `rank`, "
        "`node`, `kind` of an error, `traceback` of a bug",
        "`text`",
    )


def _insecure(environ: Mapping[str, str], name: str) -> bool:
    return bool(env.number(environ, name, 0, low=0, high=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """How a service speaks with others over the network: beside its own settings, as its log."""

    tls: Path | None = setting(
        TLS,
        path,
        "folder with `ca.crt`, `tls.crt` and `tls.key`: whatever goes over the network is "
        "[mutual TLS](../howto/tls.md). The command line takes it too",
    )
    insecure: bool = setting(
        INSECURE,
        _insecure,
        f"1: a service without `{TLS}` may listen at addresses that other machines reach. Only "
        "where the network is closed to others",
        "0: it does not start",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """Where a service sends traces, empty: nowhere; a model of settings has these too."""

    traces: str = setting(
        "HOLDFAST_TRACES",
        _collector,
        "collector of OpenTelemetry that gets [traces](../howto/traces.md), for OTLP over HTTP: "
        "`http://host:4318`; the same for all services",
    )
    traces_share: float = setting(
        "HOLDFAST_TRACES_SHARE",
        _share,
        "share of the checkpoints that are traced, the same ones by all services",
        "1",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSettings(TraceSettings):
    """Where a service without REST tells its metrics; a model of settings has these too."""

    metrics_listen: str = setting(
        "HOLDFAST_METRICS_LISTEN",
        env.listen,
        "`host:port` for [`/metrics`](metrics.md), and nothing else; a port alone is one of "
        "127.0.0.1; `off`: none. `holdfast up` does not hand it on",
        NEEDED,
    )
    rest_names: frozenset[str] = setting(
        "HOLDFAST_REST_NAMES",
        read_names,
        "other host names by which browsers reach it, as for the metadata service",
    )


def problem_of(found: Found) -> str:
    """Return why a value cannot be; empty: it can."""
    try:
        found.value()
    except CheckpointError as error:
        return error.message
    return ""
