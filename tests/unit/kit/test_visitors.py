"""Which requests a browser was made to send, and which are ours (defect R3)."""

import socket

import pytest

from holdfast_services.kit.visitors import refusal

MACHINE = socket.gethostname()


@pytest.mark.parametrize(
    ("host", "origin", "reached"),
    [
        ("127.0.0.1:7380", None, "127.0.0.1"),
        ("localhost:7380", "http://localhost:7380", "127.0.0.1"),
        ("LOCALHOST:7380", "http://localhost:7380", "127.0.0.1"),
        ("[::1]:7380", "http://[::1]:7380", "::1"),
        (f"{MACHINE}:7380", None, "127.0.1.1"),
        ("", None, "127.0.0.1"),
        ("10.0.0.2:7380", "http://10.0.0.2:7380", "10.0.0.2"),
        ("metadata:7380", None, "10.0.0.2"),
        ("fast.example", "https://fast.example", "10.0.0.2"),
        ("127.0.0.1:7380", "https://fast.example", "127.0.0.1"),
    ],
)
def test_our_own_page_and_programs_are_answered(host, origin, reached):
    assert "" == refusal(host=host, origin=origin, reached=reached, names={"fast.example"})


@pytest.mark.parametrize(
    ("host", "origin", "reached"),
    [
        # A name of theirs that leads here; the page and we are then one site to the browser.
        ("evil.example:7380", None, "127.0.0.1"),
        ("evil.example:7380", None, "::ffff:127.0.0.1"),
        ("evil.example:7380", "http://evil.example:7380", "127.0.0.1"),
        ("evil.example:7380", "http://evil.example:7380", "10.0.0.2"),
        # A form or a fetch of theirs that names us.
        ("127.0.0.1:7380", "http://evil.example", "127.0.0.1"),
        ("10.0.0.2:7380", "http://10.9.9.9", "10.0.0.2"),
        ("localhost:7380", "http://localhost:3000", "127.0.0.1"),
        ("127.0.0.1:7380", "null", "127.0.0.1"),
        ("127.0.0.1:7380", "http://[", "127.0.0.1"),
        ("", "null", "10.0.0.2"),
    ],
)
def test_a_page_of_another_site_is_refused(host, origin, reached):
    """R3: by its own name, or by a name that it makes point here."""
    reason = refusal(host=host, origin=origin, reached=reached, names={"fast.example"})

    assert "HOLDFAST_REST_NAMES" in reason
