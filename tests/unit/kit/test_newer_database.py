"""A service that is set back does not touch the tables of the newer one, and says so."""

import pytest
from sqlalchemy import text

from holdfast.errors import UnsupportedFormatError
from holdfast_services.kit.db import make_engine, write_transaction
from holdfast_services.metadata import migrations as catalogue
from holdfast_services.scheduler import migrations as scheduler


@pytest.mark.parametrize(
    ("schema", "table"),
    [(catalogue, "alembic_version"), (scheduler, scheduler.VERSION_TABLE)],
    ids=["metadata", "scheduler"],
)
def test_a_database_of_a_newer_release_is_refused_with_a_remedy(tmp_path, schema, table):
    engine = make_engine(f"sqlite:///{tmp_path / 'test.db'}", connections_max=1)
    schema.upgrade(engine)
    with write_transaction(engine) as connection:
        connection.execute(text(f"UPDATE {table} SET version_num = '9999'"))

    with pytest.raises(UnsupportedFormatError, match=r"newer release .*9999.*backup"):
        schema.upgrade(engine)
