"""Launchers with their ranks as processes: kills, signals, exit codes; nothing is left behind."""

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.integration.launcher.harness import kill, until

from holdfast_services.metadata.domain.launch import EndReason
from holdfast_services.metadata.domain.rounds import Tick

PLAIN = ("--no-standby",)


def two(cluster, *options):
    return [cluster.launcher(n, "--nnodes", "2", *options) for n in ("a", "b")]


def test_a_script_that_ends_well_ends_the_launch(cluster):
    cluster.script("print('rank', RANK, 'of', os.environ['WORLD_SIZE'], sys.argv[1:])")
    cluster.launcher("a", "--nproc-per-node", "2", *PLAIN, arguments=("--lr", "1"))

    assert cluster.codes() == [0]
    assert "rank 0 of 2 ['--lr', '1']" in cluster.said()
    assert "rank 1 of 2" in cluster.said()


def test_a_killed_rank_ends_all_others_and_all_begin_again(cluster):
    cluster.script("forever() if ROUND < 3 else None")
    two(cluster, *PLAIN)
    others = [os.pidfd_open(cluster.pid(1, 0))]
    kill(cluster.pid(1, 1))
    cluster.pid(2, 1)
    kill(cluster.pid(2, 0))

    assert cluster.codes() == [0, 0]
    assert cluster.decision.launch.number in (0, 3)
    assert cluster.said().count("killed by SIGKILL") == 2
    for log in cluster.folder.glob("*.log"):
        begun = [line for line in log.read_text().splitlines() if "begins" in line]
        assert begun == [f"holdfast run: round {n} begins: 2 ranks on 2 nodes" for n in (2, 3)]
    os.close(others[0])


def test_ranks_that_hang_are_ended_with_the_one_that_was_killed(cluster):
    """As in a collective, which hears of no signal: nobody waits until it gives up."""
    deaf = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
    cluster.script(f"if ROUND == 1:\n    {deaf}\n    forever()")
    two(cluster, *PLAIN)
    cluster.pid(1, 0)
    kill(cluster.pid(1, 1))

    assert cluster.codes() == [0, 0]


def test_a_standby_takes_the_place_of_a_rank(cluster):
    cluster.script("forever() if ROUND < 2 else print('preloaded', 'colorsys' in sys.modules)")
    launcher = cluster.launcher("a", "--preload", "colorsys", "--nnodes", "2")
    cluster.decision.until(lambda launch: launch.launchers, "the first launcher")
    until(lambda: len(cluster.left()) > 2, "a standby")  # launcher, keeper, standby
    cluster.launcher("b", "--nnodes", "2", *PLAIN)
    cluster.pid(1, 1)
    kill(cluster.pid(1, 0))
    cluster.codes()

    assert launcher.returncode == 0
    assert "preloaded" in cluster.said()


NESTED = """
import subprocess
inner = [sys.executable, "-m", "holdfast.cli.main", "run", "--job", "inner", "--no-standby"]
inner += ["--nproc-per-node", "2", "inner.py", str(ROUND)]
sys.exit(subprocess.run(inner).returncode)
"""
INNER = """
import os, pathlib, subprocess, sys, time
outer, stay = int(sys.argv[1]), "import time; time.sleep(1000)"
names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "HOLDFAST_ATTEMPT", "HOLDFAST_LAUNCH")
print("inner", *(os.environ[name] for name in names), flush=True)
if outer == 1:
    subprocess.Popen(["setsid", "--fork", sys.executable, "-c", stay])
    pathlib.Path(os.environ["FOLDER"], f"inner-{os.environ['RANK']}").touch()
    time.sleep(1000)
"""


def test_a_launch_inside_a_rank_is_its_own_and_ends_with_the_rank(cluster):
    """With all that its ranks have started, also in sessions of their own."""
    cluster.script(NESTED)
    (cluster.folder / "inner.py").write_text(INNER)
    cluster.launcher("a", *PLAIN)
    outer = cluster.pid(1, 0)
    for rank in (0, 1):
        until((cluster.folder / f"inner-{rank}").exists, f"rank {rank} of the inner launch")
    count = len(cluster.left())
    kill(outer)

    assert cluster.codes() == [0]
    assert count == 9, "launcher, keeper, rank; those of the inner one, and what two ranks left"
    until(lambda: not cluster.left(), "nothing of the first round is left")
    said = [line.split()[1:] for line in cluster.said().splitlines() if line.startswith("inner ")]
    assert sorted(words[:3] for words in said) == [[r, "2", "inner"] for r in ("0", "0", "1", "1")]
    for _, _, _, attempt, launch in said:
        assert attempt.startswith(launch)
    assert len({launch for *_, launch in said}) == 2, "a launch for each round of the outer one"


