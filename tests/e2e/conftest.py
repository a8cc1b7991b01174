"""What end-to-end tests have in common."""

from __future__ import annotations

import uuid

import pytest


@pytest.fixture
def job() -> str:
    """The name of a job that no other test has."""
    return f"job-{uuid.uuid4().hex[:8]}"
