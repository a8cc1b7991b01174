"""Postgres goes away and comes back: errors that say so, then the same catalogue (P5)."""

import pytest

from holdfast.errors import CheckpointError


async def test_a_restarted_postgres_loses_nothing_and_needs_no_new_service(
    own_postgres, own_url, agents, kit
):
    async with kit.running(own_url, clock=True) as service:
        seat = await kit.launch(service, agents)
        before = await service.read(lambda c: c.load_run(seat.run))
        own_postgres.stop()
        try:
            with pytest.raises(CheckpointError) as refusal:
                await service.report(agents[0].inventory())
            assert refusal.value.retryable
        finally:
            own_postgres.start()

        view = await service.report(agents[0].inventory())
        after = await service.read(lambda c: c.load_run(seat.run))

    assert view.runs[0].generation == seat.generation
    assert after.decision == before.decision
