"""An executor: does what orders say, tells what becomes of its launchers, lets them live on.

One loop on the main thread waits for orders, signals, and ends of launchers by their pidfds.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.core.executions import ExecutorReport, Orders
from holdfast.core.meshes import MESH, MESHES
from holdfast.errors import AlreadyExistsError, CheckpointError
from holdfast.executor import identity
from holdfast.executor.conversation import Conversation
from holdfast.executor.decision import Forget, Kill, Start, Stop, decide, kill_at_s
from holdfast.executor.holder import HolderGone
from holdfast.executor.launchers import Launchers
from holdfast.launcher.notices import NoticeWatch, Source

EXIT_SIGNAL = 128
READY_FILE = "HOLDFAST_READY_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an executor is asked for: ``gpus`` of its node, of which type, in which folder.

    ``holder``: its jobs end when it gives notice.
    """

    scheduler: str
    node: str
    folder: Path
    gpus: int
    gpu_type: str = ""
    spot: bool = False
    notices: tuple[Source, ...] = ()
    holder: HolderGone | None = None


def for_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what launchers inherit: nothing that is said to this executor, nor meshes of no job.

    >>> for_launchers({"HOME": "/root", "HOLDFAST_MESHES": "dp=2", "HOLDFAST_READY_FILE": "x"})
    {'HOME': '/root'}
    """
    return {k: v for k, v in environ.items() if k not in (READY_FILE, MESH, MESHES)}


@dataclass(frozen=True, slots=True)
class _LetGo:
    """Nobody has this executor run any more."""

    reason: str


class Executor:
    """Runs from ``run`` until a signal: SIGTERM leaves launchers running, SIGINT ends them first.

    Args:
        options: What it offers, and to whom.
        environ: What launchers inherit.
    """

    def __init__(self, options: Options, environ: Mapping[str, str]) -> None:
        self._options = options
        self._environ = environ
        self._orders: Orders | None = None
        self._news: deque[Orders | CheckpointError | int | str | _LetGo] = deque()
        self._code: int | None = None
        self._ending = False
        self._said = ""
        self._leaving = ""
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Return the exit code.

        Raises:
            AlreadyExistsError: another executor has the folder, or the node.
        """
        options = self._options
        me = identity.take(options.folder)
        with ExitStack() as stack:
            self._wake_up(stack)
            inherited = for_launchers(self._environ)
            self._launchers = Launchers(options.folder, inherited)
            stack.callback(self._launchers.close)
            report = ExecutorReport(
                executor=me.executor,
                sequence=me.first_sequence,
                gpus=options.gpus,
                gpu_type=options.gpu_type,
                spot=options.spot,
                launches=self._launchers.states,
            )
            self._conversation = Conversation(
                options.scheduler, options.node, report, self._hear, self._hear
            )
            self._conversation.start()
            stack.callback(self._conversation.leave)
            stack.callback(NoticeWatch(options.notices, self._hear, self._tell).close)
            held = () if options.holder is None else (options.holder,)
            stack.callback(NoticeWatch(held, self._let_go, self._tell).close)
            adopted = sum(known.alive for known in self._launchers.known.values())
            self._tell(f"node {options.node}: {options.gpus} GPUs, {adopted} launchers adopted")
            while self._code is None:
                self._turn()
            return self._code

    def _wake_up(self, stack: ExitStack) -> None:
        """Have orders and signals end the wait of the loop."""
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        stack.callback(os.close, self._waker)
        stack.callback(os.close, self._woken)
        self._selector.register(self._woken, selectors.EVENT_READ)
        stack.callback(self._selector.close)
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, lambda number, _: self._news.append(number))
            stack.callback(signal.signal, number, before)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._waker))

    def _let_go(self, reason: str) -> None:
        self._hear(_LetGo(reason))

    def _hear(self, news: Orders | CheckpointError | str | _LetGo) -> None:
        self._news.append(news)
        with suppress(OSError):  # it is awake already, or has ended
            os.write(self._waker, b"\0")

    def _turn(self) -> None:
        """Wait for something, and do what follows."""
        for key, _ in self._selector.select(self._timeout_s()):
            if key.fd == self._woken:
                with suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            else:
                self._selector.unregister(key.fd)
                self._launchers.note_ended(key.data)
        while self._news:
            self._take_in(self._news.popleft())
        self._carry_out()

    def _timeout_s(self) -> float | None:
        known = self._launchers.known.values()
        waits = [kill_at_s(one) for one in known if one.alive and one.stopped_at_s]
        return max(0.0, min(waits) - time.monotonic()) if waits else None

    def _take_in(self, news: Orders | CheckpointError | int | str | _LetGo) -> None:
        if isinstance(news, int):
            self._signalled(news)
        elif isinstance(news, _LetGo):
            self._leaving = news.reason
            self._end_launchers(news.reason)
        elif isinstance(news, str):
            self._leaving = news
            self._tell(f"this node will be taken away: {news}")
        elif isinstance(news, Orders):
            if self._orders is None:
                self._say_ready()
            self._orders = news
            self._tell("the scheduler answers")
        elif isinstance(news, AlreadyExistsError) or news.retryable:
            self._tell(f"waiting, what runs runs on: {news.message}")
        else:
            raise news

    def _say_ready(self) -> None:
        """Make the file that somebody waits for, if its variable is set, as services do."""
        if path := self._environ.get(READY_FILE):
            Path(path).write_text(json.dumps({"node": self._options.node}), encoding="utf-8")

    def _signalled(self, number: int) -> None:
        if number == signal.SIGTERM or self._ending:
            self._code = EXIT_SIGNAL + number
            return
        self._end_launchers("once more ends without them")

    def _end_launchers(self, more: str) -> None:
        self._ending = True
        self._tell(f"launchers are told to save and to end; {more}")

    def _carry_out(self) -> None:
        if self._ending:
            self._orders = Orders()
        for action in list(decide(self._orders, self._launchers.known, time.monotonic())):
            match action:
                case Start(order):
                    self._tell(f"starting {order.job}, start {order.start}, {order.gpus} ranks")
                    self._launchers.start(order)
                case Stop(key):
                    self._tell(f"ending {key[0]}, start {key[1]}")
                    self._launchers.stop(key)
                case Kill(key):
                    self._launchers.kill(key)
                case Forget(key):
                    self._launchers.forget(key)
        self._watch()
        applied = self._orders.number if self._orders is not None else 0
        self._conversation.say(
            lambda report: replace(
                report,
                applied=applied,
                launches=self._launchers.states,
                leaving=self._leaving,
            )
        )
        if self._ending and not any(one.alive for one in self._launchers.known.values()):
            self._code = EXIT_SIGNAL + signal.SIGINT

    def _watch(self) -> None:
        watched = self._selector.get_map()
        for descriptor, key in self._launchers.pidfds.items():
            if descriptor not in watched:
                self._selector.register(descriptor, selectors.EVENT_READ, key)

    def _tell(self, text: str) -> None:
        """Tell people once."""
        if text != self._said:
            self._said = text
            print(f"holdfast execute: {text}", file=sys.stderr, flush=True)  # noqa: T201
