"""Signals at odd moments: every rank has its time to save, and the code says what happened."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from tests.integration.launcher.harness import BACKGROUND, kill, until

PLAIN = ("--no-standby",)

SAVES = """
MARK = ME.parent / os.environ["NODE"]
def save(number, frame):
    MARK.with_suffix(".told").touch()
    while os.environ["NODE"] in SLOW and not (ME.parent / "go").exists():
        time.sleep(0.01)
    MARK.with_suffix(".saved").touch()
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
MARK.with_suffix(".ready").touch()
forever()
"""


def started(cluster, slow, *options, nodes=2):
    cluster.script(SAVES.replace("SLOW", repr(slow)))
    names = "ab"[:nodes]
    launchers = [cluster.launcher(n, "--nnodes", str(nodes), *options, *PLAIN) for n in names]
    for name in names:
        until(lambda name=name: marked(cluster, name, "ready"), f"the rank of node {name}")
    return launchers


def marked(cluster, name, what):
    return (cluster.folder / f"{name}.{what}").exists()


def test_who_saves_for_longer_is_not_killed_when_the_other_is_done(cluster):
    first, second = started(cluster, slow="b")
    first.send_signal(signal.SIGTERM)
    assert first.wait(200) == 143
    cluster.decision.until(lambda launch: len(launch.launchers) < 2, "the first has left")
    count = len(cluster.decision.reports)
    cluster.decision.until(
        lambda _: len(cluster.decision.reports) > count, "the second asked again"
    )
    (cluster.folder / "go").touch()

    assert second.wait(200) == 143
    assert marked(cluster, "b", "saved")
    assert "round_failed" not in [event.kind for event in cluster.decision.events]


def test_a_node_that_is_told_twice_by_two_ways_saves_once(cluster):
    """As when a whole job is ended: another launcher's signal comes first by way of metadata."""
    first, second = started(cluster, slow="ab")
    first.send_signal(signal.SIGTERM)
    until(lambda: marked(cluster, "b", "told"), "the second node was told")
    second.send_signal(signal.SIGTERM)
    count = len(cluster.decision.reports)
    cluster.decision.until(lambda _: len(cluster.decision.reports) > count, "it says so")
    (cluster.folder / "go").touch()

    assert cluster.codes() == [143, 143]
    assert marked(cluster, "b", "saved")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_closed_terminal_gives_time_to_save_too(cluster, number):
    (launcher,) = started(cluster, slow="", nodes=1)
    launcher.send_signal(number)

    assert cluster.codes() == [128 + number]
    assert marked(cluster, "a", "saved")


def test_a_signal_that_is_ignored_stays_ignored(cluster):
    cluster.script("forever() if ROUND < 2 else None")
    launcher = cluster.launcher("a", *PLAIN, through=("sh", "-c", 'trap "" HUP; exec "$@"', "sh"))
    cluster.decision.until_round(1)
    launcher.send_signal(signal.SIGHUP)
    kill(cluster.pid(1, 0))

    assert cluster.codes() == [0]


def test_of_ranks_that_were_told_to_end_one_that_fails_gives_the_code(cluster):
    """Rank 0 saves and says 143, rank 1 has nothing to say: the launch was stopped all the same."""
    cluster.script(
        """
def save(number, frame):
    while RANK == 1 and not (ME.parent / "go").exists():
        time.sleep(0.01)
    sys.exit(143 if RANK == 0 else 0)
signal.signal(signal.SIGTERM, save)
ME.with_suffix(".ready").touch()
forever()
"""
    )
    launcher = cluster.launcher("a", "--nproc-per-node", "2", *PLAIN)
    for rank in (0, 1):
        until((cluster.folder / f"round-1-rank-{rank}.ready").exists, f"rank {rank}")
    watched = os.pidfd_open(cluster.pid(1, 0))
    launcher.send_signal(signal.SIGTERM)
    until(lambda: not Path(f"/proc/{cluster.pid(1, 0)}").exists(), "rank 0 has been reaped")
    (cluster.folder / "go").touch()

    assert cluster.codes() == [143]
    os.close(watched)


