"""What a catalogue of protocol 1 wrote is read after the upgrade, and taken back by a downgrade."""

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import text

from holdfast.core.announcements import Announcement, SaveReason
from holdfast.core.decision import Start
from holdfast.core.inventory import HeldState
from holdfast.core.persistence_rules import PersistRule
from holdfast.core.reports import RankReport
from holdfast_services.kit.db import make_engine, read_transaction, write_transaction
from holdfast_services.metadata import migrations
from holdfast_services.metadata.migrations import upgrade
from holdfast_services.metadata.storage import Catalogue, DecodeCache

BEFORE = "0005"
# An inventory as protocol 1 encoded it: one shard; of rank 0 step 8, 0.5 s a step, every 2 s, asks
# for a save, lives, ready for decision 4, loaded, saving step 8, notes of step 7.
INVENTORY = bytes.fromhex(
    "0a0d0a01611203613a311a03613a3210051809208080808004286432310a280a080a0272311007180312036f6c6418"
    "01220170286432106464646464646464646464646464646410011a016120013a440a036f6c64120272311803280831"
    "000000000000e03f39000000000000004040014801500458016201086a06080712027b7d72106e6e6e6e6e6e6e6e6e"
    "6e6e6e6e6e6e6e"
)
ROWS = (
    """
    INSERT INTO jobs (name, run, created_at_s) VALUES ('old', 'r1', 1)
    """,
    """
    INSERT INTO runs (run, job, generation, announced_step, announced_at_s, rules, abandoned,
        persisted_step, persisted_at_s, persist_owed, started)
    VALUES ('r1', 'old', 3, 12, 5, '[]', '[]', 0, 0, false, '[]')
    """,
    """
    INSERT INTO attempts (run, generation, job, nonce, launcher, holder, world_size, replicas,
        replicas_allowed, replica_domain, started_at_s, lease_until_s, persist_steps,
        persist_seconds, start, start_due)
    VALUES ('r1', 3, 'old', :nonce, 'L', 'h:1', 2, 1, 1, 'rack', 2, 9, 10, 0.5, :start, true)
    """,
    """
    INSERT INTO nodes (name, incarnation, sequence, reported_at_s, lease_until_s, lost, inventory)
    VALUES ('a', 5, 9, 3, 9, false, :inventory)
    """,
)
VALUES = {
    "nonce": b"n" * 16,
    "inventory": INVENTORY,
    "start": '{"name": "x", "fresh": false, "step": 7}',
}


def config(connection):
    made = Config()
    made.set_main_option("script_location", migrations.__path__[0])
    made.set_main_option("path_separator", "os")
    made.attributes["connection"] = connection
    return made


@pytest.fixture
def engine(database_url):
    made = make_engine(database_url, connections_max=1)
    with write_transaction(made) as connection:
        command.upgrade(config(connection), BEFORE)
        for row in ROWS:
            connection.execute(text(row), {k: v for k, v in VALUES.items() if f":{k}" in row})
    yield made
    made.dispose()


def test_rows_of_protocol_1_are_read_after_the_upgrade(engine):
    upgrade(engine)

    with read_transaction(engine) as connection:
        catalogue = Catalogue(connection, DecodeCache())
        run, node = catalogue.load_run("r1"), catalogue.nodes()["a"]
        assert 3 == catalogue.generation_of("old", b"n" * 16)
    assert Announcement(step=12, reason=SaveReason.UNSPECIFIED) == run.announcement
    attempt = run.attempt
    assert (b"n" * 16, "L", "h:1") == (
        attempt.spec.nonce, attempt.spec.launcher, attempt.spec.holder
    )  # fmt: skip
    assert (2, 1, "rack") == (
        attempt.spec.world_size, attempt.spec.replicas, attempt.spec.replica_domain
    )  # fmt: skip
    assert PersistRule(steps=10, seconds=0.5) == attempt.spec.persist
    assert Start(name="x", step=7) == attempt.spec.start
    assert attempt.start_due
    [status] = node.inventory.ranks
    assert (True, 4, b"n" * 16) == (status.live, status.ready_decision, status.nonce)
    assert RankReport() == status.report, "the rank says it again with its next report"
    assert [HeldState.SEALED] == [held.state for held in node.inventory.shards]


def test_a_downgrade_gives_the_columns_back(engine):
    with write_transaction(engine) as connection:
        before = connection.execute(text("SELECT * FROM attempts")).mappings().one()
    upgrade(engine)
    with write_transaction(engine) as connection:
        command.downgrade(config(connection), BEFORE)
        after = connection.execute(text("SELECT * FROM attempts")).mappings().one()

    assert dict(before) == dict(after)
