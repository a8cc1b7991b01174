"""``holdfast top``: what is shown of a cluster, in the room there is."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys

from holdfast.cli.output import Table
from holdfast.cli.top import Cluster, screen, summary

GIB = 1 << 30
ON_A_TERMINAL = """
import signal, sys
from holdfast.cli import main, top
from tests.unit.cli.test_top import cluster, job

asked = []

class Service:
    def find(environ):
        return Service

answers = [cluster(jobs=[job("first")]), cluster(jobs=[job("second", step=77)])]

def ask(rest):
    from holdfast.errors import UnavailableError
    asked.append(rest)
    if len(asked) <= len(answers):
        return answers[len(asked) - 1]
    raise UnavailableError("it sleeps")

top.Rest, top.Cluster.ask = Service, ask
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell has begun with & ignores it
sys.exit(main.main(["top", "--every", "0s"]))
"""


def job(name, **fields):
    known = {
        "job": name, "running": True, "world_size": 2, "step": 12, "newest_step": 11,
        "newest_replicated_step": 10, "newest_durable_step": None, "costs": {}, "shortage": "",
        "failures": 0,
    }  # fmt: skip
    return {**known, **fields}


def node(name, used_gib=1, **fields):
    known = {
        "node": name, "live": True, "ranks": 1, "shards": 2, "used_bytes": used_gib * GIB,
        "budget_bytes": 4 * GIB,
    }  # fmt: skip
    return {**known, **fields}


def event(**fields):
    known = {"at": 0, "severity": "info", "job": "gpt", "node": "", "message": "it\nhappened"}
    return {**known, **fields}


def cluster(jobs=(), nodes=(), events=(), store=None):
    found = {"url": "s3://b", "ok": True} if store is None else store
    return Cluster("http://here", list(jobs), list(nodes), found, list(events))


def tables(blocks):
    return [block for block in blocks if isinstance(block, Table)]


def test_one_line_has_the_whole_cluster():
    found = cluster([job("a"), job("b", running=False)], [node("n", 1), node("m", 2, live=False)])

    line = summary(found)

    assert "http://here | 2 jobs, 1 training | 1 of 2 nodes live" in line
    assert "memory 1 GiB of 4 GiB | store ok" in line  # what a lost node had is no memory
    assert "STORE DOWN" in summary(cluster(store={"url": "s3://b", "ok": False}))
    assert "no object store" in summary(cluster(store={"url": None, "ok": False}))


def test_a_job_says_where_it_is_and_what_is_wrong_with_it():
    jobs = [
        job("b", costs={"stall_s": 0.0042}, failures=2),
        job("a", running=False, step=0, newest_step=None, newest_replicated_step=None),
        job("c", shortage="only 1 node is there", failures=1),
    ]

    (table,) = tables(screen(cluster(jobs), 40))

    assert table.rows == (
        ("b", "trains", "2", "12", "11", "10", "-", "0.0042 s", "2 failed before"),
        ("c", "trains", "2", "12", "11", "10", "-", "-", "only 1 node is there"),
        ("a", "stopped", "2", "-", "-", "-", "-", "-", ""),
    )


def test_lost_nodes_come_first_and_then_the_fullest():
    nodes = [node("empty", 0), node("full", 4), node("gone", 0, live=False)]

    table = tables(screen(cluster([], nodes), 40))[0]

    assert [row[:2] for row in table.rows] == [
        ("gone", "LOST"),
        ("full", "live"),
        ("empty", "live"),
    ]
    assert [row[-1] for row in table.rows] == ["0 %", "100 %", "0 %"]


def test_what_does_not_fit_is_counted_and_a_screen_is_never_overfull():
    many = cluster(
        [job(f"job-{n:03}") for n in range(200)],
        [node(f"node-{n:04}") for n in range(1000)],
        [event() for _ in range(50)],
    )
    for lines in (24, 40, 100):
        blocks = screen(many, lines)
        height = sum(4 + len(b.rows) - 1 if isinstance(b, Table) else 1 for b in blocks)
        assert height <= lines
        shown_jobs, shown_nodes = (len(table.rows) for table in tables(blocks))
        assert f"and {200 - shown_jobs} more jobs" in blocks
        assert f"and {1000 - shown_nodes} more nodes" in blocks


def test_few_jobs_leave_their_room_to_nodes():
    blocks = screen(cluster([job("a")], [node(f"n{n}") for n in range(20)]), 40)

    assert [len(table.rows) for table in tables(blocks)] == [1, 20]
    assert "no jobs yet" in screen(cluster([], [node("n")]), 24)


def test_an_event_is_one_line():
    (*_, line) = screen(cluster(events=[event()]), 24)

    assert re.fullmatch(r"\d\d:\d\d:\d\d info    gpt: it happened", line)


def test_on_a_terminal_it_is_drawn_anew_until_ctrl_c_and_outlives_an_outage():
    ours, theirs = pty.openpty()
    shown = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )  # fmt: skip
    os.close(theirs)
    text = ""
    try:
        while "no answer since" not in text:
            text += os.read(ours, 1 << 16).decode()
        shown.send_signal(signal.SIGINT)
        while True:
            try:
                text += os.read(ours, 1 << 16).decode()
            except OSError:  # the terminal is closed: it has ended
                break
    finally:
        shown.kill()
        code = shown.wait()
        os.close(ours)

    assert "first" in text
    assert "second" in text
    assert text.index("first") < text.index("77") < text.index("it sleeps")
    assert "Traceback" not in text
    assert code == 0
