"""A gRPC server whose edge is one interceptor: protocol check, errors to statuses, one log line.

Handlers raise ``CheckpointError``s and know no status codes. Anything else that escapes a
handler is a bug: it is logged with its traceback and answered as INTERNAL.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from holdfast.errors import CheckpointError, InternalError, UnavailableError
from holdfast.rpc import protocol, tls
from holdfast.rpc.channel import identity_for, server_options
from holdfast.rpc.status import TRAILER, to_status

log = logging.getLogger(__name__)

REPEAT_S = 60.0
REFUSALS_MAX = 256

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _Edge(grpc.aio.ServerInterceptor):
    """Turns what handlers raise into statuses; logs each error, the same one once a minute.

    Whoever is refused asks again, every rank of a job with the same words: a store that is out
    for an hour must not fill the log.
    """

    def __init__(self) -> None:
        self._logged_s: dict[str, float] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Wrap the unary handler that serves this call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        inner = handler.unary_unary
        method = handler_call_details.method

        async def edge(request: Any, context: Any) -> Any:
            try:
                spoken = dict(context.invocation_metadata() or ()).get(protocol.HEADER)
                protocol.check(spoken if isinstance(spoken, str) else None)
                return await inner(request, context)
            except CheckpointError as error:
                self._log(f"{method} refused: {error}")
                await _abort(context, error)
            except Exception:
                log.exception("%s failed", method)
                await _abort(context, InternalError("unexpected failure; see the service's log"))

        return grpc.unary_unary_rpc_method_handler(
            edge,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _log(self, line: str) -> None:
        now_s = time.monotonic()
        if now_s < self._logged_s.get(line, -REPEAT_S) + REPEAT_S:
            return
        if len(self._logged_s) >= REFUSALS_MAX:
            self._logged_s.clear()
        self._logged_s[line] = now_s
        log.info("%s", line)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: CheckpointError) -> None:
    code, detail = to_status(error)
    trailer = ((TRAILER, detail.SerializeToString()),)
    await context.abort(code, detail.message, trailer)


def make_server() -> grpc.aio.Server:
    """Return a server with the edge in place; add servicers and ports, then ``start`` it."""
    return grpc.aio.server(interceptors=[_Edge()], options=server_options())


def bind(server: grpc.aio.Server, address: str) -> int:
    """Have a server listen at ``host:port``, or on a unix socket; return the port.

    With ``HOLDFAST_TLS`` callers over the network must show a certificate of its CA.

    Raises:
        UnavailableError: the address is taken, or not of this machine.
        InvalidRequestError: the folder ``HOLDFAST_TLS`` is not as it has to be.
    """
    identity = identity_for(address)
    try:
        if identity is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _credentials(identity))
    except RuntimeError as cause:
        raise UnavailableError(f"cannot listen on {address}: {cause}") from cause


def _credentials(identity: tls.Identity) -> grpc.ServerCredentials:
    """Return credentials that follow the files: gRPC asks at each handshake what they are now."""

    def now() -> grpc.ServerCertificateConfiguration:
        return _configuration(tls.identity() or identity)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(identity), now, require_client_authentication=True
    )


def _configuration(identity: tls.Identity) -> grpc.ServerCertificateConfiguration:
    pair = (identity.key, identity.certificate)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=identity.ca)
