"""The dashboard in a real browser: nothing of others is executed, nothing comes from elsewhere."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.crowd import JOB, Crowd, fill
from tests.servers.axe import axe_source

from holdfast.core.user_events import Event
from holdfast_services.kit.rest import RestServer
from holdfast_services.metadata.calls.health import StoreHealth
from holdfast_services.metadata.edges.object_tier import ObjectTier
from holdfast_services.metadata.edges.rest import make_app

EVIL = "<img src=x onerror=\"document.title='taken'\">"
STARTS_S_MAX = 60.0
HEARS = """
window.violations = [];
addEventListener("securitypolicyviolation", e => violations.push(e.violatedDirective + e.sourceFile));
"""
FOREIGN = """performance.getEntriesByType("resource").map(one => one.name)
    .filter(one => !one.startsWith(location.origin) && !one.startsWith("data:"))"""
STUMBLES = """axe.run({resultTypes: ["violations"]}).then(found => JSON.stringify(
    found.violations.map(one => [one.id, one.nodes.map(node => node.html)])))"""

_spec = importlib.util.spec_from_file_location("page_browser", Path(__file__).parent / "browser.py")
browser = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(browser)


class Served:
    """A metadata service on a port, in a thread of its own; ``tell`` makes an event."""

    def __init__(self, kit, folder):
        self.kit, self.folder = kit, folder
        self.url = ""
        self.ready = threading.Event()

    async def main(self):
        """Serve until ``over`` is set."""
        url = f"sqlite:///{self.folder / 'catalogue.db'}"
        await asyncio.to_thread(fill, url, Crowd(checkpoints=60, jobs=3, nodes=4, events=8))
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        async with self.kit.running(url) as service:
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

    def tell(self, message):
        """Have something happen on a node."""
        event = Event(kind="node_lost", severity="error", message=message, job=JOB)
        done = asyncio.run_coroutine_threadsafe(self.service.record(EVIL, [event]), self.loop)
        done.result(STARTS_S_MAX)


@contextmanager
def served(kit, folder):
    here = Served(kit, folder)
    thread = threading.Thread(target=lambda: asyncio.run(here.main()))
    thread.start()
    try:
        assert here.ready.wait(STARTS_S_MAX)
        yield here
    finally:
        here.loop.call_soon_threadsafe(here.over.set)
        thread.join(STARTS_S_MAX)


def expect_sound(page, axe):
    """Nothing of others ran, nothing came from elsewhere, nothing is hard to get at."""
    page.value(axe)
    assert [] == json.loads(page.value(STUMBLES))
    assert [] == page.value("violations")
    assert [] == page.value(FOREIGN)
    assert 0 == page.value("document.images.length")


@pytest.mark.timeout(700)  # a bare machine installs the browser first
def test_the_dashboard_in_a_browser(kit, tmp_path, chromium):
    """F111, P9, issue 14: live, by keyboard, on a phone in the dark; axe finds nothing."""
    axe = axe_source()
    with served(kit, tmp_path) as here, browser.Browser(chromium, str(tmp_path / "p")) as page:
        here.tell(EVIL)
        page.before(HEARS)
        page.look(width=1280, height=900, dark=False)
        page.open(here.url)
        page.wait("document.querySelector('.events')?.textContent.includes('onerror')")
        page.wait("document.getElementById('link').textContent === 'live'")
        expect_sound(page, axe)
        page.press("Tab")
        assert "skip" == page.value("document.activeElement.className")

        here.tell("news while somebody looks")
        page.wait("document.querySelector('.events').textContent.includes('somebody looks')")
        assert page.value("document.title") == "Jobs · Holdfast"

        page.open(f"{here.url}/jobs/{JOB}")
        page.wait("document.querySelectorAll('.plot canvas').length === 2")
        expect_sound(page, axe)
        page.photograph(tmp_path / "job.png")

        page.look(width=390, height=800, dark=True)
        page.open(f"{here.url}/jobs/{JOB}/checkpoints/61")
        page.wait("document.querySelectorAll('.map .own').length === 32")
        expect_sound(page, axe)
        assert page.value("document.documentElement.scrollWidth") <= 390
        page.photograph(tmp_path / "phone.png")

        page.value("document.querySelector('a[href*=\"/pin?\"]').click()")
        page.wait("document.querySelector('form.ask button')")
        expect_sound(page, axe)
        page.value("document.querySelector('form.ask button').click()")
        page.wait("document.querySelector('.refused')?.textContent.includes('object store')")
