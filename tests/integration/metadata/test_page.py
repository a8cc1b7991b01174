"""The dashboard in a real browser: nothing of others is executed, nothing comes from elsewhere."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import text
from tests.crowd import JOB, Crowd
from tests.integration.metadata.browser import Browser
from tests.integration.metadata.served import served
from tests.servers.axe import axe_source

from holdfast.core.user_events import Event
from holdfast_services.kit.db import make_engine, write_transaction
from holdfast_services.metadata.usecases import users

OTHER = "other/job-00000"
EVIL = "<img src=x onerror=\"document.title='taken'\">"
CROWD = Crowd(checkpoints=60, jobs=3, nodes=4, events=8)
HEARS = """
window.violations = [];
addEventListener("securitypolicyviolation", e => violations.push(e.violatedDirective));
"""
FOREIGN = """performance.getEntriesByType("resource").map(one => one.name)
    .filter(one => !one.startsWith(location.origin) && !one.startsWith("data:"))"""
STUMBLES = """axe.run({resultTypes: ["violations"]}).then(found => JSON.stringify(
    found.violations.map(one => [one.id, one.nodes.map(node => node.html)])))"""


def lost(message):
    """A node has an event that somebody else has worded."""
    return EVIL, Event(kind="node_lost", severity="error", message=message, job=JOB)


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
    url = f"sqlite:///{tmp_path / 'catalogue.db'}"
    with served(kit.running, url, CROWD) as here, Browser(chromium, str(tmp_path / "p")) as page:
        here.tell(*lost(EVIL))
        page.before(HEARS)
        page.look(width=1280, height=900, dark=False)
        page.open(here.url)
        page.wait("document.querySelector('.events')?.textContent.includes('onerror')")
        page.wait("document.getElementById('link').textContent === 'live'")
        expect_sound(page, axe)
        page.press("Tab")
        assert "skip" == page.value("document.activeElement.className")

        here.tell(*lost("news while somebody looks"))
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

        expect_says_what_is_gone(page, here, url)


def expect_says_what_is_gone(page, here, url):
    """F111, P5: a job that was removed while somebody looks, and a catalogue that is away."""
    page.open(f"{here.url}/jobs/{OTHER}")
    page.wait("document.getElementById('link').textContent === 'live'")
    here.change(lambda catalogue: users.remove_job(catalogue, OTHER))
    page.wait(f"document.querySelector('#live').textContent.includes('no job {OTHER}')")

    rename(url, "events", "away")
    page.open(f"{here.url}/nodes")
    page.wait("document.getElementById('link').textContent.startsWith('no connection')")
    rename(url, "away", "events")
    page.wait("document.getElementById('link').textContent === 'live'")

    rename(url, "events", "away")
    page.open(here.url)
    page.wait("document.querySelector('h1')?.textContent === 'The catalogue does not answer'")
    rename(url, "away", "events")
    page.wait("document.querySelector('h1')?.textContent === 'Jobs'")


def rename(url, table, name):
    """Take a table away from the service, or give it back."""
    engine = make_engine(url, connections_max=1)
    with write_transaction(engine) as connection:
        connection.execute(text(f"ALTER TABLE {table} RENAME TO {name}"))
    engine.dispose()
