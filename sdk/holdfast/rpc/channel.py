"""Channels: how to reach a service, and calls that raise our errors and never wait for ever."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from holdfast.core.retry import Waits
from holdfast.errors import CheckpointError, InvalidRequestError, UnavailableError
from holdfast.rpc.protocol import HEADER, PROTOCOL
from holdfast.rpc.status import from_rpc_error

SOCKET_PATH_BYTES_MAX = 107
MESSAGE_BYTES_MAX = 64 << 20

_METADATA = ((HEADER, str(PROTOCOL)),)
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name: how long one attempt to connect may take. A refused one ends at once.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

KEEPALIVE_S = 10.0
"""A connection on which nothing has come for so long is asked whether its host is still there."""
KEEPALIVE_ANSWER_S = 10.0
"""Without an answer for so long the connection is given up, and the next call makes a new one."""
KEEPALIVE_S_MIN = KEEPALIVE_S / 2
"""A caller that asks more often is cut off by the server."""

T = TypeVar("T")


def server_options() -> list[tuple[str, int]]:
    """Return the options of a server, which lets callers ask whether it is still there."""
    return [
        *OPTIONS,
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(KEEPALIVE_S_MIN)),
    ]


def _channel_options() -> list[tuple[str, int]]:
    """Return the options of a channel.

    A host that is gone sends no reset. Without keepalive the kernel would send to it for a quarter
    of an hour, and each call of that time would end at its deadline only.
    """
    return [
        *OPTIONS,
        ("grpc.keepalive_time_ms", _ms(KEEPALIVE_S)),
        ("grpc.keepalive_timeout_ms", _ms(KEEPALIVE_ANSWER_S)),
        # Newer releases of gRPC wait this long, a minute unless told, and older ones that long.
        ("grpc.http2.ping_timeout_ms", _ms(KEEPALIVE_ANSWER_S)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def is_served(path: Path, timeout_s: float) -> bool:
    """Tell whether a process listens on the unix socket at ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def unix_target(path: Path) -> str:
    """Return the gRPC target of a unix socket.

    Raises:
        InvalidRequestError: the path is longer than the kernel takes; use a shorter folder.
    """
    length = len(str(path).encode())
    if length > SOCKET_PATH_BYTES_MAX:
        raise InvalidRequestError(
            f"socket path {path} has {length} bytes, the kernel takes {SOCKET_PATH_BYTES_MAX}; "
            f"choose a shorter folder"
        )
    return f"unix:{path}"


def sync_channel(target: str) -> grpc.Channel:
    """Return a channel for the SDK's rpc thread; the caller closes it."""
    return grpc.insecure_channel(target, options=_channel_options())


def async_channel(target: str) -> grpc.aio.Channel:
    """Return a channel for a service's loop; the caller closes it."""
    return grpc.aio.insecure_channel(target, options=_channel_options())


def call(method: Callable[..., T], request: object, *, timeout_s: float, **context: object) -> T:
    """Call a sync stub method with a deadline.

    Raises:
        CheckpointError: what the other side raised, or what its silence means.
    """
    try:
        return method(request, timeout=timeout_s, metadata=_METADATA)
    except grpc.RpcError as cause:
        raise from_rpc_error(cause, **context) from cause
    except ValueError as cause:  # what grpc raises for a channel of ours that is closed
        raise UnavailableError("channel is closed", **context) from cause


def begin(method: Any, request: object, *, timeout_s: float) -> Any:
    """Begin a call of a sync stub's method and return its future, which may be cancelled.

    Raises:
        UnavailableError: the channel is closed.
    """
    try:
        return method.future(request, timeout=timeout_s, metadata=_METADATA)
    except ValueError as cause:
        raise UnavailableError("channel is closed") from cause


async def call_async(
    method: Callable[..., Awaitable[T]], request: object, *, timeout_s: float, **context: object
) -> T:
    """Call an async stub method with a deadline; errors as in ``call``."""
    try:
        return await method(request, timeout=timeout_s, metadata=_METADATA)
    except grpc.RpcError as cause:
        raise from_rpc_error(cause, **context) from cause
    except grpc.aio.UsageError as cause:
        raise UnavailableError("channel is closed", **context) from cause


def retrying(attempt: Callable[[], T], waits: Waits, sleep: Callable[[float], Any]) -> T:
    """Return what ``attempt`` returns, trying again after errors that say they are retryable.

    Raises:
        CheckpointError: the last one, or the first that is not retryable.
    """
    for wait_s in waits:
        try:
            return attempt()
        except CheckpointError as error:
            if not error.retryable:
                raise
            sleep(wait_s)
    return attempt()
