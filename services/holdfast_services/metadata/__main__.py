"""`python -m holdfast_services.metadata`: gRPC and REST in one loop, until SIGTERM."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from holdfast.errors import UnavailableError
from holdfast.v1.metadata_pb2_grpc import add_MetadataServicer_to_server
from holdfast_services.kit.db import make_engine
from holdfast_services.kit.runner import run
from holdfast_services.kit.server import make_server
from holdfast_services.metadata.domain.model import Limits
from holdfast_services.metadata.migrations import upgrade
from holdfast_services.metadata.rest import make_app
from holdfast_services.metadata.rpc import MetadataRpc
from holdfast_services.metadata.service import THREADS, Service
from holdfast_services.metadata.settings import Settings, host_port

GRACE_S = 2.0

log = logging.getLogger("holdfast_services.metadata")


class _Rest(uvicorn.Server):
    """Uvicorn without signal handlers: the runner owns signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until ``stop``; then end streams and calls within ``GRACE_S`` each."""
    engine = make_engine(settings.database_url, connections_max=THREADS)
    await asyncio.to_thread(upgrade, engine)
    limits = Limits(node_lease_s=settings.node_lease_s, decide_wait_s=settings.decide_wait_s)
    service = Service(engine, limits)
    rest_socket = _bind(settings.rest_listen)
    rest_host, rest_port = rest_socket.getsockname()[:2]
    rest_url = f"http://{_reachable(rest_host)}:{rest_port}"
    server = make_server()
    add_MetadataServicer_to_server(MetadataRpc(service, rest_url), server)
    host, port = host_port(settings.listen)
    bound = server.add_insecure_port(f"{host}:{port}")
    config = uvicorn.Config(
        make_app(service, stop),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(GRACE_S),
    )
    rest = _Rest(config)
    service.start()
    await server.start()
    serving = asyncio.create_task(rest.serve(sockets=[rest_socket]))
    try:
        while not rest.started and not serving.done():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        address = f"{_reachable(host)}:{bound}"
        _say_ready(settings.ready_file, {"address": address, "rest_url": rest_url})
        log.info("serving gRPC on %s, REST and status page on %s", address, rest_url)
        await stop.wait()
    finally:
        rest.should_exit = True
        await server.stop(GRACE_S)
        await serving
        await service.stop()
        engine.dispose()


def _bind(listen: str) -> socket.socket:
    """Return a bound socket, so that the port is known before anybody is told of it."""
    host, port = host_port(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host.strip("[]"), port))
    except OSError as cause:
        bound.close()
        raise UnavailableError(f"cannot listen on {listen}: {cause.strerror}") from cause
    return bound


def _reachable(host: str) -> str:
    """Return a name under which others reach this host: a wildcard is nobody's address."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "[::]") else host  # noqa: S104


def _say_ready(path: Path | None, addresses: dict[str, str]) -> None:
    """Write the addresses by rename: who sees the file sees all of it."""
    if path is None:
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps(addresses), encoding="utf-8")
    draft.replace(path)


def main() -> int:
    """Run the service; returns the exit code."""
    return run("metadata", lambda stop: serve(Settings.from_env(os.environ), stop))


if __name__ == "__main__":
    sys.exit(main())
