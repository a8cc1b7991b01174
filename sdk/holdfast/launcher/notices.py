"""Notices that this node will be taken away: a file, an HTTP endpoint, those of two clouds.

A *source* is asked again and again on a thread of its own; the first notice is told once. What
follows is the launcher's affair. (Slurm's ``--signal`` is a SIGTERM.)

Sources: AWS, "Spot Instance interruption notices" and IMDSv2; Google Cloud, "Spot VMs".
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from holdfast.core.rounds import NOTICE_S_MAX
from holdfast.errors import InvalidRequestError

ANSWER_S_MAX = 2.0
ANSWER_BYTES_MAX = 4096
REASON_LENGTH_MAX = 200
FILE_INTERVAL_S = 0.5
HTTP_INTERVAL_S = 2.0
NONE_GIVEN = ("", "false", "none")
AWS = "http://169.254.169.254/latest"
GCP = "http://metadata.google.internal/computeMetadata/v1"


class Source(Protocol):
    """Something that may give notice."""

    @property
    def interval_s(self) -> float:
        """Seconds from one question to the next."""

    def notice(self) -> str | None:
        """Return what it says, None: nothing.

        Raises:
            OSError: it could not be asked.
        """


@dataclass(frozen=True, slots=True)
class FileNotice:
    """Notice is given when ``path`` exists; its first line is the reason."""

    path: Path
    interval_s: float = FILE_INTERVAL_S

    def notice(self) -> str | None:
        """See ``Source``."""
        try:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                return file.readline(REASON_LENGTH_MAX).strip() or f"{self.path} is there"
        except FileNotFoundError:
            return None


@dataclass(frozen=True, slots=True)
class HttpNotice:
    """Notice is given when ``url`` answers 200 with anything but nothing, ``FALSE`` and ``NONE``.

    404 is no notice. ``token_url``: where a token is to be had first, and the header for it.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    token_url: str = ""
    interval_s: float = HTTP_INTERVAL_S

    def notice(self) -> str | None:
        """See ``Source``."""
        headers = dict(self.headers)
        if self.token_url:
            asked = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            token = _answer(urllib.request.Request(self.token_url, headers=asked, method="PUT"))  # noqa: S310 - http only
            headers["X-aws-ec2-metadata-token"] = token or ""
        answer = _answer(urllib.request.Request(self.url, headers=headers))  # noqa: S310 - http only
        return None if answer is None or answer.lower() in NONE_GIVEN else answer


def _answer(request: urllib.request.Request) -> str | None:
    """Return the answer's text, None: there is no such thing."""
    try:
        with _OPENER.open(request, timeout=ANSWER_S_MAX) as answer:
            text: bytes = answer.read(ANSWER_BYTES_MAX)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise
    return text.decode("utf-8", "replace").strip()[:REASON_LENGTH_MAX]


# No proxy: a node's metadata is asked of the node.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def source(text: str) -> Source:
    """Return the source that ``text`` names: ``file:PATH``, ``http://…``, ``aws`` or ``gcp``.

    Raises:
        InvalidRequestError: it names none.
    """
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileNotice(Path(rest))
    if kind in ("http", "https") and rest.startswith("//") and len(rest) > 2:
        return HttpNotice(text)
    if text == "aws":
        return HttpNotice(f"{AWS}/meta-data/spot/instance-action", token_url=f"{AWS}/api/token")
    if text == "gcp":
        return HttpNotice(f"{GCP}/instance/preempted", {"Metadata-Flavor": "Google"})
    raise InvalidRequestError(f"{text}: pass file:PATH, http://HOST/PATH, aws or gcp")


def seconds_left(reason: str) -> float | None:
    """Return how long a node stays by what a notice says; None: it does not say.

    It says so as JSON with a ``time``, as that of AWS does.
    """
    try:
        at = datetime.fromisoformat(json.loads(reason)["time"])
        left_s = (at - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return left_s if 0 < left_s <= NOTICE_S_MAX else None


class NoticeWatch:
    """Asks all sources until one gives notice, on a thread; ``close`` ends it.

    Args:
        sources: What to ask.
        given: Called once, on that thread, with what the first notice says.
        failed: Called once for each source that cannot be asked, with the reason.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        given: Callable[[str], None],
        failed: Callable[[str], None],
    ) -> None:
        self._given = given
        self._failed = failed
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(one,), name="holdfast-notice", daemon=True)
            for one in sources
        ]
        self._first = threading.Lock()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End it; waits for an answer that is under way."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, asked: Source) -> None:
        told = False
        while not self._closed.is_set():
            try:
                reason = asked.notice()
            except OSError as error:
                reason = None
                if not told:
                    told = True
                    self._failed(f"{asked} cannot be asked: {error}")
            if reason is not None:
                if self._first.acquire(blocking=False):
                    self._given(reason)
                return
            self._closed.wait(asked.interval_s)
