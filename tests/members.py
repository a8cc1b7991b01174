"""Members of clusters, as ``holdfast certs`` makes them: folders for ``HOLDFAST_TLS``."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from holdfast.cli.certificates import issue_member, make_authority
from holdfast.rpc.tls import NAME

LONG_AGO = datetime.now(UTC) - timedelta(days=500)


class Members:
    """A cluster: its CA, and what that issues."""

    def __init__(self) -> None:
        self.authority = make_authority(datetime.now(UTC))

    def issue(self, folder: Path, *, now: datetime | None = None, name: str = NAME) -> Path:
        """Write what a member has; files that are there are replaced, one by one."""
        folder.mkdir(exist_ok=True)
        certificate, key = issue_member(self.authority, now or datetime.now(UTC), name)
        self.replace(folder, "ca.crt", self.authority.pem()[0])
        self.replace(folder, "tls.crt", certificate)
        self.replace(folder, "tls.key", key)
        return folder

    @staticmethod
    def replace(folder: Path, name: str, content: bytes) -> None:
        whole = folder / f".{name}"
        descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        whole.replace(folder / name)
