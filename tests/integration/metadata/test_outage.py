"""Postgres goes away and comes back: errors that say so, then the same catalogue (P5)."""

import pytest

from holdfast.errors import CheckpointError, ConflictError
from holdfast_services.kit.db import make_engine, write_transaction
from holdfast_services.metadata.storage import Catalogue, DecodeCache


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


def refused(kind):
    """A block that ends in this error, whatever it did before."""
    return pytest.raises(kind)


async def test_a_process_stopped_inside_a_transaction_stops_no_other(postgres_url, agents, kit):
    """P4, P5; defect B3: it holds the rows that every other needs, and says nothing any more."""
    stopped = make_engine(postgres_url, connections_max=1)
    async with kit.running(postgres_url) as service:
        await kit.launch(service, agents)
        with refused(ConflictError), write_transaction(stopped) as db:
            catalogue = Catalogue(db, DecodeCache())
            now_s = catalogue.now_s()
            assert catalogue.beat(catalogue.pulse_s(), now_s)
            assert catalogue.lock_job(kit.JOB)

            view = await service.report(agents[0].inventory())
            second = await service.register(kit.wish(0, "a", b"second"))

            catalogue.now_s()  # awake again: its transaction is over, and it is told to redo it
        with write_transaction(stopped) as db:
            assert Catalogue(db, DecodeCache()).lock_job(kit.JOB)
    stopped.dispose()

    assert view.runs[0].generation < second.generation