def test_a_killed_launcher_takes_its_ranks_and_what_they_started_along(cluster):
    cluster.script(
        """
import subprocess
if ROUND == 1 and RANK == 1:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
if ROUND == 1:
    forever()
"""
    )
    first, second = two(cluster, *PLAIN)
    rank = os.pidfd_open(cluster.pid(1, 1))
    cluster.pid(1, 0)
    second.kill()
    second.wait()

    cluster.decision.until(lambda launch: not launch.on, "the round is over")
    cluster.launcher("b", "--nnodes", "2", *PLAIN)
    assert cluster.codes() == [0, -signal.SIGKILL, 0]
    assert first.returncode == 0
    os.close(rank)


def test_an_exception_that_comes_twice_ends_the_launch_with_its_traceback(cluster):
    cluster.script("if RANK == 1: raise ValueError('bad batch')\nforever()")
    two(cluster, *PLAIN)

    assert cluster.codes() == [1, 1]
    for log in cluster.folder.glob("*.log"):
        said = log.read_text()
        assert "rank 1: ValueError: bad batch" in said
        assert "if RANK == 1: raise ValueError" in said
        assert "twice" in said or "second time in a row" in said
    assert cluster.decision.events[-1].kind in ("launch_failed", "launcher_left")


ENDS_WITHOUT_A_WORD = """
import ctypes
from holdfast.training.progress import Progress
Progress().advance({step}, 0.0)
{ends}
"""


@pytest.mark.parametrize("ends", ["os._exit(1)", "ctypes.CDLL(None).exit(1)"])
def test_two_ends_without_a_word_are_the_same_failure_at_the_same_step_alone(cluster, ends):
    """Python is not asked at such an end, and an exit code is alike whatever went wrong."""
    cluster.script(ENDS_WITHOUT_A_WORD.format(step="(10, 20, 30, 30)[ROUND - 1]", ends=ends))
    cluster.launcher("a")

    assert cluster.codes() == [1]
    assert cluster.decision.launch.number == 4
    assert "rank 0: exit code 1 at step 30 (the second time in a row" in cluster.said()


def test_the_code_of_the_rank_that_failed_first_is_the_launchs(cluster):
    cluster.script("sys.exit(7)")
    cluster.launcher("a", "--nproc-per-node", "2", *PLAIN)

    assert cluster.codes() == [7]


SAVES = """
def save(number, frame):
    ME.with_suffix(".saved").write_text(str(number))
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
ME.with_suffix(".ready").write_text("")
forever()
"""


def test_a_notice_that_a_node_will_be_taken_away_ends_the_launch_as_sigterm_does(cluster):
    cluster.script(SAVES)
    notice = cluster.folder / "notice"
    cluster.launcher("a", "--notice", f"file:{notice}", *PLAIN)
    cluster.pid(1, 0)
    until((cluster.folder / "round-1-rank-0.ready").exists, "handlers are there")
    notice.write_text("maintenance\n")

    assert cluster.codes() == [143]
    assert "this node will be taken away (maintenance): ranks save and end" in cluster.said()
    assert (cluster.folder / "round-1-rank-0.saved").read_text() == str(int(signal.SIGTERM))


COUNTS = """
from holdfast.training.progress import Progress
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
if ROUND == 1:
    Progress().advance(5, 0.0)
    ME.with_suffix(".ready").write_text("")
    forever()
"""


def test_a_notice_to_ranks_that_count_steps_ends_the_round_and_others_go_on(cluster):
    cluster.script(COUNTS)
    notice = cluster.folder / "notice"
    for node in ("a", "b"):
        told = ("--notice", f"file:{notice}") if node == "b" else ()
        cluster.launcher(node, "--nnodes", "1:2", *told, *PLAIN)
    for rank in (0, 1):
        cluster.pid(1, rank)
        until((cluster.folder / f"round-1-rank-{rank}.ready").exists, "a step is done")
    notice.write_text("maintenance\n")
    launch = cluster.decision.until(lambda one: one.end, "the round is to end")
    assert (1, EndReason.NOTICE) == (launch.number, launch.end.reason)
    assert launch.on
    cluster.decision.feed(Tick(saved=True))

    assert cluster.codes() == [0, 143]
    assert "others go on without it" in cluster.said()
    assert "round 2 begins: 1 rank on 1 node" in cluster.said()
    assert "has failed" not in cluster.said()


