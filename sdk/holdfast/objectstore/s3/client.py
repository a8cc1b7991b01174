"""Requests to one bucket: signed anew each time, retried in one place, within deadlines.

The library's own retries are off: a conditional put must not be repeated blind, and the others
are repeated here, so that there is one policy. Units: bytes, seconds.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import botocore.session
from botocore.config import Config

from holdfast.core.retry import Waits
from holdfast.errors import CheckpointError, InvalidRequestError, OutcomeUnknownError
from holdfast.objectstore.s3.failures import EXPIRED, Failure, code, is_passing, is_refusal, mapped
from holdfast.objectstore.s3.location import Location

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CONNECTIONS_MAX = 64
REGION = "us-east-1"

T = TypeVar("T")


REQUEST_WAITS = Waits(first_s=0.2, wait_s_max=5.0, tries_max=6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for what, and how often to try.

    ``answer_s_max`` is the longest silence, ``body_s_max`` the longest a body may take.
    """

    connect_s_max: float = 10.0
    answer_s_max: float = 30.0
    body_s_max: float = 600.0
    waits: Waits = REQUEST_WAITS


class Client:
    """The way to one bucket; safe to use from several threads."""

    def __init__(self, location: Location, patience: Patience) -> None:
        self.location = location
        self.patience = patience
        self._lock = threading.Lock()
        self._client: S3Client | None = None

    @property
    def s3(self) -> S3Client:
        """The library's client; made when first needed."""
        with self._lock:
            if self._client is None:
                self._client = _connect(self.location, self.patience)
            return self._client

    def repeat(self, key: str, request: Callable[[S3Client], T]) -> T:
        """Return what ``request`` does; it is repeated while that may help, and must be safe to.

        Raises:
            CheckpointError: what ``failures`` makes of the last failure.
        """
        waits = iter(self.patience.waits)
        read_anew = False
        while True:
            client = self.s3
            try:
                return request(client)
            except CheckpointError:  # decided already; one of them is an OSError too
                raise
            except Failure as error:
                if code(error) in EXPIRED and not read_anew:
                    # The chain may have newer ones by now: a rotated file, another role session.
                    read_anew = True
                    self._forget(client)
                    continue
                wait_s = next(waits, None) if is_passing(error) else None
                if wait_s is None:
                    at = self.location
                    raise mapped(
                        error, bucket=at.bucket, key=key, endpoint=at.endpoint or ""
                    ) from error
                # Many ranks and workers fail at once: not all of them come back at once.
                time.sleep(wait_s * (0.5 + random.random() / 2))  # noqa: S311 (jitter, no secret)

    def once(self, key: str, request: Callable[[S3Client], T]) -> T:
        """Return what ``request`` does; it is repeated only where it has certainly done nothing.

        Raises:
            OutcomeUnknownError: it may have been done.
            CheckpointError: it was refused.
        """

        def attempt(client: S3Client) -> T:
            try:
                return request(client)
            except Failure as error:
                if is_refusal(error):
                    raise
                raise OutcomeUnknownError(
                    f"no answer that can be relied on: {code(error) or type(error).__name__}",
                    bucket=self.location.bucket,
                    key=key,
                ) from error

        return self.repeat(key, attempt)

    def close(self) -> None:
        """Give the connections back; the next request opens new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _forget(self, client: S3Client) -> None:
        """Let the next request read the credentials anew; requests under way keep theirs."""
        with self._lock:
            if self._client is client:
                self._client = None


def _connect(location: Location, patience: Patience) -> S3Client:
    if location.ca and not Path(location.ca).is_file():
        raise InvalidRequestError(f"store s3: ca={location.ca} is no file")
    # A session of our own: the default one is shared by the process and keeps old credentials.
    session = botocore.session.Session()
    config = Config(
        signature_version="s3v4",
        connect_timeout=patience.connect_s_max,
        read_timeout=patience.answer_s_max,
        retries={"total_max_attempts": 1},
        max_pool_connections=CONNECTIONS_MAX,
        # Bytes are sent once, straight from memory: no pass over them to sign them.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3=_style(location),
        user_agent_extra="holdfast",
    )
    client = session.create_client(
        "s3",
        endpoint_url=location.endpoint,
        region_name=location.region or session.get_config_variable("region") or REGION,
        verify=location.ca,
        config=config,
    )
    return cast("S3Client", client)


def _style(location: Location) -> Any:
    """Name the bucket by path at any other than Amazon, unless said otherwise."""
    elsewhere = location.endpoint or any(
        os.environ.get(name) for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    )
    addressing = location.addressing or ("path" if elsewhere else "auto")
    return {"addressing_style": addressing, "payload_signing_enabled": False}
