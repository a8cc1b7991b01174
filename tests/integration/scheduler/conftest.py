"""A database for what is the same on each kind."""

import pytest


@pytest.fixture
def sqlite_url(tmp_path):
    return f"sqlite:///{tmp_path / 'scheduler.db'}"
