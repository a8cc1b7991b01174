"""An executor's conversation with the scheduler: one thread, one call at a time.

The call brings the newest report and waits for other orders. News of ours break it off and begin
the next, so they are told at once; nothing is lost by that, as report and orders are levels.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import urllib.parse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from holdfast.core.executions import ExecutorReport, ExecutorRequest, Orders
from holdfast.core.records import from_record, to_record
from holdfast.core.retry import Waits
from holdfast.errors import CheckpointError, InvalidRequestError, UnavailableError
from holdfast.rpc import rest

CALL_S_MAX = 10.0
LEAVE_S_MAX = 2.0
ANSWER_BYTES_MAX = 64 << 20
RETRY_WAITS = Waits(first_s=0.1, wait_s_max=2.0)

log = logging.getLogger(__name__)


class Conversation:
    """Keeps the scheduler informed; ``start``, ``say``, ``leave``.

    Args:
        url: The scheduler, ``http://host:port``, or ``https``.
        node: Whose launchers these are.
        report: The first report; ``say`` changes it.
        on_orders: Runs on the thread with all orders that differ.
        on_error: Runs on the thread with each error; the call is made again.

    Raises:
        InvalidRequestError: ``url`` is no web address.
    """

    def __init__(
        self,
        url: str,
        node: str,
        report: ExecutorReport,
        on_orders: Callable[[Orders], None],
        on_error: Callable[[CheckpointError], None],
    ) -> None:
        parsed = urllib.parse.urlsplit(url)
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            raise InvalidRequestError(f"{url!r} is not the scheduler's http://host:port")
        self._scheme, self._host, self._port = parsed.scheme, parsed.hostname, parsed.port
        prefix = parsed.path.rstrip("/")
        self._path = f"{prefix}/api/v1/executors/{urllib.parse.quote(node)}"
        self._on_orders = on_orders
        self._on_error = on_error
        self._guard = threading.Lock()
        self._report = report
        self._orders = Orders()
        self._socket: socket.socket | None = None
        self._news = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="holdfast-executor", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def say(self, change: Callable[[ExecutorReport], ExecutorReport]) -> None:
        """Change the report; it is on its way when this returns."""
        with self._guard:
            changed = change(self._report)
            if changed == self._report:
                return
            self._report = replace(changed, sequence=self._report.sequence + 1)
            self._break_off()

    def leave(self) -> None:
        """Say that this executor ends, if anybody hears it."""
        self._stopping = True
        with self._guard:
            self._break_off()
        self._thread.join(LEAVE_S_MAX)
        with suppress(CheckpointError):
            self._ask("DELETE", f"{self._path}/{self._report.executor}", None, LEAVE_S_MAX)

    def _break_off(self) -> None:
        self._news.set()
        if self._socket is not None:
            with suppress(OSError):  # it has ended by itself
                self._socket.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        failures = 0
        while not self._stopping:
            try:
                orders = self._next()
                failures = 0
            except CheckpointError as error:
                failures += 1
                self._on_error(error)
                self._news.wait(RETRY_WAITS.wait_s(failures))
                continue
            if orders is not None and orders.version != self._orders.version:
                self._orders = orders
                self._on_orders(orders)

    def _next(self) -> Orders | None:
        """Ask once; None: there was news meanwhile."""
        with self._guard:
            self._news.clear()
            orders = self._orders
            asked = ExecutorRequest(
                report=self._report, version=orders.version, wait_s=orders.poll_s
            )
        try:
            answer = self._ask("POST", self._path, to_record(asked), orders.poll_s + CALL_S_MAX)
        except UnavailableError:
            if self._news.is_set():
                return None
            raise
        return from_record(Orders, answer, "orders")

    def _ask(self, method: str, path: str, body: object, timeout_s: float) -> object:
        connection = rest.connection(self._scheme, self._host, self._port, timeout_s)
        try:
            connection.connect()
            with self._guard:
                self._socket = connection.sock
                if self._news.is_set() and not self._stopping:
                    raise UnavailableError("there is news")
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found = json.loads(answer.read(ANSWER_BYTES_MAX))
        except (OSError, ValueError, http.client.HTTPException) as cause:
            where = f"{connection.host}:{connection.port}"
            raise UnavailableError(
                f"no answer from the scheduler at {where}: {rest.why(cause)}"
            ) from cause
        finally:
            with self._guard:
                self._socket = None
            connection.close()
        if answer.status >= 400:
            raise _refusal(found, answer.status)
        return found


def _refusal(body: object, status: int) -> CheckpointError:
    try:
        return rest.error_of(body)
    except (KeyError, TypeError):
        return UnavailableError(f"the scheduler answered {status}")
