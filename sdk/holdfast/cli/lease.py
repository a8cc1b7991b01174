"""A read lease: while it is held, retention and ``rm`` leave the checkpoint alone."""

from __future__ import annotations

import os
import socket
import threading
import time
from types import TracebackType
from typing import Self

from holdfast.cli.rest import Record, Rest
from holdfast.errors import CheckpointError, PreconditionError

TTL_S = 60


class ReadLease:
    """Holds a checkpoint of the catalogue; renewed by a thread, given back at the end.

    A lease that the service has forgotten, or could not be asked to renew for ``ttl_s``, is lost.
    """

    def __init__(self, rest: Rest, checkpoint: Record, *, ttl_s: float = TTL_S) -> None:
        self._rest = rest
        self._checkpoint = checkpoint
        self._ttl_s = ttl_s
        self._id = ""
        self._ended = threading.Event()
        self._lost = ""
        self._thread = threading.Thread(target=self._renew, name="holdfast-lease", daemon=True)

    def __enter__(self) -> Self:
        body = {"holder": f"{socket.gethostname()}-{os.getpid()}", "ttl_s": self._ttl_s}
        answer = self._rest.of_checkpoint("POST", self._checkpoint, "/reads", body=body)
        self._id = str(answer["id"])
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        try:
            self._rest.read("DELETE", self._id)
        except CheckpointError:
            return  # it ends by itself

    def check(self) -> None:
        """Do nothing while the lease is held.

        Raises:
            PreconditionError: it is lost: what is being read may be deleted any moment.
        """
        if self._lost:
            step = self._checkpoint["step"]
            raise PreconditionError(
                f"reading was stopped, because retention may delete step {step} now: {self._lost}"
            )

    def _renew(self) -> None:
        until_s = time.monotonic() + self._ttl_s
        while not self._ended.wait(self._ttl_s / 3):
            asked_s = time.monotonic()
            try:
                self._rest.read("PUT", self._id, {"ttl_s": self._ttl_s})
                until_s = asked_s + self._ttl_s
            except CheckpointError as error:
                if not error.retryable or time.monotonic() >= until_s:
                    self._lost = str(error)
                    return
