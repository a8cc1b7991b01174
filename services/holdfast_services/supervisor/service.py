"""The shell around ``domain``: processes, pipes, probes and the clock.

Children die with this process, however it dies (PR_SET_PDEATHSIG), and do not hear the
terminal's Ctrl-C: this process stops them in order.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence

from holdfast.errors import CheckpointError, UnavailableError
from holdfast_services.supervisor.children import Spec
from holdfast_services.supervisor.domain import restarts
from holdfast_services.supervisor.domain.restarts import SupervisorEvent

TICK_S = 0.2
PROBE_PAUSE_S = 0.05
DRAIN_S_MAX = 0.5
EVENTS_MAX = 1024
LINE_BYTES_MAX = 64 << 10

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl

log = logging.getLogger("holdfast.supervisor")


class Supervisor:
    """Keeps the children of one stack running until it is told to stop.

    Args:
        specs: The children, metadata first.
        idle_exit_s: End after so long without a trainer; 0 means never.
        needs: Counts what needs the stack: live trainers, or what is not in the store yet. Only
            called when ``idle_exit_s`` is set, in a thread.
        publish: Called once, when all that training needs serves.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        *,
        idle_exit_s: float,
        needs: Callable[[], int],
        publish: Callable[[], None],
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._idle_exit_s = idle_exit_s
        self._needs = needs
        self._publish = publish
        self._published = False
        self._events: asyncio.Queue[SupervisorEvent] = asyncio.Queue(EVENTS_MAX)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._lives: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Run until ``stop`` is set or the stack is not needed; then end all children.

        Raises:
            UnavailableError: a child kept dying before the stack was ready.
        """
        loop = asyncio.get_running_loop()
        others = tuple(name for name in self._specs if name != restarts.METADATA)
        stack = restarts.new_stack(others, idle_exit_s=self._idle_exit_s, now_s=loop.time())
        event: SupervisorEvent = restarts.Tick()
        while True:
            stack, actions = restarts.handle(stack, event, loop.time())
            for action in actions:
                self._perform(action)
            if restarts.ended(stack):
                break
            event = await self._next(stop, stopping=stack.stopping)
        if self._lives:
            await asyncio.wait(self._lives, timeout=DRAIN_S_MAX)
        if stack.failure:
            raise UnavailableError(stack.failure)

    async def _next(self, stop: asyncio.Event, *, stopping: bool) -> SupervisorEvent:
        if stop.is_set() and not stopping:
            return restarts.StopAsked("asked to")
        try:
            async with asyncio.timeout(TICK_S):
                return await self._events.get()
        except TimeoutError:
            return restarts.Tick(await asyncio.to_thread(self._needs) if self._idle_exit_s else 0)

    def _perform(self, action: restarts.Action) -> None:
        match action:
            case restarts.Start(name):
                life = asyncio.create_task(self._live(self._specs[name]), name=name)
                self._lives.add(life)
                life.add_done_callback(self._lives.discard)
            case restarts.Terminate(name):
                self._signal(name, self._specs[name].stop_signal)
            case restarts.Kill(name):
                self._signal(name, signal.SIGKILL)
            case restarts.Publish():
                self._published = True
                self._publish()
            case restarts.Say(message, warning):
                log.log(logging.WARNING if warning else logging.INFO, "%s", message)

    def _signal(self, name: str, number: int) -> None:
        process = self._processes.get(name)
        if process is not None and process.returncode is None:
            process.send_signal(number)

    async def _live(self, spec: Spec) -> None:
        """One life of one child, from its start to its ``Exited``."""
        _forget_readiness(spec)
        try:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                env=dict(spec.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_dying_with(os.getpid()),
            )
        except OSError as error:
            log.warning("cannot start %s: %s", spec.name, error)
            await self._events.put(restarts.Exited(spec.name, 127))
            return
        log.info("started %s, pid %d", spec.name, process.pid)
        self._processes[spec.name] = process
        probe = asyncio.create_task(self._probe(spec))
        output = asyncio.create_task(_copy_output(spec.name, process.stdout))
        code = await process.wait()
        probe.cancel()
        _forget_readiness(spec)
        await asyncio.wait({output}, timeout=DRAIN_S_MAX)
        output.cancel()
        await self._events.put(restarts.Exited(spec.name, code))

    async def _probe(self, spec: Spec) -> None:
        """Ask until the child serves; the domain owns the deadline."""
        while True:
            try:
                await spec.probe(not self._published)
            except CheckpointError:
                await asyncio.sleep(PROBE_PAUSE_S)
            else:
                await self._events.put(restarts.Answered(spec.name))
                return


def _forget_readiness(spec: Spec) -> None:
    """Delete the previous process's ready file."""
    if spec.ready_file is not None:
        spec.ready_file.unlink(missing_ok=True)


async def _copy_output(name: str, stream: asyncio.StreamReader | None) -> None:
    child_log = logging.getLogger(f"child.{name}")
    async for line in _lines(stream):
        child_log.info("%s", line.decode(errors="replace"))


async def _lines(stream: asyncio.StreamReader | None) -> AsyncIterator[bytes]:
    """Yield lines; one longer than ``LINE_BYTES_MAX`` comes in pieces."""
    rest = b""
    while stream and (data := await stream.read(LINE_BYTES_MAX)):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line
        if len(rest) >= LINE_BYTES_MAX:
            yield rest
            rest = b""
    if rest:
        yield rest


def _dying_with(parent_pid: int) -> Callable[[], None]:
    """Return what a fresh child does first: ask to be killed when its parent dies."""

    def ask() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:  # it died before we could ask
            os._exit(1)

    return ask
