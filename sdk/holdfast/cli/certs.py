"""``certs``: a CA and a member's certificate in a folder, for development and small clusters.

::

    DIR/ca.key                          makes members: stays off the nodes
    DIR/ca.crt
    DIR/member/{ca.crt,tls.crt,tls.key} what HOLDFAST_TLS names, and nodes get
    DIR/NAME.p12                        for a person's browser
"""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli import argument_types as types
from holdfast.cli.output import Report
from holdfast.errors import AlreadyExistsError, InvalidRequestError, NotFoundError
from holdfast.rpc.tls import CA, CERTIFICATE, KEY, TLS

if TYPE_CHECKING:
    from holdfast.cli.certificates import Authority

AUTHORITY_KEY = "ca.key"
MEMBER = "member"
PASSPHRASE_BYTES = 12

Command = Callable[[argparse.Namespace, Mapping[str, str]], Report]


def add_certs(add: Callable[[str, str, Command], argparse.ArgumentParser]) -> None:
    """Add the command to those that ``add`` adds to."""
    command = add(
        "certs ~/holdfast-certs",
        "This command makes a CA and the certificate that the services of a cluster show to one "
        "another. It needs no service.",
        certs,
    )
    command.add_argument(
        "folder", type=Path, metavar="DIR", help="The files are in this folder, which is private."
    )
    what = command.add_mutually_exclusive_group()
    what.add_argument(
        "--renew",
        action="store_true",
        help="The command replaces the members' certificate by a new one of the same CA.",
    )
    what.add_argument(
        "--person",
        type=types.person,
        metavar="NAME",
        help="The command makes NAME.p12, by which this person's browser gets in.",
    )


def certs(args: argparse.Namespace, environ: Mapping[str, str]) -> Report:
    """Make what is asked for.

    Raises:
        AlreadyExistsError: it is there.
        NotFoundError: there is no CA to make it from.
        InvalidRequestError: cryptography is not installed, or the CA cannot be read.
    """
    del environ
    try:
        from holdfast.cli import certificates  # noqa: PLC0415 - an extra
    except ImportError as cause:
        raise InvalidRequestError(
            "cryptography is not installed: pip install 'holdfast[tls]'"
        ) from cause
    folder, now = Path(args.folder), datetime.now(UTC)
    member = folder / MEMBER
    if args.person:
        passphrase = secrets.token_urlsafe(PASSPHRASE_BYTES)
        issued = certificates.issue_person(_authority(folder), now, args.person, passphrase)
        made = folder / f"{args.person}.p12"
        _write(made, issued)
        text = [f"{made}", f"passphrase: {passphrase}", "Import it into the browser, then delete."]
        return Report(data={"file": str(made), "passphrase": passphrase}, text=text)
    if args.renew:
        authority = _authority(folder)
    else:
        _refuse_what_is_there(member)
        authority = certificates.make_authority(now)
        _write_authority(folder, authority)
    _write_member(member, authority, now)
    text = [f"export {TLS}={member.absolute()}"]
    if not args.renew:
        text.append(f"{folder / AUTHORITY_KEY} makes members: keep it off the nodes.")
    return Report(data={TLS: str(member.absolute())}, text=text)


def _refuse_what_is_there(member: Path) -> None:
    if member.exists():
        raise AlreadyExistsError(f"{member} is there, and is not overwritten: see --renew")


def _authority(folder: Path) -> Authority:
    from holdfast.cli.certificates import read_authority  # noqa: PLC0415 - an extra

    try:
        found = [(folder / name).read_bytes() for name in (CA, AUTHORITY_KEY)]
    except OSError as cause:
        raise NotFoundError(
            f"{cause.filename}: {cause.strerror}: name the folder that `holdfast certs` has made"
        ) from cause
    return read_authority(*found)


def _write_authority(folder: Path, authority: Authority) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    certificate, key = authority.pem()
    _write(folder / AUTHORITY_KEY, key)
    _write(folder / CA, certificate)


def _write_member(folder: Path, authority: Authority, now: datetime) -> None:
    from holdfast.cli.certificates import issue_member  # noqa: PLC0415 - an extra

    folder.mkdir(mode=0o700, exist_ok=True)
    certificate, key = issue_member(authority, now)
    for name, content in ((CA, authority.pem()[0]), (KEY, key), (CERTIFICATE, certificate)):
        whole = folder / f".{name}.{os.getpid()}"
        _write(whole, content)
        whole.replace(folder / name)


def _write(path: Path, content: bytes) -> None:
    """Write a file that only this user can read.

    Raises:
        AlreadyExistsError: it is there.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as cause:
        raise AlreadyExistsError(f"{path} is there, and is not overwritten") from cause
    except OSError as cause:
        raise InvalidRequestError(f"{path}: {cause.strerror}") from cause
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
