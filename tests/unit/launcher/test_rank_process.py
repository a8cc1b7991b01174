"""A script sees no difference between ``python -u SCRIPT`` and a rank's process, standby or not."""

import json
import os
import re
import select
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.servers.nursery import QUICK

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "sdk/holdfast/launcher/rank_process.py"
WAIT_S_MAX = 120

SEES = """
    import __main__, gc, os, sys, json
    seen = {
        "argv": sys.argv, "path": sys.path[0], "orig": sys.orig_argv, "file": __file__,
        "name": __name__, "cwd": os.getcwd(), "main": __main__.__dict__ is globals(),
        "spec": getattr(__spec__, "name", None), "builtins": str(__builtins__)[:24],
        "globals": sorted(globals()), "stdin": sys.stdin.read(), "flags": str(sys.flags),
        "threads": len(os.listdir("/proc/self/task")),
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
    }
    print(json.dumps(seen))
"""


def environment(quick, *folders):
    """Return that of both processes; ``quick``: torch is cheap in them and in those they start."""
    paths = [*([QUICK] if quick else []), ROOT / "sdk", *folders]
    return {**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1"}


class Rank:
    """A process of ours with a script, told to go once it has imported what it is to."""

    def __init__(self, folder, *words, module=False, preload=(), quick=False, **order):
        self.ready = folder / "marks" / "ready" if preload else None
        (folder / "marks").mkdir(exist_ok=True)
        (folder / "marks" / "last.py").write_text(
            "import pathlib; pathlib.Path(__file__).with_name('ready').touch()"
        )
        self.noted = folder / "failure.json"
        ours, theirs = socket.socketpair()
        order = {
            "parent": os.getpid(),
            "descriptor": theirs.fileno(),
            "preload": [*preload, "last"] if preload else [],
            "module": module,
            **order,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(PROGRAM), json.dumps(order), *words],
            pass_fds=(theirs.fileno(),), cwd=folder, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={
                **environment(quick, folder / "marks"), "LOCAL_RANK": "0",
            },
        )  # fmt: skip
        theirs.close()
        self.channel = ours

    def tell(self, **environ):
        told = {"environ": environ, "failure_file": str(self.noted), "files": {}}
        self.channel.sendall(json.dumps(told).encode() + b"\n")

    def go(self, said="", **environ):
        ends_s = time.monotonic() + WAIT_S_MAX
        while self.ready and not self.ready.exists() and self.process.poll() is None:
            assert time.monotonic() < ends_s, "it has not imported all"
            time.sleep(0.02)
        self.tell(**environ)
        self.channel.close()
        out, err = self.process.communicate(said, timeout=WAIT_S_MAX)
        return self.process.returncode, out, err


def plain(folder, *words, said="", module=False, quick=False):
    command = [sys.executable, "-u", *(["-m"] if module else []), *words]
    done = subprocess.run(
        command, cwd=folder, input=said, capture_output=True, text=True, timeout=WAIT_S_MAX,
        check=False, env=environment(quick),
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def script(folder, text, name="train.py"):
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return name


@pytest.mark.parametrize("preload", [(), ("torch", "torch.distributed", "torch._dynamo")])
def test_a_script_sees_what_it_sees_under_python(tmp_path, preload):
    name = script(tmp_path, SEES)

    ours = Rank(tmp_path, name, "--lr", "1", preload=preload).go("typed")

    assert ours == plain(tmp_path, name, "--lr", "1", said="typed")
    assert json.loads(ours[1])["stdin"] == "typed"
    assert json.loads(ours[1])["threads"] == 1


def test_a_module_sees_what_it_sees_under_python(tmp_path):
    (tmp_path / "pack").mkdir()
    script(tmp_path, "", "pack/__init__.py")
    script(tmp_path, SEES, "pack/__main__.py")

    ours = Rank(tmp_path, "pack", "--lr", "1", module=True).go("typed")

    assert ours == plain(tmp_path, "pack", "--lr", "1", said="typed", module=True)


@pytest.mark.parametrize(
    "ends",
    [
        "raise ValueError('no')",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
        "import sys; sys.exit(3)",
        "raise SystemExit('said so')",
        "raise KeyboardInterrupt",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import atexit; atexit.register(print, 'at exit'); raise RuntimeError",
        "import sys; sys.excepthook = lambda *a: print('hooked', a[0].__name__); raise OSError",
        "def f(:",
        "import threading; threading.Thread(target=lambda: print('late')).start()",
    ],
)
def test_it_ends_as_under_python(tmp_path, ends):
    name = script(tmp_path, ends)

    assert Rank(tmp_path, name).go() == plain(tmp_path, name)


def test_what_an_exception_was_is_left_for_the_launcher(tmp_path):
    name = script(tmp_path, "def f():\n    raise ValueError('no')\nf()")
    rank = Rank(tmp_path, name)
    rank.go(TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))

    noted = json.loads(rank.noted.read_text())
    assert (noted["reason"], noted["kind"]) == ("ValueError: no", "ValueError")
    assert noted["detail"].count("File ") == 2, "frames of the script only"
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message["message"] == "ValueError: no"
    assert "raise ValueError" in message["extraInfo"]["py_callstack"]


