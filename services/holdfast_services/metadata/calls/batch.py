"""Many callers, one transaction: what arrives while one runs goes into the next.

A transaction reads all inventories once, however many reports it takes, so a thousand nodes that
report at once cost a few transactions, not a thousand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from holdfast.errors import CheckpointError, UnavailableError

WAITING_MAX = 16_384
BATCH_MAX = 512

Q = TypeVar("Q")
A = TypeVar("A")


class Batch(Generic[Q, A]):
    """A bounded queue in front of ``run_all``, which answers a list of questions in order.

    An answer that is an error is raised to its asker alone. A batch that fails as a whole is
    tried again one by one, so that one bad question does not harm the others.
    """

    def __init__(
        self, run_all: Callable[[Sequence[Q]], Awaitable[Sequence[A | CheckpointError]]]
    ) -> None:
        self._run_all = run_all
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._running: asyncio.Task[None] | None = None

    async def ask(self, question: Q) -> A:
        """Return the answer to ``question``.

        Raises:
            UnavailableError: ``WAITING_MAX`` others wait; come back later.
            CheckpointError: what ``run_all`` answered or raised.
        """
        if len(self._waiting) >= WAITING_MAX:
            raise UnavailableError(f"{WAITING_MAX} calls wait already: try again later")
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, future))
        if self._running is None:
            self._running = asyncio.create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:BATCH_MAX], self._waiting[BATCH_MAX:]
                # Who has gone is not asked for: a rank that was killed while it waited must not
                # take the job from the attempt that came after it.
                wanted = [item for item in batch if not item[1].done()]
                if wanted:
                    await self._answer(wanted)
        finally:
            self._running = None

    async def _answer(self, batch: Sequence[tuple[Q, asyncio.Future[A]]]) -> None:
        try:
            answers = await self._run_all([question for question, _ in batch])
        except CheckpointError as error:
            if len(batch) > 1 and not error.retryable:
                for item in batch:
                    await self._answer([item])
                return
            answers = [error] * len(batch)
        except BaseException as error:  # a bug, or the end of the loop: the askers must know
            _fail(batch, error)
            if isinstance(error, Exception):
                return
            raise
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, CheckpointError):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def _fail(batch: Sequence[tuple[object, asyncio.Future[A]]], error: BaseException) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
