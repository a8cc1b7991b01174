"""A launcher: does what the view says, tells what becomes of its ranks, ends when the launch does.

One loop on the main thread waits for three things at once: views, signals, and ends of processes by
their pidfds. Nothing is polled.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

from holdfast.core.executions import LastWord, Outcome
from holdfast.core.rounds import NOTICE_S_MAX, LauncherReport, LaunchView, Place, RankFailure
from holdfast.errors import AlreadyExistsError, CheckpointError, InvalidRequestError
from holdfast.launcher import environment, failures
from holdfast.launcher.conversation import Conversation, new_launcher_id
from holdfast.launcher.ending import of_launch
from holdfast.launcher.going import Going
from holdfast.launcher.notices import NoticeWatch, seconds_left
from holdfast.launcher.options import AUTO_PRELOADED, PRELOADED, Options
from holdfast.launcher.ports import HeldPort
from holdfast.launcher.ranks import STDERR, Command, Keeper, RankProcess, end

STANDBY_AFTER_S = 5.0
"""After ranks began: their own imports and first steps come first."""
REFUSED_S_MAX = 10.0
"""How long after a lease a node may have another launcher, or a job's name another launch, before
it is given up: one that was lost with its agent is missed by its lease only."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGINT, signal.SIGTERM)
"""Ranks listen to these and save; another one comes to them as SIGTERM."""


