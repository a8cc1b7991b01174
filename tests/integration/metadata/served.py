"""The application on a port, over a catalogue that is full, for a browser."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

from tests.crowd import fill

from holdfast_services.kit.rest import RestServer
from holdfast_services.metadata.calls.health import StoreHealth
from holdfast_services.metadata.edges.object_tier import ObjectTier
from holdfast_services.metadata.edges.rest import make_app

STARTS_S_MAX = 120.0


class Served:
    """A metadata service without a clock, in a thread of its own: nobody is lost by itself."""

    def __init__(self, running, database_url, crowd):
        self._running, self._database_url, self._crowd = running, database_url, crowd
        self.url = ""
        self.ready = threading.Event()

    async def main(self):
        """Serve until ``over`` is set."""
        if self._crowd:
            await asyncio.to_thread(fill, self._database_url, self._crowd)
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        async with self._running(self._database_url) as service:
            self.service = service
            objects = ObjectTier(health=StoreHealth(None))
            server = RestServer("127.0.0.1:0")
            app = make_app(service, service.reports, service.launches, objects, self.over)
            await server.begin(app)
            self.url = server.url
            self.ready.set()
            await self.over.wait()
            server.close()
            await server.ended()

    def tell(self, node, event):
        """Have an event of a node, whatever its name, in the catalogue."""
        self.change(lambda c: c.add_events([event], node, c.now_s()))

    def change(self, use_case):
        """Have the service change its catalogue."""
        done = self.service.change(use_case)
        asyncio.run_coroutine_threadsafe(done, self.loop).result(STARTS_S_MAX)


@contextmanager
def served(running, database_url, crowd):
    """Fill the database, unless ``crowd`` is None, and serve what ``running`` runs over it."""
    here = Served(running, database_url, crowd)
    thread = threading.Thread(target=lambda: asyncio.run(here.main()))
    thread.start()
    try:
        assert here.ready.wait(STARTS_S_MAX)
        yield here
    finally:
        here.loop.call_soon_threadsafe(here.over.set)
        thread.join(STARTS_S_MAX)
