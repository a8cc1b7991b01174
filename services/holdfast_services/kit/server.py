"""A gRPC server whose edge is one interceptor: protocol check, errors to statuses, one log line.

Handlers raise ``CheckpointError``s and know no status codes. Anything else that escapes a
handler is a bug: it is logged with its traceback and answered as INTERNAL.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from holdfast.errors import CheckpointError, InternalError
from holdfast.rpc import protocol
from holdfast.rpc.channel import OPTIONS
from holdfast.rpc.status import TRAILER, to_status

log = logging.getLogger(__name__)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _Edge(grpc.aio.ServerInterceptor):
    """Turns what handlers raise into statuses; logs each error once."""

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
                log.info("%s refused: %s", method, error)
                await _abort(context, error)
            except Exception:
                log.exception("%s failed", method)
                await _abort(context, InternalError("unexpected failure; see the service's log"))

        return grpc.unary_unary_rpc_method_handler(
            edge,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: CheckpointError) -> None:
    code, detail = to_status(error)
    trailer = ((TRAILER, detail.SerializeToString()),)
    await context.abort(code, detail.message, trailer)


def make_server() -> grpc.aio.Server:
    """Return a server with the edge in place; add servicers and ports, then ``start`` it."""
    return grpc.aio.server(interceptors=[_Edge()], options=[*OPTIONS, ("grpc.so_reuseport", 0)])