def test_with_too_few_others_a_notice_has_all_ranks_save_and_end(cluster):
    cluster.script(COUNTS.replace("sys.exit(3)", "sys.exit(128 + 15)"))
    notice = cluster.folder / "notice"
    two(cluster, "--notice", f"file:{notice}", *PLAIN)
    for rank in (0, 1):
        cluster.pid(1, rank)
        until((cluster.folder / f"round-1-rank-{rank}.ready").exists, "a step is done")
    notice.write_text("maintenance\n")

    assert cluster.codes() == [143, 143]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_ranks_may_save(cluster, number):
    cluster.script(SAVES)
    first, _ = two(cluster, *PLAIN)
    for rank in (0, 1):
        cluster.pid(1, rank)
        path = cluster.folder / f"round-1-rank-{rank}.ready"
        until(path.exists, "handlers are there")
    first.send_signal(number)

    assert cluster.codes() == [128 + number, 143]
    saved = sorted(path.name for path in cluster.folder.glob("*.saved"))
    assert saved == ["round-1-rank-0.saved", "round-1-rank-1.saved"]


def test_a_second_signal_ends_at_once_what_does_not_listen(cluster):
    cluster.script(
        "signal.signal(signal.SIGTERM, lambda *_: ME.with_suffix('.deaf').touch())\nforever()"
    )
    launcher = cluster.launcher("a", "--grace", "1000", *PLAIN)
    cluster.pid(1, 0)
    deaf = cluster.folder / "round-1-rank-0.deaf"

    def told():
        if not deaf.exists():
            launcher.send_signal(signal.SIGTERM)
        return deaf.exists()

    launcher.send_signal(signal.SIGTERM)
    until(lambda: deaf.exists() or launcher.poll() is not None, "the rank has heard")
    launcher.send_signal(signal.SIGTERM)

    assert cluster.codes() == [143]


def test_ranks_that_do_not_end_are_killed_after_the_grace(cluster):
    cluster.script(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nME.with_suffix('.deaf').touch()\nforever()"
    )
    launcher = cluster.launcher("a", "--grace", "1", *PLAIN)
    until((cluster.folder / "round-1-rank-0.deaf").exists, "the rank ignores it")
    launcher.send_signal(signal.SIGTERM)

    assert cluster.codes() == [143]


def test_an_agent_that_is_away_stops_nobody(cluster):
    cluster.script("forever() if ROUND < 2 else None")
    two(cluster, *PLAIN)
    cluster.decision.until_round(1)
    rank = os.pidfd_open(cluster.pid(1, 1))
    cluster.pid(1, 0)
    cluster.agents["b"].stop()
    cluster.agents["b"].start()
    count = len(cluster.decision.reports)
    cluster.decision.until(lambda _: len(cluster.decision.reports) > count + 4, "they ask again")

    signal.pidfd_send_signal(rank, 0)
    assert cluster.decision.launch.number == 1
    os.close(rank)
    kill(cluster.pid(1, 1))
    assert cluster.codes() == [0, 0]


def test_a_second_launcher_on_one_node_hears_of_the_first(cluster):
    cluster.decision.lease_s = 1.0  # for so long, and some more, the second waits
    cluster.script("forever()")
    first = cluster.launcher("a", "--nnodes", "1", *PLAIN)
    cluster.pid(1, 0)
    second = cluster.launcher("a", "--nnodes", "1", *PLAIN)

    assert second.wait(200) == 1
    assert f"has a launcher of job already: {os.uname().nodename}:{first.pid}" in cluster.said()
    assert first.poll() is None


def test_a_node_in_reserve_takes_over(cluster):
    cluster.script("forever() if ROUND < 2 else None")
    two(cluster, *PLAIN)
    cluster.decision.until_round(1)
    cluster.launcher("c", "--nnodes", "2", *PLAIN)
    cluster.decision.until(lambda launch: len(launch.launchers) == 3, "the third is here")
    cluster.pid(1, 0)
    kill(cluster.launchers[0].pid)

    assert sorted(process.wait(200) for process in cluster.launchers[1:]) == [0, 0]


