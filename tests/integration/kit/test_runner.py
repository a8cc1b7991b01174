"""A service process from start to stop: signals, exit codes, operating errors in one line (P4)."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEADLINE_S = 60
SERVICE = """
import asyncio, sys
from holdfast.errors import ExhaustedError
from holdfast_services.kit import runner

async def main(stop):
    print("ready", flush=True)
    if "full" in sys.argv:
        raise ExhaustedError("no room", node="n1")
    if "bug" in sys.argv:
        raise ZeroDivisionError
    await stop.wait()
    if "stuck" in sys.argv:
        await asyncio.Event().wait()

sys.exit(runner.run("demo", main, shutdown_s_max=0.2))
"""


def outcome(word, number=None, **environ):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVICE, word],
        env={"PYTHONPATH": f"{ROOT / 'sdk'}:{ROOT / 'services'}", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if number is not None:
        assert "ready\n" == process.stdout.readline()
        process.send_signal(number)
    _, log = process.communicate(timeout=DEADLINE_S)
    return process.returncode, log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_service_cleanly(number):
    assert (0, "") == outcome("fine", number)


def test_an_operating_error_is_one_line():
    code, log = outcome("full")

    assert 1 == code
    assert ["no room (node n1)"] == [line.rpartition(": ")[2] for line in log.splitlines()]


def test_a_service_that_does_not_stop_is_given_up():
    """P4: every wait has a deadline, shutdown too."""
    code, log = outcome("stuck", signal.SIGTERM)

    assert 1 == code
    assert "not stopped within 0.2 s" in log


def test_a_bug_shows_its_traceback():
    code, log = outcome("bug")

    assert 1 == code
    assert "ZeroDivisionError" in log


def test_lines_for_machines_say_what_they_are_about():
    """F110."""
    code, log = outcome("full", HOLDFAST_LOG_FORMAT="json")
    [line] = map(json.loads, log.splitlines())

    assert 1 == code
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("at"))
    assert line == {
        "level": "ERROR",
        "service": "demo",
        "logger": "holdfast_services.kit.runner",
        "message": "no room (node n1)",
        "kind": "exhausted",
        "node": "n1",
    }


def test_a_bug_is_one_line_for_machines():
    code, log = outcome("bug", HOLDFAST_LOG_FORMAT="json")
    [line] = map(json.loads, log.splitlines())

    assert 1 == code
    assert line["traceback"].endswith("ZeroDivisionError")


def test_a_format_that_is_none_is_refused():
    code, log = outcome("fine", HOLDFAST_LOG_FORMAT="xml")

    assert 1 == code
    assert "HOLDFAST_LOG_FORMAT=xml is neither text nor json" in log


def test_a_log_level_that_is_none_is_refused():
    code, log = outcome("fine", HOLDFAST_LOG="chatty")

    assert 1 == code
    assert "HOLDFAST_LOG=CHATTY is no level" in log


@pytest.mark.parametrize("said", ["environment", "file"])
def test_a_service_whose_certificate_peers_would_refuse_does_not_start(tmp_path, said):
    folder, file = tmp_path / "tls", tmp_path / "holdfast.toml"
    file.write_text(f'tls = "{folder}"')
    named = {"HOLDFAST_TLS": str(folder)} if said == "environment" else {}
    code, log = outcome("fine", **(named or {"HOLDFAST_CONFIG": str(file)}))

    assert 1 == code
    assert f"HOLDFAST_TLS={folder}: ca.crt: No such file" in log
    assert 1 == len(log.splitlines())
