"""A ledger is in the row of its run, and a row of before ledgers is read."""

from dataclasses import replace

from sqlalchemy import text

from holdfast_services.kit.db import make_engine, write_transaction
from holdfast_services.metadata.domain.ledger import Cause, Ledger

LEDGER = Ledger().begun(1e9, None).ended(1e9 + 60, Cause.NODE, 2.0)
BEGUN = LEDGER.begun(1e9 + 70, 1e9 + 50)


async def test_a_ledger_comes_back_from_its_row(database_url, agents, kit):
    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)
        for ledger in (LEDGER, BEGUN, BEGUN.ended(1e9 + 80, None, 0.0)):

            def put(catalogue, ledger=ledger):
                run = catalogue.load_run(seat.run)
                catalogue.save_run(run, replace(run, ledger=ledger))

            await service.write(put)
            found = await service.read(lambda c: c.load_run(seat.run))
            assert found.ledger == ledger


async def test_a_run_of_an_older_version_has_an_empty_one(database_url, agents, kit):
    async with kit.running(database_url) as service:
        seat = await kit.launch(service, agents)
    engine = make_engine(database_url, connections_max=1)
    with write_transaction(engine) as db:
        db.execute(text("""UPDATE runs SET failures = '{"record": {}}'"""))
    engine.dispose()

    async with kit.running(database_url) as service:
        found = await service.read(lambda c: c.load_run(seat.run))

    assert found.ledger == Ledger()
