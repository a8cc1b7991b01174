"""Mutual TLS: what a process shows to others of its cluster, and whom it believes.

The folder ``HOLDFAST_TLS`` holds ``ca.crt``, ``tls.crt`` and ``tls.key``, as a TLS secret of
Kubernetes does. Whoever has a certificate of the CA belongs to the cluster; servers have the name
``holdfast`` in theirs, whatever their host is called. A process belongs to one cluster, as it runs
as one user: channels, servers and connections ask here, so that none of them can be forgotten.

Files may be replaced at any time: whoever connects or is connected to asks anew.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import InvalidRequestError

TLS = "HOLDFAST_TLS"
NAME = "holdfast"
CA, CERTIFICATE, KEY = FILES = ("ca.crt", "tls.crt", "tls.key")
FILE_BYTES_MAX = 1 << 20
FLIGHTS_COUNT_MAX = 8
REFUSED_S = 10.0
"""What peers would refuse is read again after so long: it may be valid, or readable, by then."""
EXPIRED = 10
"""OpenSSL's ``X509_V_ERR_CERT_HAS_EXPIRED``."""
NAME_MISMATCH = 62

_REASONS = {
    "hostname verification": f"its certificate lacks the name {NAME}, see its {TLS}",
    "wrong_version_number": f"it speaks without TLS and this process has {TLS}, set it there too",
    "certificate has expired": f"its certificate has expired, renew what is in its {TLS}",
    "handshake failed": f"its certificate is not of the CA in {TLS}",
}
"""By gRPC's words, in this order: of a connection that was not made, why."""

log = logging.getLogger(__name__)

_Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What the files of a folder say; they fit one another, and no certificate has expired.

    ``expires_s``: when the certificate does, seconds since 1970. ``server`` and ``client`` are
    contexts for connections; peers of both must show a certificate of the CA.
    """

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    expires_s: float
    server: ssl.SSLContext = field(compare=False, repr=False)
    client: ssl.SSLContext = field(compare=False, repr=False)


def read_identity(folder: Path) -> Identity:
    """Return what a folder says, after a handshake with itself, which is what peers will check.

    Raises:
        InvalidRequestError: a file is missing, or peers would refuse it; names the file and why.
    """
    ca, certificate, key = (_bytes(folder, name) for name in FILES)
    server, client = (
        _context(folder, protocol)
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    try:
        shown = _shown(server, client)
    except ssl.SSLCertVerificationError as cause:
        raise InvalidRequestError(f"{TLS}={folder}: {_refused(cause, server)}") from cause
    except ssl.SSLError as cause:
        raise InvalidRequestError(f"{TLS}={folder}: {CERTIFICATE} is refused: {cause}") from cause
    expires_s = float(ssl.cert_time_to_seconds(str(shown["notAfter"])))
    return Identity(
        ca=ca, certificate=certificate, key=key, expires_s=expires_s, server=server, client=client
    )


def _bytes(folder: Path, name: str) -> bytes:
    try:
        with (folder / name).open("rb") as file:
            return file.read(FILE_BYTES_MAX)
    except OSError as cause:
        raise InvalidRequestError(f"{TLS}={folder}: {name}: {cause.strerror}") from cause


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # With a ticket a peer would be believed for hours after its CA has been taken away.
        context.num_tickets = 0
    try:
        # Without a password of ours OpenSSL would ask for one on the terminal.
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password="")
    except ssl.SSLError as cause:
        if cause.reason == "KEY_VALUES_MISMATCH":
            why = f"{KEY} is not the key of {CERTIFICATE}"
        else:
            why = f"{CERTIFICATE} or {KEY} is no PEM without a passphrase"
        raise InvalidRequestError(f"{TLS}={folder}: {why}") from cause
    except (OSError, ValueError) as cause:
        raise InvalidRequestError(f"{TLS}={folder}: {CERTIFICATE}, {KEY}: {cause}") from cause
    try:
        context.load_verify_locations(folder / CA)
    except OSError as cause:
        raise InvalidRequestError(f"{TLS}={folder}: {CA} is no certificate in PEM") from cause
    return context


def _shown(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, object]:
    """Return the certificate that both ends of a handshake in memory have taken.

    Raises:
        ssl.SSLError: one of them has not.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(to_client, to_server, server_hostname=NAME)
    answers = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(FLIGHTS_COUNT_MAX):
        for end in (asks, answers):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    return dict(answers.getpeercert() or {})