class Launcher:
    """Runs the ranks of this node from ``run`` until the launch has ended.

    Args:
        options: What to run.
        ranks: How many ranks this node has.
        agent: The socket of its agent.
        environ: What every rank inherits.
    """

    def __init__(
        self, options: Options, ranks: int, agent: Path, environ: Mapping[str, str]
    ) -> None:
        self._options = options
        self._ranks_count = ranks
        self._agent = agent
        self._environ = environment.own(environ)
        self._command = Command(
            words=(options.script, *options.arguments),
            module=options.module,
            redirects=options.redirects,
            tee=options.tee,
            auto=options.auto_arguments,
            warm_cuda=options.warm_cuda,
        )
        known = (*PRELOADED, *(AUTO_PRELOADED if options.auto else ()))
        self._preload = (*known, *options.preload) if options.standby else ()
        self._job = options.job_name
        self._view = LaunchView()
        self._place: Place | None = None
        self._ranks: dict[int, RankProcess] = {}
        self._standbys: dict[int, RankProcess] = {}
        self._standbys_from_s = 0.0
        self._warm: set[RankProcess] = set()
        self._failed = False
        self._finished = False
        self._stopped_by = 0
        self._signalled_by = 0
        self._killed_from_s = 0.0
        self._going: Going | None = None
        self._refused_since_s = 0.0
        self._unheard = False
        self._others_unheard = False
        self._last_word: LastWord | None = None
        self._said = ""
        self._news: deque[LaunchView | CheckpointError | int | str] = deque()
        self._selector = selectors.DefaultSelector()

    def run(self) -> LastWord:
        """Return how the launch has ended, and with which code.

        Raises:
            CheckpointError: the launcher was refused, and why.
        """
        with ExitStack() as stack:
            self._folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-run-"))
            )
            self._wake_up(stack)
            self._keeper = Keeper()
            self._selector.register(self._keeper.pidfd, selectors.EVENT_READ, self._keeper)
            stack.callback(self._keeper.close)
            self._port = stack.enter_context(closing(HeldPort()))
            self._round_port = self._port
            self._conversation = Conversation(
                self._agent, self._first_report(), self._hear, self._hear
            )
            self._conversation.start()
            stack.callback(NoticeWatch(self._options.notices, self._hear, self._tell).close)
            stack.callback(self._conversation.leave)
            stack.callback(self._end, self._standbys)
            stack.callback(self._end_ranks)
            self._prepare()  # imports take longer than to hear of the first round
            while self._last_word is None:
                self._turn()
            return self._last_word

    def _first_report(self) -> LauncherReport:
        return LauncherReport(
            launcher=new_launcher_id(),
            sequence=1,
            job=self._job,
            holder=f"{os.uname().nodename}:{os.getpid()}",
            terms=self._options.terms,
            ranks=self._ranks_count,
            port=self._port.number,
            warm=not self._preload,
            address=self._options.address,
        )

    def _wake_up(self, stack: ExitStack) -> None:
        """Have views and signals end the wait of the loop."""
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ)
        stack.callback(self._selector.close)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # by nohup, or a shell's ``&``
                before = signal.signal(number, lambda number, _: self._news.append(number))
                stack.callback(signal.signal, number, before)
        stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._waker))

    def _hear(self, news: LaunchView | CheckpointError | str) -> None:
        self._news.append(news)
        with suppress(BlockingIOError):  # it is awake already
            os.write(self._waker, b"\0")

    # -------------------------------------------------------------------------------- the loop

    def _turn(self) -> None:
        """Wait for something, and do what follows."""
        ended = []
        for key, _ in self._selector.select(self._timeout_s()):
            if key.fd == self._woken:
                with suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            elif key.data is self._keeper:
                self._renew_keeper()
            elif key.fd == key.data.pidfd:
                ended.append(key.data)
            else:
                self._note_warm(key.data)
        self._note_ended(ended)
        while self._news and self._last_word is None:
            news = self._news.popleft()
            if isinstance(news, int):
                self._signalled(news)
            elif isinstance(news, str):
                self._noticed(news)
            elif isinstance(news, CheckpointError):
                self._refused(news)
            else:
                self._refused_since_s, self._unheard = 0.0, False
                self._view = news
        if self._last_word is None:
            self._follow()

    def _timeout_s(self) -> float | None:
        now_s = time.monotonic()
        waits = [self._killed_from_s - now_s] if self._killed_from_s else []
        if self._missing_standbys():
            waits.append(self._standbys_from_s - now_s)
        if self._going and not self._stopped_by:
            waits.append(self._going.waits_s(self._view, now_s))
        return max(0.0, min(waits)) if waits else None

    def _follow(self) -> None:
        view, now_s = self._view, time.monotonic()
        going = self._going if not self._stopped_by and view.ending is None else None
        if going and going.is_to_end(view, self._place, now_s):
            self._signalled(signal.SIGTERM)
        if view.ending is not None:
            self._end_ranks()
            if view.ending.code:
                self._tell(f"the launch has failed: {view.ending.reason}")
            self._last_word = of_launch(view.ending)
        elif self._stopped_by or view.stop:
            self._follow_stop()
        else:
            self._follow_place(view.place)
            self._tell_waiting()
            self._prepare()

    def _follow_place(self, place: Place | None) -> None:
        if self._place is not None and (place is None or place.nonce != self._place.nonce):
            self._end_ranks()
        if place is not None and self._place is None:
            self._begin(place)
        elif self._view.port_taken == self._port.number:
            self._offer_port()

    def _follow_stop(self) -> None:
        """End when the ranks have, by themselves, or when their time is over."""
        if not self._stopped_by:
            self._tell("a node was told to end: ranks save, then the launch ends")
            self._stop(signal.SIGTERM)
        # With all told to end, who is done leaves, and the others save on.
        round_over = not self._view.stop and self._view.place != self._place
        if self._ranks and (round_over or time.monotonic() >= self._killed_from_s):
            self._end_ranks()
        if not self._ranks:
            asked = Outcome.STOPPED if self._signalled_by else Outcome.RELEASED
            code = 0 if self._finished else 128 + self._stopped_by
            self._last_word = LastWord(outcome=asked, code=code, reason="it was told to end")

    # ----------------------------------------------------------------------------- the ranks

    def _begin(self, place: Place) -> None:
        """Start the ranks of a round, and offer another port for the next."""
        self._place, self._failed, self._finished = place, False, False
        self._others_unheard = False
        self._ranks_count = place.ranks or self._ranks_count
        self._offer_port(round=place.nonce, finished=False, failure=None)
        if place.round > 1:
            self._tell(f"round {place.round} begins: {_counted(place)}")
        try:
            for local_rank in range(self._ranks_count):
                self._go(place, local_rank)
        except InvalidRequestError as error:
            self._fail(RankFailure(rank=place.first_rank, code=1, reason=error.message))
        except OSError as error:
            reason = f"cannot be started: {error.strerror}"
            self._fail(RankFailure(rank=place.first_rank, code=1, reason=reason, outside=True))
        self._standbys_from_s = time.monotonic() + STANDBY_AFTER_S

    def _go(self, place: Place, local_rank: int) -> None:
        process = self._standbys.pop(local_rank, None)
        if process is None:
            process = self._started(local_rank, preload=())
        else:
            self._forget(process)
        self._ranks[local_rank] = process
        self._selector.register(process.pidfd, selectors.EVENT_READ, process)
        told = environment.of_round(
            place,
            self._environ,
            launch=self._view.launch,
            local_rank=local_rank,
            error_file=str(self._folder / f"{place.round}.{local_rank}.error.json"),
            meshes=self._options.meshes,
        )
        process.go(told, self._failure_file(place, local_rank), self._logs(place, local_rank))

    def _offer_port(self, **what: object) -> None:
        """Hold another port for the next round, and that of this one until then."""
        if self._round_port is not self._port:
            self._round_port.close()
        self._round_port, self._port = self._port, HeldPort()
        number = self._port.number
        self._conversation.say(lambda report: replace(report, port=number, **what))  # type: ignore[arg-type]

    def _started(self, local_rank: int, preload: tuple[str, ...]) -> RankProcess:
        environ = environment.constant(
            self._environ,
            agent=str(self._agent),
            job=self._job,
            local_rank=local_rank,
            ranks=self._ranks_count,
            restarts=self._options.restarts_max,
            said=str(self._folder),
        )
        return RankProcess(self._command, local_rank, environ, preload, self._keeper, self._tell)

    def _failure_file(self, place: Place, local_rank: int) -> Path:
        return self._folder / f"{place.round}.{local_rank}.failure.json"

    def _logs(self, place: Place, local_rank: int) -> Path | None:
        folder = self._options.log_folder
        if folder is None:
            return None
        folder = folder / self._job / f"round-{place.round}"
        with suppress(OSError):  # whoever opens a file there says so
            folder.mkdir(parents=True, exist_ok=True)
        return folder / f"rank-{place.first_rank + local_rank}"

    def _note_ended(self, ended: list[RankProcess]) -> None:
        found: list[RankFailure] = []
        place = self._place
        for process in ended:
            self._forget(process)
        for process, code in zip(ended, end(ended), strict=True):
            if self._standbys.get(process.local_rank) is process:
                self._note_lost_standby(process, code)
                continue
            del self._ranks[process.local_rank]
            if code and place:
                noted = _read(self._failure_file(place, process.local_rank))
                rank, step = place.first_rank + process.local_rank, process.last_step
                found.append(failures.failure(rank, code, noted, step=step))
        if found and not self._failed:
            self._fail(min(found, key=lambda failure: failure.of_peer))
        elif ended and place and not self._ranks and not self._failed:
            self._finished = True
            self._conversation.say(lambda report: replace(report, finished=True))

    def _note_lost_standby(self, process: RankProcess, code: int) -> None:
        del self._standbys[process.local_rank]
        self._standbys_from_s = time.monotonic() + STANDBY_AFTER_S
        if code >= 0:
            self._preload = ()
            self._tell(f"a standby has ended by itself, so there are none: exit code {code}")

    def _fail(self, failure: RankFailure) -> None:
        """Begin no more of this round; who was told to end may yet save."""
        self._failed = True
        if self._stopped_by:
            return
        self._conversation.say(lambda report: replace(report, failure=failure))
        self._tell(f"rank {failure.rank} has failed: {failure.reason}")
        self._end(self._ranks)

    def _end_ranks(self) -> None:
        self._end(self._ranks)
        self._place = None

    def _end(self, processes: dict[int, RankProcess]) -> None:
        for process in processes.values():
            self._forget(process)
        end(list(processes.values()))
        processes.clear()

    def _forget(self, process: RankProcess) -> None:
        """Wait for nothing of a process any more."""
        self._selector.unregister(process.pidfd)
        if process.channel >= 0 and process.channel in self._selector.get_map():
            self._selector.unregister(process.channel)
        self._warm.discard(process)

    def _renew_keeper(self) -> None:
        self._selector.unregister(self._keeper.pidfd)
        self._keeper.renew()
        self._selector.register(self._keeper.pidfd, selectors.EVENT_READ, self._keeper)

    # -------------------------------------------------------------------------- the standbys

    def _missing_standbys(self) -> list[int]:
        ends = self._stopped_by or self._going or self._last_word
        if ends or not self._preload:
            return []
        return [n for n in range(self._ranks_count + self._spares) if n not in self._standbys]

    @property
    def _spares(self) -> int:
        """How many standbys beside one for each rank: one, where the next round may have more."""
        terms, place = self._options.terms, self._place
        return int(terms.allocated and place is not None and place.world_size < terms.nodes_max)

    def _prepare(self) -> None:
        if time.monotonic() < self._standbys_from_s:
            return
        for local_rank in self._missing_standbys():
            try:
                process = self._started(local_rank, self._preload)
            except OSError as error:
                self._tell(f"no standby can be started: {error.strerror}")
                self._standbys_from_s = time.monotonic() + STANDBY_AFTER_S
                return
            self._standbys[local_rank] = process
            self._selector.register(process.pidfd, selectors.EVENT_READ, process)
            self._selector.register(process.channel, selectors.EVENT_READ, process)

    def _note_warm(self, process: RankProcess) -> None:
        """Tell that ranks would begin at once, when all standbys have imported what they are to."""
        self._selector.unregister(process.channel)
        if not process.is_warm():
            return
        self._warm.add(process)
        if all(self._standbys.get(number) in self._warm for number in range(self._ranks_count)):
            self._conversation.say(lambda report: replace(report, warm=True))

    # ----------------------------------------------------------------------- ends and people

    def _signalled(self, number: int) -> None:
        if self._signalled_by:
            self._end_ranks()
            reason = "it was told to end, twice"
            self._last_word = LastWord(outcome=Outcome.STOPPED, code=128 + number, reason=reason)
            return
        self._signalled_by = number
        self._conversation.say(lambda report: replace(report, stopping=True))
        if self._stopped_by:  # another node's launcher was told first
            self._stopped_by = number
        else:
            self._stop(number)

    def _noticed(self, reason: str) -> None:
        """Have the round end without this node, or end as after SIGTERM: it will be taken away."""
        if self._stopped_by:
            return
        if not any(process.counts_steps() for process in self._ranks.values()):
            self._tell(f"this node will be taken away ({reason}): ranks save and end")
            self._signalled(signal.SIGTERM)
            return
        self._tell(f"this node will be taken away ({reason}): others go on without it, if enough")
        left_s = min(seconds_left(reason) or self._options.grace_s, NOTICE_S_MAX)
        now_s = time.monotonic()
        self._going = going = Going(since_s=now_s, over_s=now_s + left_s)
        self._conversation.say(lambda report: replace(report, goes_in_s=going.told_s))

    def _stop(self, number: int) -> None:
        """Have the ranks save and end."""
        self._stopped_by = number
        self._killed_from_s = time.monotonic() + self._options.grace_s
        self._end(self._standbys)
        for process in self._ranks.values():
            process.signal(number if number in PASSED_ON else signal.SIGTERM)

    def _refused(self, error: CheckpointError) -> None:
        if error.retryable:
            if not self._unheard:
                runs = "what runs, runs on" if self._place else "waiting (see `holdfast doctor`)"
                self._tell(f"nobody hears this launcher; {runs}: {error.message}")
            self._unheard = True
            return
        if not isinstance(error, AlreadyExistsError):
            if self._place is None:
                raise error
            self._tell(f"the metadata service refuses reports: {error.message}")
            return
        # Another one has this node now, as this one was taken for lost: its ranks end.
        self._view = replace(self._view, place=None)
        now_s = time.monotonic()
        self._refused_since_s = self._refused_since_s or now_s
        if now_s - self._refused_since_s > REFUSED_S_MAX + _lease_s(error):
            raise error
        self._tell(f"waiting: {error.message}")

    def _tell_waiting(self) -> None:
        waiting = self._view.waiting
        if waiting:
            self._tell(waiting)
        elif self._others_unheard:
            self._tell("all nodes are heard again")
        self._others_unheard = bool(waiting) and self._place is not None

    def _tell(self, text: str) -> None:
        """Tell people once."""
        if text != self._said:
            self._said = text
            with suppress(OSError):  # nobody listens any more
                os.write(STDERR, f"holdfast run: {text}\n".encode(errors="replace"))


def _lease_s(error: CheckpointError) -> float:
    """Return the lease of launchers that a refusal tells; 0: none."""
    told = error.context.get("lease_s", "")
    return float(told) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", told) else 0.0


def _counted(place: Place) -> str:
    ranks, nodes = place.world_size, place.nodes_count
    return f"{ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)}"


def _read(path: Path) -> dict[str, object]:
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}
