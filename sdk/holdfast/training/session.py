"""One rank's conversation with the agent of its node.

Owns the channel, the session's lock file and the two rpc threads: *watch* (a long poll that
keeps ``view`` current) and *update* (sends what the rank has to say). The training thread only
calls ``report`` and ``post``, which set fields and return; it never waits for an answer.

An agent that restarted knows nothing of the session (NotFoundError): it is opened and its slots
reserved again, under the same session id and nonce, which every party treats as a repeat. A
catalogue that was lost knows nothing of the attempt (``forgotten``): the session is opened again.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from holdfast import locks
from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.attempts import AttemptSpec, Seat
from holdfast.core.budget import MemoryWish, Reservation
from holdfast.core.ids import CheckpointId, run_id
from holdfast.core.needs import Head, Needs
from holdfast.core.reports import RankReport, StepNote
from holdfast.core.retry import Waits
from holdfast.core.session import SessionView
from holdfast.core.text import tellable
from holdfast.core.user_events import Event
from holdfast.errors import (
    AccessError,
    CheckpointError,
    NotFoundError,
    OutcomeUnknownError,
    StaleGenerationError,
    UnavailableError,
)
from holdfast.logs import steady_logger
from holdfast.rpc.channel import call, is_served, sync_channel, unix_target
from holdfast.rpc.codec import from_message, to_message
from holdfast.training.headers import Headers
from holdfast.training.outbox import Outbox
from holdfast.v1 import agent_pb2 as pb
from holdfast.v1 import common_pb2
from holdfast.v1.agent_pb2_grpc import AgentStub

CALL_S_MAX = 10.0
HEADS_S_MAX = 30.0
REGISTER_S_MIN = 1.0
"""Between two registrations of a rank that is told it has no seat: views may change often."""
RESERVE_AGAIN_S = 5.0
"""Between two tries to have slots of an agent that came back and had no room for them."""
WATCH_S = 10.0
RETRY_S = 0.2
SOCKET_POLL_S = 0.02
SEAT_WAITS = Waits(first_s=RETRY_S, wait_s_max=5.0, factor=1.5)
"""They less than double: a job that begins hears soon that its catalogue is back."""
PROGRESS_S = 0.1

log = steady_logger(__name__)

T = TypeVar("T")


class AgentSession:
    """One rank's session with its agent. Made per process; a forked child must not use it."""

    def __init__(self, path: Path) -> None:
        self.id = secrets.token_hex(16)
        self.view = SessionView(version="")
        self.lost_agent: str = ""
        self._channel = sync_channel(unix_target(path))
        self._stub = AgentStub(self._channel)
        self._socket = path
        self._spec: AttemptSpec | None = None
        self._seat: Seat | None = None
        self._arena: Path | None = None
        self._reservation: Reservation | None = None
        self._unreserved = False
        self._reserve_after_s = 0.0
        self._lock_descriptor = -1
        self._outbox = Outbox()
        self.needs_of_all = False
        self.headers = Headers(self.heads)
        self._guard = threading.Lock()
        self._opening = threading.Lock()
        self._taking = threading.Lock()
        self._reserving = threading.Lock()
        self._register_after_s = 0.0
        self._reopened = threading.Event()
        self._changed = threading.Condition()
        self._unsent = False
        self._urgent = threading.Event()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def describe(self, timeout_s: float, job: str, wish: MemoryWish) -> pb.DescribeResponse:
        """Return name, arena and budget of the node, and why ``job`` does not fit there, if so.

        Raises:
            UnavailableError: nobody answers on the socket within ``timeout_s``.
        """

        def ask() -> pb.DescribeResponse:
            return call(self._stub.Describe, request, timeout_s=timeout_s)

        request = pb.DescribeRequest(job=job, wish=to_message(wish, pb.MemoryWish))
        there = "exists, but no agent answers on it" if self._socket.exists() else "does not exist"
        return self._patiently(
            ask,
            timeout_s=timeout_s,
            waiting=f"waiting for the node's agent on {self._socket}",
            failing=f"no agent answers: socket {self._socket} {there}; start one (holdfast up), or "
            f"set HOLDFAST_AGENT to the socket of the agent that runs (holdfast status)",
        )

    def open(self, spec: AttemptSpec, arena: Path, *, timeout_s: float) -> Seat:
        """Register this rank; tries again while the agent or the catalogue is unreachable.

        Raises:
            AlreadyExistsError: another launch trains this job now; the message names it.
            UnavailableError: not reachable within ``timeout_s``.
        """
        self._spec = spec
        return self._patiently(
            lambda: self._open(arena),
            timeout_s=timeout_s,
            waiting=f"job {spec.job}: waiting for the metadata service",
            failing=f"job {spec.job}: the metadata service gave no answer for {timeout_s:.0f} "
            f"s; check "
            f"it, the object store and the agent with holdfast doctor",
        )

    def start(self, on_view: Callable[[SessionView], None]) -> None:
        """Start the rpc threads; ``on_view`` runs on one of them at a time, for each new view."""
        self.spawn("watch", lambda: self._watch(on_view))
        self.spawn("update", self._update)

    def reserve(self, reservation: Reservation) -> bool:
        """Have the agent make the slots of a plan; leases follow in the view.

        Returns:
            Whether the agent still touches memory of slots.

        Raises:
            ExhaustedError: they do not fit the node's budget; the sum is in the message.
        """
        self._reservation = reservation
        try:
            return self._reserve()
        except NotFoundError:
            return self._reopen()

    def report(self, change: Callable[[RankReport], RankReport]) -> None:
        """Change what this rank says of itself and return; the update thread sends it.

        ``change`` makes the new report of the old one, such as ``lambda r: replace(r, step=3)``.
        """
        with self._guard:
            before = self._outbox.report
            now = self._outbox.report = change(before)
            self._unsent = True
        if now.wants_save or now.loaded > before.loaded:
            self._urgent.set()

    def post(
        self,
        *,
        wants_slot: int | None = None,
        saving: tuple[int, ...] | None = None,
        sealed_before: int | None = None,
        note: StepNote | None = None,
        abandoned: AbandonedStep | None = None,
        closed_slot: str | None = None,
        event: Event | None = None,
    ) -> None:
        """Queue what the agent should know and return; the update thread sends it."""
        box = self._outbox
        with self._guard:
            box.wants_slot = box.wants_slot if wants_slot is None else wants_slot
            if saving is not None:
                box.saving = saving
            box.sealed_before = max(box.sealed_before, sealed_before or 0)
            if note is not None:
                box.notes.append(note)
            if abandoned is not None:
                box.abandoned.append(replace(abandoned, reason=tellable(abandoned.reason)))
            if closed_slot is not None:
                box.closed_slots.append(closed_slot)
            if event is not None:
                box.events.append(replace(event, message=tellable(event.message)))
            self._unsent = True
        if wants_slot or note or abandoned or closed_slot or event:
            self._urgent.set()

    @property
    def spec(self) -> AttemptSpec:
        """What this rank has said of the attempt that it takes part in."""
        assert self._spec is not None
        return self._spec

    @property
    def needs(self) -> Needs | None:
        """The needs that this rank has named last; None: it has named none yet."""
        return self._outbox.needs

    def name(self, needs: Needs, *, of_all: bool = False) -> None:
        """Say what of a checkpoint this rank needs; it counts until something else is named.

        ``of_all``, kept as ``needs_of_all``: what any group of ranks has of it is named.
        """
        with self._guard:
            self._outbox.needs = needs
            self.needs_of_all = of_all
            self._unsent = True
        self._urgent.set()

    def heads(self, checkpoint: CheckpointId, ranks: Collection[int]) -> tuple[Head, ...]:
        """Return the heads of the segments of ``ranks``, of those that are found soon.

        Raises:
            CheckpointError: the agent does not answer.
        """
        asked = pb.HeadsRequest(
            job=self.spec.job, checkpoint=to_message(checkpoint, common_pb2.CheckpointId),
            ranks=sorted(ranks),
        )  # fmt: skip
        answer = call(self._stub.FindHeads, asked, timeout_s=HEADS_S_MAX)
        return tuple(from_message(head, Head) for head in answer.heads)

    @property
    def generation(self) -> int:
        """The attempt's number, as this rank was answered when it registered."""
        assert self._seat is not None
        return self._seat.generation

    def begun(self, restored: CheckpointId | None) -> None:
        """Say that training begins: with ``restored`` loaded, None: at step 0."""
        assert self._spec is not None
        self.headers.forget()
        self._spec = replace(self._spec, generation=self.generation, restored=restored)
        self.report(lambda report: replace(report, loaded=True))

    def wait_view(
        self, accept: Callable[[SessionView], bool], *, timeout_s: float
    ) -> SessionView | None:
        """Return the first view that ``accept`` takes, or None after ``timeout_s``."""
        with self._changed:
            if self._changed.wait_for(lambda: accept(self.view), timeout_s):
                return self.view
        return None

    def close(self, *, timeout_s: float) -> None:
        """Send what is left, end the session and the threads; bounded by ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        self._stopping.set()
        self._urgent.set()
        updating = [thread for thread in self._threads if thread.name.endswith("update")]
        for thread in updating:
            thread.join(max(0.0, deadline - time.monotonic()))
        try:
            request = pb.CloseSessionRequest(session=self.id)
            left_s = max(0.1, deadline - time.monotonic())
            call(self._stub.CloseSession, request, timeout_s=min(left_s, CALL_S_MAX))
        except CheckpointError as error:
            log.info("session %s ended, but its agent was not told: %s", self.id, error)
        self._channel.close()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

    @staticmethod
    def _patiently(ask: Callable[[], T], *, timeout_s: float, waiting: str, failing: str) -> T:
        """Return what ``ask`` returns, trying again while the other side is out of reach.

        Raises:
            UnavailableError: ``failing`` and the last reason, after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        tries, said = 0, ""
        while True:
            try:
                return ask()
            except (UnavailableError, OutcomeUnknownError) as error:
                left_s = deadline - time.monotonic()
                if left_s < RETRY_S:
                    raise UnavailableError(f"{failing} ({error.message})") from error
                if error.message != said:
                    log.warning("%s, at most %.0f s: %s", waiting, left_s, error.message)
                    said = error.message
            tries += 1
            time.sleep(min(SEAT_WAITS.wait_s(tries), left_s))

    def _open(self, arena: Path) -> Seat:
        assert self._spec is not None
        self._hold_lock(arena / "sessions" / self.id)
        request = pb.OpenSessionRequest(
            session=self.id, spec=to_message(self._spec, common_pb2.AttemptSpec)
        )
        job = self._spec.job
        response = call(self._stub.OpenSession, request, timeout_s=CALL_S_MAX, job=job)
        seat = from_message(response.seat, Seat)
        run_id(seat.run)
        before = self._seat
        if before and (before.run, before.generation) != (seat.run, seat.generation):
            raise StaleGenerationError(
                f"the catalogue was lost and has given this attempt a new number, "
                f"{seat.generation}: "
                f"start the job again"
            )
        self._seat, self._arena = seat, Path(response.arena)
        return seat

    def _hold_lock(self, path: Path) -> None:
        """Hold the record lock by which the agent knows that this process lives."""
        if self._lock_descriptor >= 0 and path.exists():
            return
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError as cause:
            raise UnavailableError(
                f"the agent's shared memory {path.parent.parent} does not exist any more: restart "
                f"the agent"
            ) from cause
        except PermissionError as cause:
            raise AccessError(
                f"the agent's shared memory belongs to another user; run agent and training as the "
                f"same user: {cause}"
            ) from cause
        taken = locks.take(descriptor)
        assert taken, "a file that was just made is nobody else's"
        previous, self._lock_descriptor = self._lock_descriptor, descriptor
        if previous >= 0:
            os.close(previous)

    def spawn(self, name: str, target: Callable[[], None]) -> None:
        """Run ``target`` on an rpc thread of that name, which ``close`` waits for."""
        thread = threading.Thread(target=target, name=f"holdfast-rpc-{name}", daemon=True)
        thread.start()  # Ctrl-C may end it here: what has not quite started cannot be waited for
        self._threads = [other for other in self._threads if other.is_alive()] + [thread]

    def _reserve(self) -> bool:
        """Ask for the slots of the newest plan: one call at a time, so that it is heard last."""
        with self._reserving:
            asked = self._reservation
            assert asked is not None, "a plan has been made"
            request = to_message(asked, pb.ReserveRequest)
            request.session = self.id
            response = call(self._stub.Reserve, request, timeout_s=CALL_S_MAX)
            self._unreserved = False
        return bool(response.making)

    def _reopen(self) -> bool:
        """Introduce this session to an agent that has forgotten it; return as ``reserve`` does."""
        with self._opening:
            node = call(self._stub.Describe, pb.DescribeRequest(), timeout_s=CALL_S_MAX)
            self._open(Path(node.arena))
        self._reopened.set()
        self._unsent = True  # the agent knows no level of ours any more
        if self._reservation is None:
            return False
        self._unreserved = True
        return self._reserve()

    def _reserve_again(self) -> None:
        """Ask once more for what an agent refused when it came back; beside the watch."""
        with suppress(CheckpointError):  # said when it was refused first
            self._reserve()

    def _watch(self, on_view: Callable[[SessionView], None]) -> None:
        while not self._stopping.is_set() and not self.view.fenced:
            if self._reopened.is_set():
                # Another agent: its views have numbers of their own, its slots are other files.
                self._reopened.clear()
                self._take(replace(self.view, version="", leases=()), on_view)
            request = pb.SessionWatchRequest(
                session=self.id, version=self.view.version, wait_s=WATCH_S
            )
            try:
                response = call(self._stub.Watch, request, timeout_s=WATCH_S + CALL_S_MAX)
                view = from_message(response, SessionView)
            except CheckpointError as error:
                self._recover(error, on_view)
                continue
            self.lost_agent = ""
            if self._unreserved and time.monotonic() >= self._reserve_after_s:
                self._reserve_after_s = time.monotonic() + RESERVE_AGAIN_S
                self.spawn("reserve", self._reserve_again)
            if view.version != self.view.version:
                self._take(view, on_view)
            if view.forgotten and time.monotonic() >= self._register_after_s:
                self._register_after_s = time.monotonic() + REGISTER_S_MIN
                self.spawn("register", lambda: self._register_again(on_view))

    def _register_again(self, on_view: Callable[[SessionView], None]) -> None:
        """Tell a catalogue that was lost of this attempt; what fails is tried at the next watch.

        Beside the watch: a catalogue that does not answer then would keep slots from this rank.
        """
        if not self._opening.acquire(blocking=False):
            return
        assert self._arena is not None
        try:
            self._open(self._arena)
        except StaleGenerationError:
            self._fence(on_view)
        except CheckpointError as error:
            log.warning(
                "the catalogue was lost and cannot register this attempt again yet: %s", error
            )
        finally:
            self._opening.release()

    def _fence(self, on_view: Callable[[SessionView], None]) -> None:
        """Take that this attempt was replaced, as if told by a view."""
        self._take(replace(self.view, fenced=True, leases=()), on_view)

    def _take(self, view: SessionView, on_view: Callable[[SessionView], None]) -> None:
        with self._taking:
            if self.view.fenced:
                return
            try:
                on_view(view)
            except Exception:  # without this thread there would be no slot any more
                log.exception("a message of the agent could not be handled; it is asked for again")
                self._stopping.wait(RETRY_S)
                return
            with self._changed:
                self.view = view
                self._changed.notify_all()

    def _recover(self, error: CheckpointError, on_view: Callable[[SessionView], None]) -> None:
        """After a failed watch: open again if forgotten, else wait before the next try."""
        if self._stopping.is_set():
            return
        if isinstance(error, NotFoundError):
            try:
                self._reopen()
            except StaleGenerationError:
                self._fence(on_view)
                return
            except CheckpointError as again:
                error = again
            else:
                return
        if not self.lost_agent:
            log.warning(
                "the node's agent does not answer; training goes on, but nothing is saved "
                "until the agent "
                "is back (holdfast doctor): %s",
                error,
            )
        self.lost_agent = str(error)
        if is_served(self._socket, SOCKET_POLL_S):
            self._stopping.wait(RETRY_S)
            return
        while not is_served(self._socket, SOCKET_POLL_S):
            if self._stopping.wait(SOCKET_POLL_S):
                return
        # The agent is back. The old channel would let its own backoff pass before it looks.
        before, self._channel = self._channel, sync_channel(unix_target(self._socket))
        self._stub = AgentStub(self._channel)
        before.close()

    def _update(self) -> None:
        stopping = False
        while not stopping:
            # Progress waits for the next look, so that a step wakes no thread; the rest goes now.
            self._urgent.wait(PROGRESS_S)
            self._urgent.clear()
            stopping = self._stopping.is_set()
            if not self._unsent:
                continue
            self._unsent = False
            if not self._send() and not self.view.fenced:
                self._stopping.wait(RETRY_S)
                self._unsent = True

    def _send(self) -> bool:
        with self._guard:
            update = self._outbox.message(self.id)
        try:
            call(self._stub.Update, to_message(update, pb.UpdateRequest), timeout_s=CALL_S_MAX)
        except CheckpointError as error:
            log.debug("update not delivered: %s", error)
            return False
        with self._guard:
            self._outbox.delivered(update)
        return True
