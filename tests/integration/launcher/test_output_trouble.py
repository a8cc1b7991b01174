"""Whatever becomes of the terminal, of files and of lines: the ranks train on."""

import os
import select
import signal
import subprocess
from pathlib import Path

from tests.integration.launcher.harness import BACKGROUND, until

PLAIN = ("--no-standby",)
MIB = 1 << 20


def test_a_terminal_that_is_closed_stops_no_rank(cluster):
    cluster.script(f"print('first'); sys.stdout.write(('x' * 99 + '\\n') * {MIB // 50})")
    launcher = cluster.launcher("a", "--tee", "1", *PLAIN, stdout=subprocess.PIPE)
    assert launcher.stdout.readline() == b"[default0]:first\n"
    launcher.stdout.close()

    assert cluster.codes() == [0]
    assert "Broken pipe" in cluster.said()
    assert "has failed" not in cluster.said()


def test_a_disk_that_is_full_stops_no_rank(cluster):
    cluster.script(f"sys.stdout.write(('x' * 99 + '\\n') * {MIB // 50})")
    logs = cluster.folder / "logs/job/round-1"
    logs.mkdir(parents=True)
    (logs / "rank-0.out").symlink_to("/dev/full")
    (logs / "rank-0.err").symlink_to("/nowhere/at/all")
    with Path("/dev/full").open("wb") as full:
        cluster.launcher(
            "a", "--tee", "1", "--redirects", "2", "--log-dir", "logs", *PLAIN, stdout=full
        )

        assert cluster.codes() == [0]
    assert "output of a rank is lost: No space left" in cluster.said()
    assert "rank-0.err cannot be written: No such file" in cluster.said()


def test_nobody_who_hears_the_launcher_is_no_reason_to_end(cluster):
    """Its own words go nowhere: the disk is full, or all three streams are closed."""
    cluster.script("print('words'); os.kill(os.getpid(), 9) if ROUND == 1 else None")
    with Path("/dev/full").open("wb") as full:
        cluster.launcher("a", "--tee", "3", *PLAIN, stdout=full, stderr=full)
        assert cluster.codes() == [0]


def test_closed_standard_streams_are_no_reason_to_end(cluster):
    cluster.script("print('words'); os.kill(os.getpid(), 9) if ROUND == 1 else None")
    cluster.launcher(
        "a", "--tee", "3", *PLAIN, through=("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    )

    assert cluster.codes() == [0]


def test_a_line_without_an_end_takes_no_memory_and_loses_nothing(cluster):
    cluster.script(
        f"""
def peak():
    text = pathlib.Path(f"/proc/{{os.getppid()}}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0])
before = peak()
for _ in range(100):
    os.write(1, b"\\xff\\0" * {MIB // 2})
print()
print("grown by", peak() - before, "KiB")
"""
    )
    logs = cluster.folder / "logs"
    with (cluster.folder / "out").open("wb") as out:
        cluster.launcher("a", "--tee", "1", "--log-dir", str(logs), *PLAIN, stdout=out)
        assert cluster.codes() == [0]

    kept = (logs / "job/round-1/rank-0.out").read_bytes()
    assert kept.count(b"\xff\0" * (MIB // 2)) == 100
    assert int(kept.rpartition(b"grown by ")[2].split()[0]) < 10_000
    shown = (cluster.folder / "out").read_bytes()
    assert shown.count(b"\xff") == 100 * (MIB // 2)
    assert b"\n[default0]:grown by" in shown
    assert max(map(len, shown.split(b"\n"))) < MIB


def test_a_folder_for_logs_that_is_none_is_refused_by_name(cluster):
    cluster.script("forever()")
    (cluster.folder / "logs").write_text("a file")
    cluster.launcher("a", "--tee", "1", "--log-dir", "logs", *PLAIN)

    assert cluster.codes() == [1]
    assert "holdfast: --log-dir logs" in cluster.said()
    assert "Traceback" not in cluster.said()


def test_what_a_rank_has_sent_to_the_background_ends_with_it(cluster):
    cluster.script(BACKGROUND + "if ROUND == 1:\n    leave_behind()\n    forever()")
    cluster.launcher("a", "--tee", "1", *PLAIN)
    until(lambda: "behind" in cluster.said(), "it runs")
    behind = os.pidfd_open(int(cluster.said().partition("behind ")[2].split()[0]))
    os.kill(cluster.pid(1, 0), signal.SIGKILL)

    cluster.pid(2, 0)
    assert select.select([behind], [], [], 0)[0], "it had ended before the next round began"
    assert cluster.codes() == [0]
    os.close(behind)


def test_what_is_in_the_background_ends_with_a_launcher_that_is_killed(cluster):
    cluster.script(BACKGROUND + "leave_behind()\nforever()")
    launcher = cluster.launcher("a", "--tee", "1", *PLAIN)
    until(lambda: "behind" in cluster.said(), "it runs")
    launcher.kill()
    launcher.wait()

    until(lambda: not cluster.left(), "no process is left")
