"""Pages as HTML: what others wrote is text, addresses stay here, and nothing is from elsewhere."""

import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from holdfast.core.origin import Origin, Tree
from holdfast_services.metadata.domain.ancestry import Ancestor, Beginning
from holdfast_services.metadata.domain.holds import Listed
from holdfast_services.metadata.domain.rollback import Rollback
from holdfast_services.metadata.edges.dashboard import news, node_rows, overview, pages
from holdfast_services.metadata.edges.dashboard.job_page import Read, checkpoint_page, job_page

EVIL = "<img src=x onerror=\"document.title='taken'\">'\"javascript:&{{7*7}}"
FOLDER = Path(pages.__file__).parent


class Parsed(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.attributes, self.text = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text.append(data)


def expect_safe(html):
    """No element of others, no handler, no inline style or script, no address elsewhere."""
    page = Parsed(html)
    assert "img" not in page.elements
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "style"]
    assert "style" not in page.elements
    places = [value for name, value in page.attributes if name in ("href", "src", "action")]
    assert places
    assert not [one for one in places if not re.match(r"(/(?!/)|#main$|data:,$)", one)], places
    assert not re.search(r"<script(?![^>]*src=)", html)
    return page


def event(**said):
    row = {"id": 1, "at_s": 1.0, "kind": EVIL, "severity": EVIL, "message": EVIL, "job": EVIL}
    return {**row, "node": EVIL, "context": '{"step": "<b>"}', **said}


@pytest.fixture
def hostile(cluster):
    """A cluster in which every free text is markup."""
    cluster.join(EVIL, "b")
    cluster.machine(EVIL).domain = EVIL
    cluster.launch(b"first", EVIL, "b")
    cluster.commit(10, 1, EVIL, "b")
    cluster.abandon(EVIL, 12, 1, reason=EVIL)
    cluster.report(EVIL, "b")
    decision = replace(cluster.run.decision, reason=EVIL)
    cluster.run = replace(cluster.run, job=EVIL, decision=decision)
    return cluster


def line(checkpoint):
    beginning = Beginning(
        generation=1,
        origin=Origin(commit=EVIL, tree=Tree.DIRTY, command=EVIL, user=EVIL),
        holder=EVIL,
        at_s=1.0,
        parent=checkpoint,
    )
    back = Rollback(to=checkpoint, generation=1, at_s=1.0, holder=EVIL, reason=EVIL)
    return (Ancestor(beginning=beginning, rollback=back),)


def test_what_others_wrote_is_text_on_a_job_s_page(hostile, checkpoint):
    """P9: job, node, reason, holder, command, event: none of them becomes markup."""
    rows = [Listed(row=row, pin=EVIL, readers=(EVIL,)) for row in hostile.run.checkpoints]
    read = Read(rows=rows, newest=rows, line=line(checkpoint(1, 1)), events=[event()])

    view = job_page(hostile.run, hostile.world(), read, first=True, durable=False)
    page = expect_safe(pages.render("job.html", view, done=""))

    assert EVIL in page.text
    assert any(EVIL in value for _, value in page.attributes if value)


def test_what_others_wrote_is_text_on_a_checkpoint_s_page(hostile, checkpoint):
    row = replace(hostile.run.checkpoints[0], notes='{"<img src=x>": "</pre><script>"}')
    item = Listed(row=row, pin=EVIL, readers=(EVIL,))

    view = checkpoint_page(hostile.run, item, None, hostile.world(), line(checkpoint(1, 1)))

    expect_safe(pages.render("checkpoint.html", view, done=""))


def test_notes_are_shown_in_their_own_letters(hostile):
    r"""What a user has written, and no ``\u00f6`` in it; half a pair of UTF-16 is no text."""
    row = replace(hostile.run.checkpoints[0], notes='{"gr\\u00f6\\u00dfe": "\\ud800"}')

    view = checkpoint_page(hostile.run, Listed(row=row), None, hostile.world(), ())

    assert '{\n "größe": "\\ud800"\n}' == view.notes
    assert "größe" in pages.render("checkpoint.html", view, done="").encode().decode()


def test_a_message_that_turns_the_direction_of_text_turns_its_own_only():
    asked = news.news(news.Asked(), [event(message="\u202egood", node="\u202en")], 2.0)
    html = pages.render("events.html", asked)

    assert "<bdi>\u202egood</bdi>" in html
    assert "<bdi>\u202en</bdi>" in html


def test_what_others_wrote_is_text_on_the_lists(hostile):
    world = hostile.world()
    jobs = overview.overview(overview.Asked(name="img"), [EVIL], world, lambda _: None)
    nodes = node_rows.nodes_page(node_rows.Asked(name="IMG"), world)
    events = news.news(news.Asked(job=EVIL, node=EVIL, kind=EVIL), [event()] * 101, 2.0)

    assert EVIL in expect_safe(pages.render("overview.html", jobs, events=())).text
    assert EVIL in expect_safe(pages.render("nodes.html", nodes)).text
    assert EVIL in expect_safe(pages.render("events.html", events)).text
    assert events.older.startswith("/events?")


def test_an_error_page_shows_a_hostile_message_as_text():
    expect_safe(pages.render("error.html", None, title=EVIL, message=EVIL, kind="not_found"))


def test_assets_are_those_that_their_readme_names():
    """Vendored files are pinned: version, licence and digest stand beside them."""
    readme = (FOLDER / "assets" / "README.md").read_text()
    vendored = [name for name in pages.ASSETS if not name.startswith("dashboard.")]

    assert vendored
    for name in vendored:
        body = pages.asset(name).body
        assert hashlib.sha256(body).hexdigest() in readme, name
    for path in (FOLDER / "assets").iterdir():
        assert path.name in pages.ASSETS or path.name.startswith(("LICENSE.", "README"))


def test_our_own_script_stays_small():
    """Pages work without it; it hears of news, says when nobody answers and draws charts."""
    assert len((FOLDER / "assets" / "dashboard.js").read_text().splitlines()) < 100
