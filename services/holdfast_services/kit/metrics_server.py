"""``/metrics`` at an address of its own: for a service that answers nothing else over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from fastapi.responses import PlainTextResponse
from prometheus_client import Metric

from holdfast_services.kit.exposition import exposition
from holdfast_services.kit.rest import RestServer, make_app

Families = Callable[[], Iterable[Metric]]
"""What there is to tell now; called on the loop, so it reads what is known and waits for nobody."""


class MetricsServer:
    """Answers from ``begin`` to ``end``, whom every service answers (``visitors``).

    Args:
        listen: ``host:port``, bound at once.
        title: Of the service, for people.
        names: What browsers know it by besides this machine's own.

    Raises:
        UnavailableError: the port is taken.
    """

    def __init__(self, listen: str, title: str, names: Collection[str]) -> None:
        self._server = RestServer(listen)
        self._app = make_app(title, names)
        self.url = self._server.url

    async def begin(self, families: Families) -> None:
        """Return once it is served."""

        @self._app.get("/metrics", response_class=PlainTextResponse)
        async def figures() -> str:
            """Answer with the figures of this process, for Prometheus."""
            return exposition(families())

        await self._server.begin(self._app)

    async def end(self) -> None:
        """Answer what was asked, and nothing more."""
        self._server.close()
        await self._server.ended()