@pytest.mark.parametrize("again", [1, 3])
def test_signals_while_it_starts_leave_nothing(cluster, again):
    cluster.script("forever()")
    launcher = cluster.launcher("a", "--nnodes", "2", "--preload", "torch")
    cluster.decision.until(lambda launch: launch.launchers, "it is here")
    until(lambda: len(cluster.left()) > 2, "a standby")
    for _ in range(again):
        launcher.send_signal(signal.SIGTERM)

    assert cluster.codes() == [143]
    assert not cluster.decision.launch.launchers


def test_a_launcher_that_is_stopped_for_longer_than_its_lease_kills_its_ranks(cluster):
    """Fenced: another node has its place meanwhile; it wakes up and waits in reserve."""
    from holdfast_services.metadata.domain.rounds import Gone

    cluster.script(
        """
def until_go():
    while not (ME.parent / "go").exists():
        time.sleep(0.01)
forever() if ROUND < 2 else until_go()
"""
    )
    first = cluster.launcher("a", "--nnodes", "2", *PLAIN)
    cluster.launcher("b", "--nnodes", "2", *PLAIN)
    cluster.decision.until_round(1)
    old = cluster.pid(1, 0)
    first.send_signal(signal.SIGSTOP)
    cluster.decision.feed(Gone(frozenset({launcher_of(cluster, "a")})))
    cluster.launcher("c", "--nnodes", "2", *PLAIN)
    cluster.decision.until_round(2)
    first.send_signal(signal.SIGCONT)

    until(lambda: not Path(f"/proc/{old}").exists(), "the rank of the old round is killed")
    cluster.decision.until(lambda launch: len(launch.launchers) == 3, "it waits in reserve")
    assert cluster.decision.launch.number == 2
    (cluster.folder / "go").touch()
    assert cluster.codes() == [0, 0, 0]


def test_one_that_wakes_up_where_another_has_its_node_gives_up_by_name(cluster):
    from holdfast_services.metadata.domain.rounds import Gone

    cluster.script("forever()")
    cluster.decision.lease_s = 1.0  # for so long, and some more, it is refused
    first = cluster.launcher("a", *PLAIN)
    cluster.decision.until_round(1)
    old = cluster.pid(1, 0)
    first.send_signal(signal.SIGSTOP)
    cluster.agents["a"].stop()  # so that what it asked before is not answered
    cluster.agents["a"].start()
    cluster.decision.feed(Gone(frozenset({launcher_of(cluster, "a")})))
    (cluster.folder / "round-1-rank-0").unlink()
    second = cluster.launcher("a", *PLAIN)
    until(lambda: cluster.pid(1, 0) != old, "the ranks of the second")
    first.send_signal(signal.SIGCONT)

    until(lambda: "waiting: node a has a launcher" in cluster.said(), "it is refused")
    asked = cluster.agents["a"].asked
    until(lambda: cluster.agents["a"].asked > asked + 3, "it asks again")
    assert not Path(f"/proc/{old}").exists(), "it was killed at once, not when this one gives up"
    assert first.wait(200) == 1
    assert f"node a has a launcher of job already: {os.uname().nodename}:{second.pid}" in (
        cluster.said()
    )
    assert second.poll() is None


def test_a_keeper_that_is_killed_is_replaced(cluster):
    """Then the launcher: what a rank has started ends all the same."""
    cluster.script(BACKGROUND + "leave_behind()\nforever()")
    launcher = cluster.launcher("a", "--tee", "1", *PLAIN)
    until(lambda: "behind" in cluster.said(), "it runs")
    keeper = keeper_of(launcher.pid)
    kill(keeper)
    until(lambda: keeper_of(launcher.pid) not in (None, keeper), "another one")
    launcher.kill()
    launcher.wait()

    until(lambda: not cluster.left(), "no process is left")


def launcher_of(cluster, node):
    return next(one.id for one in cluster.decision.launch.launchers if one.node == node)


def keeper_of(pid):
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(OSError):
            if "keeper.py" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    return None
