"""Channels: how to reach a service, and calls that raise our errors and never wait for ever."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from holdfast.core.retry import Waits
from holdfast.errors import CheckpointError, InvalidRequestError, UnavailableError
from holdfast.rpc import tls
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

UNIX = "unix:"

T = TypeVar("T")
C = TypeVar("C")


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
    return f"{UNIX}{path}"


def identity_for(target: str) -> tls.Identity | None:
    """Return what this process shows at ``target``; None: no TLS, as on a unix socket.

    There the kernel says which user is at the other end, and lets nobody listen.

    Raises:
        InvalidRequestError: the folder ``HOLDFAST_TLS`` is not as it has to be.
    """
    return None if target.startswith(UNIX) else tls.identity()


def sync_channel(target: str) -> grpc.Channel:
    """Return a channel for the SDK's rpc thread; the caller closes it.

    Raises:
        InvalidRequestError: as ``identity_for``.
    """
    identity = identity_for(target)
    if identity is None:
        return grpc.insecure_channel(target, options=_channel_options())
    return grpc.secure_channel(target, _credentials(identity), options=_secure_options())


def async_channel(target: str) -> grpc.aio.Channel:
    """Return a channel for a service's loop; the caller closes it; errors as ``sync_channel``."""
    identity = identity_for(target)
    if identity is None:
        return grpc.aio.insecure_channel(target, options=_channel_options())
    return grpc.aio.secure_channel(target, _credentials(identity), options=_secure_options())


@lru_cache(maxsize=2)  # channels with one object share connections, and there is one identity
def _credentials(identity: tls.Identity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)


def _secure_options() -> list[tuple[str, Any]]:
    return [*_channel_options(), ("grpc.ssl_target_name_override", tls.NAME)]


class LastingChannel(Generic[C]):
    """A channel that is made anew once the files of ``HOLDFAST_TLS`` have been replaced.

    One channel shows for all its life what it was made with, and a service outlives certificates.

    Args:
        target: Where to.
        make: ``sync_channel`` or ``async_channel``.
    """

    def __init__(self, target: str, make: Callable[[str], C]) -> None:
        self._target = target
        self._make = make
        self._identity = identity_for(target)
        self._channel = make(target)

    @property
    def current(self) -> C:
        """The channel for calls that begin now; it is not kept by the caller."""
        identity = identity_for(self._target)
        if identity is not self._identity:
            # Not closed: that would end the calls on it, of which each keeps it as long as it runs.
            self._channel = self._make(self._target)
            self._identity = identity
        return self._channel


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