def test_notes_of_an_exception_are_no_reason(tmp_path):
    rank = Rank(tmp_path, script(tmp_path, "e = ValueError('no')\ne.add_note('seen')\nraise e"))
    _, _, err = rank.go()

    noted = json.loads(rank.noted.read_text())
    assert noted["reason"] == "ValueError: no"
    assert "seen" in noted["detail"]
    assert "seen" in err


EXITS = """
    import atexit, sys
    from holdfast.training import ending
    atexit.register(lambda: print("failed", ending.has_failed()))
    sys.exit({code})
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [("3", ""), ("'no\\ndata'", "exit with an error: no data"), ("0", None), ("None", None)],
)
def test_an_exit_with_an_error_is_a_failure(tmp_path, code, reason):
    """F105: it is no end in order."""
    rank = Rank(tmp_path, script(tmp_path, EXITS.format(code=code)))
    _, out, _ = rank.go()

    assert out == f"failed {reason is not None}\n"
    assert rank.noted.exists() == (reason is not None)
    if reason is not None:
        noted = json.loads(rank.noted.read_text())
        assert noted["kind"] == "SystemExit"
        assert noted.get("reason", "") == reason


def test_processes_that_it_starts_find_its_functions(tmp_path):
    name = script(
        tmp_path,
        """
        import multiprocessing, os, sys

        def work(n):
            return n + len(sys.argv)

        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(method, pool.map(work, range(4)))
        """,
    )

    code, out, err = Rank(tmp_path, name, "x", preload=("torch",), quick=True).go()

    assert (code, out, err) == plain(tmp_path, name, "x", quick=True)
    assert out.count("[2, 3, 4, 5]") == 3


def test_loaders_with_workers_work(tmp_path):
    name = script(
        tmp_path,
        """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, i):
                return torch.tensor(i)

        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                loader = DataLoader(Numbers(), 4, num_workers=2, multiprocessing_context=method)
                print([batch.tolist() for batch in loader])
        """,
    )

    code, out, _ = Rank(tmp_path, name, preload=("torch", "torch._dynamo"), quick=True).go()

    assert code == 0
    assert out == plain(tmp_path, name, quick=True)[1]


def test_where_torch_sees_no_gpu_warm_cuda_is_said_to_do_nothing(tmp_path):
    name = script(tmp_path, "print('trains')")
    rank = Rank(tmp_path, name, preload=("torch",), warm_cuda=True, quick=True)
    assert select.select([rank.process.stderr], [], [], WAIT_S_MAX)[0], "it says so"
    code, out, err = rank.go()

    assert (code, out) == (0, "trains\n")
    assert re.search("--warm-cuda: torch .* sees no GPU; standbys do without", err)


def test_who_is_told_to_go_imports_no_more(tmp_path):
    """At the start of a launch nobody waits for what the script may not need."""
    name = script(tmp_path, "import sys; print('colorsys' in sys.modules)")
    (tmp_path / "marks").mkdir()
    (tmp_path / "marks" / "slow.py").write_text(
        "import pathlib, time\n"
        "while not pathlib.Path(__file__).with_name('told').exists(): time.sleep(0.01)"
    )
    rank = Rank(tmp_path, name, preload=("slow", "colorsys"))
    rank.tell()
    rank.channel.close()
    (tmp_path / "marks" / "told").touch()
    out, _ = rank.process.communicate(timeout=WAIT_S_MAX)

    assert (rank.process.returncode, out) == (0, "False\n")


def test_what_cannot_be_preloaded_is_said(tmp_path):
    name = script(tmp_path, "print('ran')")

    code, out, err = Rank(tmp_path, name, preload=("no_such_module",)).go()

    assert (code, out) == (0, "ran\n")
    assert "--preload no_such_module: No module named" in err


def test_one_that_is_not_wanted_ends_without_a_word(tmp_path):
    rank = Rank(tmp_path, script(tmp_path, "print('ran')"))
    rank.channel.close()

    assert rank.process.communicate(timeout=WAIT_S_MAX) == ("", "")
    assert rank.process.returncode == 0


def test_it_dies_with_its_launcher(tmp_path):
    """The launcher is a process between: killed, it takes its rank along."""
    between = textwrap.dedent(
        f"""
        import json, os, socket, subprocess, sys
        ours, theirs = socket.socketpair()
        order = dict(parent=os.getpid(), descriptor=theirs.fileno(), preload=[], module=False)
        rank = subprocess.Popen(
            [sys.executable, {str(PROGRAM)!r}, json.dumps(order), "train.py"],
            pass_fds=(theirs.fileno(),), start_new_session=True,
        )
        told = dict(environ={{}}, failure_file="x", files={{}})
        ours.sendall(json.dumps(told).encode() + b"\\n")
        rank.wait()
        """
    )
    script(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    launcher = subprocess.Popen(
        [sys.executable, "-c", between], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    pid = int(launcher.stdout.readline())
    watched = os.pidfd_open(pid)

    launcher.kill()
    launcher.wait()
    launcher.stdout.close()

    assert select.select([watched], [], [], WAIT_S_MAX)[0], "it lives on"
    os.close(watched)
