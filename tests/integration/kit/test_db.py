"""What the engine asks of a database: that a commit stays, that a stopped process stops nobody."""

import pytest
from sqlalchemy import text

from holdfast_services.kit.db import make_engine, read_transaction


@pytest.fixture
def sqlite(tmp_path):
    engine = make_engine(f"sqlite:///{tmp_path / 'some.db'}", connections_max=1)
    yield engine
    engine.dispose()


def test_a_commit_survives_a_loss_of_power(sqlite):
    """M1; defect A9: 2 is FULL; with NORMAL a catalogue may fall behind its bucket."""
    with read_transaction(sqlite) as db:
        assert 2 == db.execute(text("PRAGMA synchronous")).scalar_one()
