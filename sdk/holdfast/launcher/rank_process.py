"""A rank from its first instruction to its script: waits if it is a standby, then becomes it.

Run by its file name as ``python -u rank_process.py ORDER SCRIPT ...``. It imports what it was told
to, starts no thread, waits for one line on a socket, and runs the script as ``python SCRIPT`` does,
so that this sees no difference. It dies with its launcher.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.pop(0)  # the folder of this file, which no script has there

import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import runpy
import select
import signal
import time
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
REASON_LENGTH_MAX = 500
DETAIL_LENGTH_MAX = 6000


def main(argv: Sequence[str]) -> None:
    """Become the rank that the launcher orders; ``argv``: the order as JSON, then the command."""
    order: dict[str, Any] = json.loads(argv[0])
    _die_with(order["parent"])
    _prepare(order)
    _say_warm(order["descriptor"])
    line = _next_line(order["descriptor"])
    if not line:
        sys.exit(0)
    told: dict[str, Any] = json.loads(line)
    os.environ.update(told["environ"])
    for number, path in told["files"].items():
        _redirect(int(number), path)
    command = list(argv[1:])
    sys.orig_argv = [sys.executable, "-u", *(["-m"] if order["module"] else []), *command]
    if auto := order.get("auto"):
        importlib.import_module("holdfast.auto").install(**auto)
    _become(command, told["failure_file"], module=order["module"])


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its launcher ends, however that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _prepare(order: dict[str, Any]) -> None:
    """Import what was ordered, one after the other, until this process is told what to be."""
    gc.disable()  # imports make no garbage, and to look for it takes a fifth of their time
    try:
        _preload_all(order)
    finally:
        _count_as_old()
        gc.enable()
    if order.get("warm_cuda") and not _is_told(order["descriptor"]):
        _warm_cuda()


def _count_as_old() -> None:
    """Have the collector take all that is there for old, and leave frozen what Python froze."""
    if gc.get_freeze_count():  # 3.12 begins with some: the search, which a standby has time for
        gc.collect(1)
    else:
        gc.freeze()
        gc.unfreeze()


def _preload_all(order: dict[str, Any]) -> None:
    for name in order["preload"]:
        if _is_told(order["descriptor"]):
            return
        try:
            _preload(name)
        except Exception:
            if not _is_told(order["descriptor"]):
                raise
            traceback.print_exc()  # a rank by now: its script may do without


def _say_warm(descriptor: int) -> None:
    """Tell the launcher that a rank of this process would begin at once."""
    with contextlib.suppress(OSError):  # it was told what to be, and nobody listens any more
        os.write(descriptor, b"w")


def _is_told(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def _warm_cuda() -> None:
    """Make the context of the GPU that a rank of this number takes, and say if it cannot be."""
    try:
        torch = importlib.import_module("torch")
        count = torch.cuda.device_count()
        if not count:
            raise RuntimeError(f"torch {torch.__version__} sees no GPU")  # noqa: TRY301 - said below
        with torch.cuda.device(int(os.environ["LOCAL_RANK"]) % count):  # the current one stays
            torch.cuda.synchronize()
    except (ImportError, RuntimeError) as error:
        sys.stderr.write(f"holdfast run: --warm-cuda: {error}; standbys do without\n")


def _preload(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if error.name != "torch":  # who has none does without
            sys.stderr.write(f"holdfast run: --preload {name}: {error}\n")


def _next_line(descriptor: int) -> bytes:
    """Return what the launcher sends, empty: it wants no rank any more."""
    with os.fdopen(descriptor, "rb") as channel:
        try:
            return channel.readline()
        except ConnectionResetError:  # it has closed, and not heard that this process is warm
            return b""


def _redirect(number: int, path: str) -> None:
    """Send a stream to a file; where that cannot be, it stays as it is."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        sys.stderr.write(f"holdfast run: {path} cannot be written: {error.strerror}\n")
        return
    os.dup2(file, number)
    os.close(file)


def _become(command: list[str], failure_file: str, *, module: bool) -> None:
    me = os.getpid()
    ours = sys.modules["__main__"]  # kept: what runs here are its functions
    try:
        if module:
            _run_module(command)
        else:
            _run_script(command)
    except SystemExit as error:
        if os.getpid() == me and _is_failure(error):
            _note_exit(error, failure_file)
        raise
    except BaseException as error:
        shown = _without_ours(error.__traceback__)
        error.__traceback__ = shown
        if os.getpid() == me:
            _note(error, failure_file)
        sys.excepthook(type(error), error, shown)
        sys.excepthook = lambda *_: None
        raise
    finally:
        del ours


def _run_script(command: list[str]) -> None:
    path = command[0]
    sys.argv = command
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(path).resolve().parent))
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(
        __file__=str(Path(path).absolute()),
        __builtins__=builtins,
        __cached__=None,
        __annotations__={},
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
    )
    sys.modules["__main__"] = main_module
    code = compile(Path(path).read_bytes(), str(Path(path).absolute()), "exec", dont_inherit=True)
    exec(code, main_module.__dict__)  # noqa: S102 - it is what the user runs


def _run_module(command: list[str]) -> None:
    sys.argv = command
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd()))
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__dict__.update(__builtins__=builtins, __annotations__={})
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # noqa: SLF001 - what -m calls
    run(command[0])


def _without_ours(shown: types.TracebackType | None) -> types.TracebackType | None:
    while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
        shown = shown.tb_next
    return shown


def _is_failure(error: SystemExit) -> bool:
    return not (error.code is None or (isinstance(error.code, int) and error.code == 0))


def _note_exit(error: SystemExit, failure_file: str) -> None:
    """Leave word of an exit with an error, also for who closes something as this process ends."""
    if ending := sys.modules.get("holdfast.training.ending"):
        vars(ending)["exited_with_error"] = ending.is_error(error.code)
    facts: dict[str, object] = {"kind": "SystemExit"}
    with contextlib.suppress(Exception):  # what it says is an object of the script's
        if not isinstance(error.code, int):
            said = " ".join(str(error.code).split())
            facts["reason"] = f"exit with an error: {said}"[:REASON_LENGTH_MAX]
    with contextlib.suppress(OSError):
        Path(failure_file).write_text(json.dumps(facts), encoding="utf-8")


def _note(error: BaseException, failure_file: str) -> None:
    """Leave word of an exception for the launcher, and torchrun's file unless there is one."""
    shown = traceback.TracebackException(type(error), error, None)
    shown.__notes__ = None  # they would come last
    lines = list(shown.format_exception_only())
    detail = "".join(traceback.format_exception(error))
    facts = {
        "reason": lines[-1].strip()[:REASON_LENGTH_MAX],
        "detail": detail[-DETAIL_LENGTH_MAX:],
        "kind": type(error).__name__,
    }
    with contextlib.suppress(OSError):
        Path(failure_file).write_text(json.dumps(facts), encoding="utf-8")
        path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        if path and not Path(path).exists():
            more = {"py_callstack": detail, "timestamp": str(int(time.time()))}
            message = {"message": {"message": facts["reason"], "extraInfo": more}}
            Path(path).write_text(json.dumps(message), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