def _refused(cause: ssl.SSLCertVerificationError, context: ssl.SSLContext) -> str:
    """Return which file would be refused, and why."""
    if cause.verify_code == EXPIRED:
        now_s = time.time()
        ends = [ssl.cert_time_to_seconds(str(one["notAfter"])) for one in context.get_ca_certs()]
        return f"{CA if any(end < now_s for end in ends) else CERTIFICATE} has expired"
    if cause.verify_code == NAME_MISMATCH:
        return f"{CERTIFICATE} lacks the DNS name {NAME}, which each member's certificate has"
    return f"{CERTIFICATE} is refused by {CA}: {cause.verify_message}"


class _Process:
    """The identity of this process, as its folder says now."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._told: tuple[Path | None] | None = None
        self._read: tuple[Path, _Stamp, Identity] | None = None
        self._refused: _Stamp = ()
        self._refused_until_s = 0.0

    def use(self, folder: Path | None) -> None:
        with self._guard:
            self._told = (folder,)

    def identity(self) -> Identity | None:
        with self._guard:
            folder = self._folder()
            if folder is None:
                return None
            stamp = _stamp(folder)
            known = self._read if self._read and self._read[0] == folder else None
            if known is not None and (stamp == known[1] or self._still_refused(stamp)):
                return known[2]
            try:
                found = read_identity(folder)
            except InvalidRequestError as error:
                if known is None:
                    raise
                # Replaced file by file, perhaps: what was read before is good until all are there.
                log.warning("%s; what was there before is used on", error.message)
                self._refused, self._refused_until_s = stamp, time.monotonic() + REFUSED_S
                return known[2]
            self._read = (folder, stamp, found)
            return found

    def _still_refused(self, stamp: _Stamp) -> bool:
        return stamp == self._refused and time.monotonic() < self._refused_until_s

    def has_identity(self) -> bool:
        """Tell whether there is one, without a look at the files."""
        return self._read is not None and self._folder() is not None

    def _folder(self) -> Path | None:
        return self._told[0] if self._told else _named()


def _named() -> Path | None:
    named = os.environ.get(TLS)
    return Path(named) if named else None


def _stamp(folder: Path) -> _Stamp:
    """Return what changes when a file is replaced."""
    found = []
    for name in FILES:
        try:
            seen = (folder / name).stat()
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((seen.st_mtime_ns, seen.st_ino, seen.st_size))
    return tuple(found)


_PROCESS = _Process()


def use(folder: Path | None) -> None:
    """Have this process be what ``folder`` says, None: nothing, instead of ``HOLDFAST_TLS``."""
    _PROCESS.use(folder)


def identity() -> Identity | None:
    """Return what this process is now; None: it speaks without TLS. Cheap: files are looked at.

    Where they have been replaced by what peers would refuse, what was there before is used on.

    Raises:
        InvalidRequestError: the folder never was as it has to be; names the file and why.
    """
    return _PROCESS.identity()


def scheme() -> str:
    """Return the scheme of addresses where this process serves REST; errors as ``identity``."""
    return "http" if identity() is None else "https"


def why(cause: ssl.SSLError) -> str:
    """Return what a connection that was not made says of the other side."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        if cause.verify_code == EXPIRED:
            return f"its certificate has expired, renew what is in its {TLS}"
        if cause.verify_code == NAME_MISMATCH:
            return f"its certificate lacks the name {NAME}, see its {TLS}"
        return f"its certificate is not of the CA in {TLS}, or that is not set"
    if cause.reason == "WRONG_VERSION_NUMBER":
        return f"it speaks without TLS, see its {TLS}"
    return f"it does not take the certificate in {TLS}, or that is not set"


def reason(said: str) -> str:
    """Return what gRPC's words, in small letters, say of TLS; empty: nothing.

    What is returned has no colon: of an error's parts the last is what people are told.
    """
    if "ipv4:" not in said and "ipv6:" not in said:
        return ""  # of a unix socket, where there is no TLS
    for words, why in _REASONS.items():
        if words in said:
            return why
    if "failed to connect" in said and ("socket closed" in said or "reset by peer" in said):
        if _PROCESS.has_identity():
            return f"it does not take the certificate in {TLS} (another CA, or expired?)"
        return f"it closes the connection, perhaps as it asks for TLS, see {TLS}"
    return ""