def test_what_ranks_print_goes_where_it_should(cluster):
    cluster.script("print('out', RANK); print('err', RANK, file=sys.stderr)")
    logs = cluster.folder / "logs"
    cluster.launcher(
        "a",
        "--nproc-per-node",
        "2",
        "--tee",
        "1",
        "--redirects",
        "2",
        "--log-dir",
        str(logs),
        *PLAIN,
    )

    assert cluster.codes() == [0]
    assert "[default0]:out 0" in cluster.said()
    assert "[default1]:out 1" in cluster.said()
    assert "err 0" not in cluster.said()
    assert (logs / "job/round-1/rank-1.out").read_text() == "out 1\n"
    assert (logs / "job/round-1/rank-1.err").read_text() == "err 1\n"


def test_fewer_nodes_go_on_and_a_late_one_waits_for_a_saved_step(cluster):
    from holdfast_services.metadata.domain.rounds import Tick

    cluster.script("forever() if ROUND < 2 else None")
    options = ("--nnodes", "1:2", "--shrink-after", "0", *PLAIN)
    cluster.launcher("a", *options)
    cluster.pid(1, 0)
    cluster.launcher("b", *options)
    cluster.decision.until(lambda launch: len(launch.launchers) == 2, "the second is here")
    assert cluster.decision.launch.number == 1

    cluster.decision.feed(Tick(saved=True))

    assert cluster.codes() == [0, 0]
    assert cluster.pid(2, 1)


@pytest.mark.parametrize(
    "raises",
    [
        "raise ValueError('of \\0 bytes')",
        "raise ValueError(os.fsdecode(b'caf\\xe9'))",
        "raise ValueError('x' * 100_000)",
        "raise ValueError('a' + chr(10) + 'b')",
        "class Odd(Exception):\n    def __str__(self): raise KeyError\nraise Odd",
    ],
)
def test_whatever_an_exception_says_the_launch_ends_by_it(cluster, raises):
    cluster.script(raises)
    cluster.launcher("a", *PLAIN)

    assert cluster.codes() == [1]
    assert "the launch has failed" in cluster.said()


def test_an_agent_that_does_not_see_the_lock_is_asked_now_and_then(cluster):
    """Each time it is locked anew, in the arena that the agent has by then."""
    cluster.script("forever() if ROUND < 2 else None")
    launcher = cluster.launcher("a", *PLAIN)
    cluster.decision.until_round(1)
    agent = cluster.agents["a"]
    agent.blind = True
    until(lambda: "does not see that it runs" in cluster.said(), "it says so")
    before = len(list(Path(f"/proc/{launcher.pid}/fd").iterdir()))
    asked = agent.asked
    until(lambda: agent.asked > asked + 3, "it asks again")
    assert len(list(Path(f"/proc/{launcher.pid}/fd").iterdir())) <= before + 1
    agent.blind = False
    kill(cluster.pid(1, 0))

    assert cluster.codes() == [0]


def test_a_standby_that_cannot_be_is_tried_once(cluster):
    (cluster.folder / "bad.py").write_text("raise RuntimeError('no import of this')")
    cluster.script("forever() if ROUND < 2 else None")
    cluster.launcher("a", "--preload", "bad", "--nnodes", "2")
    until(lambda: "so there are none" in cluster.said(), "it is said")
    cluster.launcher("b", "--nnodes", "2", *PLAIN)
    cluster.decision.until_round(1)
    kill(cluster.pid(1, 0))

    assert cluster.codes() == [0, 0]
    assert cluster.said().count("no import of this") <= 2


def test_ranks_that_cannot_be_started_are_tried_again_in_another_round(cluster):
    """As if they had been killed; the program is away for a moment."""
    cluster.script("forever() if ROUND == 1 else None")
    program = cluster.folder / "python"
    program.symlink_to(sys.executable)
    cluster.launcher("a", "--nproc-per-node", "2", *PLAIN, program=str(program))
    first, _ = cluster.pid(1, 0), cluster.pid(1, 1)
    program.unlink()
    kill(first)
    until(lambda: "cannot be started: No such file" in cluster.said(), "it says so")
    program.symlink_to(sys.executable)

    assert cluster.codes() == [0]
