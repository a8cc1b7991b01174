"""What ``doctor`` checks of the folder ``HOLDFAST_TLS``.

``look_at_tls`` looks, ``tls_checks`` decides and is pure.
"""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.cli.checks import Check, check
from holdfast.errors import InvalidRequestError
from holdfast.rpc.tls import KEY, TLS, read_identity

DAYS_LEFT_MIN = 14
DAY_S = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFacts:
    """What the folder shows. ``problem`` empty: peers take its certificate for ``days_left``."""

    folder: str
    problem: str = ""
    days_left: int = 0
    readable_by_others: bool = False


def look_at_tls(environ: Mapping[str, str]) -> TlsFacts | None:
    """Return what the folder that ``environ`` names shows; None: it names none."""
    folder = environ.get(TLS)
    if not folder:
        return None
    try:
        mode = (Path(folder) / KEY).stat().st_mode
        days_left = int((read_identity(Path(folder)).expires_s - time.time()) // DAY_S)
    except (InvalidRequestError, OSError) as error:
        said = error.message if isinstance(error, InvalidRequestError) else str(error)
        return TlsFacts(folder=folder, problem=said)
    return TlsFacts(
        folder=folder, days_left=days_left, readable_by_others=bool(mode & stat.S_IROTH)
    )


def tls_checks(facts: TlsFacts) -> Iterator[Check]:
    """Yield one check per fact that matters."""
    yield check(
        "certificate",
        not facts.problem,
        facts.problem or f"{facts.folder}, {facts.days_left} days left",
        "peers refuse it: see docs/howto/tls.md",
        bad="fail",
    )
    if facts.problem:
        return
    if facts.days_left < DAYS_LEFT_MIN:
        advice = "renew it (`holdfast certs DIR --renew`, or cert-manager); no restart is needed"
        yield check("certificate ends", False, f"in {facts.days_left} days", advice)
    yield check(
        "key",
        not facts.readable_by_others,
        f"{facts.folder}/{KEY}",
        "every user of this machine can read it, and then be a member: chmod 600",
    )
