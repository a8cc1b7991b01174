"""Waits of services end when they are told to: a task that is cancelled as news comes."""

from __future__ import annotations

import asyncio

import pytest

from holdfast_services.agent import reporter
from holdfast_services.kit.transactions import Transactions

LONG_S = 60.0


async def _transactions(event):
    transactions = Transactions(None, lambda c: c, threads=1, name="none")
    try:
        await transactions.woken(LONG_S, event)
    finally:
        await transactions.stop()


async def _reporter(event):
    await reporter._wait(event, LONG_S)


@pytest.mark.parametrize("wait", [_transactions, _reporter])
@pytest.mark.parametrize("turns", range(4))
async def test_whoever_is_cancelled_as_news_comes_does_not_go_on(wait, turns):
    """With the news a few turns of the loop before; else a service that is stopped never ends."""
    event = asyncio.Event()

    async def loop():
        await wait(event)
        await asyncio.sleep(LONG_S)

    task = asyncio.create_task(loop())
    await asyncio.sleep(0.01)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()

    done, _ = await asyncio.wait({task}, timeout=5)
    if not done:
        task.cancel()
    assert done, "the wish to end was lost"
    assert task.cancelled()


async def test_a_wait_without_news_ends_at_its_deadline():
    transactions = Transactions(None, lambda c: c, threads=1, name="none")
    assert not await transactions.woken(0.001)
    heard = transactions.listen()
    transactions.wake()
    assert await transactions.woken(LONG_S, heard)
    await transactions.stop()
