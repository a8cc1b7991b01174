"""The one scheduler that plans: takes the lease, takes turns, plans, tells metadata.

All that it remembers is a hint: each turn reads the database anew, so whoever comes after it goes
on where it was.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from holdfast.core.retry import worth_telling
from holdfast.errors import CheckpointError, StaleGenerationError, UnavailableError
from holdfast_services.kit.transactions import Transactions
from holdfast_services.scheduler.calls.metadata import Metadata
from holdfast_services.scheduler.domain.cluster import Round
from holdfast_services.scheduler.domain.job import Job
from holdfast_services.scheduler.domain.knowledge import Knowledge
from holdfast_services.scheduler.domain.orders import allocation
from holdfast_services.scheduler.domain.wishes import Wishes
from holdfast_services.scheduler.storage import Statements
from holdfast_services.scheduler.usecases import deciding
from holdfast_services.scheduler.usecases.deciding import Agent, Heard, Holding, Learned, Turn

TICK_S = 0.5
METADATA_POLL_S = 0.5
ROUND_S = 60.0
"""So often a plan is made even if nothing has happened: jobs have made progress."""
PLAN_S_MAX = 300.0
"""A plan that takes longer is given up, and so may be the lease."""
PLAN_PAUSE_S = 0.2
"""Between two plans, so that a thousand jobs that come at once are not a thousand plans."""

log = logging.getLogger(__name__)


class Planner(Protocol):
    """Makes a plan of what a turn has found and what is known of its jobs."""

    async def __call__(self, turn: Turn, learned: Learned, *, arrivals: bool) -> Wishes:
        """Return a plan without a number; with ``arrivals`` who has GPUs keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What metadata last said, or that it does not answer, and since when that is so."""

    rounds: Mapping[str, Round] | None = None
    agents: Mapping[str, Agent] | None = None
    since_s: float = 0.0


class Leader:
    """Tries to hold the lease from ``start`` to ``stop``, and decides while it does.

    Args:
        transactions: The scheduler's database. News of it wake a turn.
        metadata: Where allocations go.
        planner: Makes a plan of what a turn has found.
        me: A name that no other scheduler process has.
        told: Called when orders may have changed.
        round_s: A plan is made at least so often.
    """

    def __init__(
        self,
        transactions: Transactions[Statements],
        metadata: Metadata,
        planner: Planner,
        *,
        me: str,
        told: Callable[[], None],
        round_s: float = ROUND_S,
    ) -> None:
        self._transactions = transactions
        self._metadata = metadata
        self._planner = planner
        self._me = me
        self._orders_changed = told
        self._round_s = round_s
        self._said = _Told(since_s=time.monotonic())
        self._out = False
        self._planned = _Planned()
        self._urgent = True
        self._holding: Holding | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        self._tasks = [
            asyncio.create_task(self._for_ever(self._turn)),
            asyncio.create_task(self._for_ever(self._listen)),
        ]

    async def stop(self) -> None:
        """End, and let another one have the lease."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        holding = self._holding
        if holding is not None:
            with suppress(CheckpointError):
                await self._transactions.write(lambda s: deciding.give_up(s, holding))

    async def _for_ever(self, step: Callable[[], Awaitable[None]]) -> None:
        failures = 0
        while True:
            try:
                await step()
                failures = 0
            except CheckpointError as error:
                failures += 1
                if worth_telling(failures):
                    log.warning("nothing can be decided now: %s", error)
                await asyncio.sleep(TICK_S)
            except Exception:
                log.exception("a turn failed")
                await asyncio.sleep(TICK_S)

    # ----------------------------------------------------------------------- what metadata says

    async def _listen(self) -> None:
        if self._holding is None:
            await asyncio.sleep(METADATA_POLL_S)
            return
        try:
            rounds, agents = await asyncio.gather(self._metadata.rounds(), self._metadata.agents())
        except CheckpointError as error:
            if not self._out:
                log.warning("the metadata service does not answer: %s", error)
            self._out = True
            self._hear(_Told())
        else:
            self._out = False
            self._hear(_Told(rounds=rounds, agents=agents))
        await asyncio.sleep(METADATA_POLL_S)

    def _hear(self, said: _Told) -> None:
        before = self._said
        same = (before.rounds is None) == (said.rounds is None)
        since_s = before.since_s if same else time.monotonic()
        self._said = replace(said, since_s=since_s)
        if (before.rounds, before.agents) != (said.rounds, said.agents):
            self._transactions.wake()

    def _heard(self) -> Heard:
        said = self._said
        return Heard(rounds=said.rounds, agents=said.agents, for_s=time.monotonic() - said.since_s)

    # --------------------------------------------------------------------------------- a turn

    async def _turn(self) -> None:
        heard = self._transactions.listen()
        self._holding = await self._transactions.write(lambda s: deciding.hold(s, self._me))
        if self._holding is not None:
            try:
                await self._decide(self._holding)
            except StaleGenerationError as error:
                log.warning("%s", error)
                self._holding = None
        await self._transactions.woken(TICK_S, heard)

    async def _decide(self, holding: Holding) -> None:
        turn = await self._take_turn(holding)
        self._urgent = self._urgent or turn.news
        if self._is_due(turn):
            await self._plan(holding, turn)
            turn = await self._take_turn(holding)
        rounds = self._said.rounds
        if rounds is not None and (untold := _untold(turn, rounds)):
            await self._tell(untold)

    async def _take_turn(self, holding: Holding) -> Turn:
        heard = self._heard()
        turn = await self._transactions.write(lambda s: deciding.take_turn(s, holding, heard))
        if turn.changed:
            self._orders_changed()
        return turn

    def _is_due(self, turn: Turn) -> bool:
        """Tell whether a plan is to be made now: in time, or since jobs or nodes have changed."""
        if time.monotonic() - self._planned.at_s < PLAN_PAUSE_S:
            return False
        return self._is_all_due(turn) or self._planned.jobs != _jobs(turn)

    def _is_all_due(self, turn: Turn) -> bool:
        """Tell whether those are planned anew that have GPUs, too."""
        late = time.monotonic() - self._planned.all_at_s >= self._round_s
        return self._urgent or late or self._planned.nodes != _nodes(turn)

    async def _plan(self, holding: Holding, turn: Turn) -> None:
        of_all = self._is_all_due(turn)
        learned = await self._learned(turn)
        plan = await self._made(holding, turn, learned, arrivals=not of_all)
        await self._transactions.write(lambda s: deciding.keep_plan(s, holding, plan))
        now_s = time.monotonic()
        self._planned = _Planned(
            at_s=now_s,
            all_at_s=now_s if of_all else self._planned.all_at_s,
            jobs=_jobs(turn),
            nodes=_nodes(turn),
        )
        self._urgent = False

    async def _made(
        self, holding: Holding, turn: Turn, learned: Learned, *, arrivals: bool
    ) -> Wishes:
        """Return a plan. The lease is kept meanwhile: nobody's would count if all were too slow."""
        making = asyncio.ensure_future(self._planner(turn, learned, arrivals=arrivals))
        ends_s = time.monotonic() + PLAN_S_MAX
        try:
            while not (await asyncio.wait({making}, timeout=TICK_S))[0]:
                if time.monotonic() > ends_s:
                    raise UnavailableError(f"no plan was made within {PLAN_S_MAX:.0f} s")
                if await self._transactions.write(lambda s: deciding.hold(s, self._me)) != holding:
                    raise StaleGenerationError("another scheduler took the lease during a plan")
            return making.result()
        finally:
            making.cancel()

    async def _learned(self, turn: Turn) -> Learned:
        """Return what is known of jobs; of what metadata does not say now, what it said before."""
        said: Mapping[str, Knowledge] = {}
        if self._said.rounds is not None:
            with suppress(CheckpointError):
                said = await self._metadata.knowledge(turn.now_s)
        return await self._transactions.write(lambda s: deciding.learn(s, turn, said))

    async def _tell(self, jobs: Sequence[Job]) -> None:
        """Put allocations to metadata; one that it does not take is put again."""
        taken = await asyncio.gather(*(self._is_taken(job) for job in jobs))
        told = {job.name: job.number for job, is_taken in zip(jobs, taken, strict=True) if is_taken}
        if told:
            await self._transactions.write(lambda s: deciding.note_told(s, told))
            self._orders_changed()

    async def _is_taken(self, job: Job) -> bool:
        try:
            await self._metadata.allocate(job.name, allocation(job))
        except CheckpointError as error:
            log.info("the allocation of %s was not taken: %s", job.name, error)
            return False
        return True


def _untold(turn: Turn, rounds: Mapping[str, Round]) -> list[Job]:
    """Return the jobs of whose allocation metadata does not know, or not any more."""
    return [
        job
        for name, job in turn.jobs.items()
        if job.told < job.number or (job.parts and rounds.get(name, Round()).newest < job.number)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """When plans were made, and of which jobs and nodes the last one was."""

    at_s: float = -math.inf
    all_at_s: float = -math.inf
    jobs: object = None
    nodes: object = None


def _jobs(turn: Turn) -> object:
    """Return the jobs that there are to plan: one more or less makes a plan due."""
    return {
        (name, job.id, turn.now_s >= job.not_before_s)
        for name, job in turn.jobs.items()
        if not job.over
    }


def _nodes(turn: Turn) -> object:
    """Return the nodes that there are to plan with: a change of one makes a plan of all due."""
    return {
        (node.name, node.gpus, node.gpu_type, not node.hindrance(turn.now_s))
        for node in turn.cluster.nodes.values()
    }
