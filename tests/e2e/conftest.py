"""What end-to-end tests have in common."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from tests.e2e.stack import SharedStack, Stack


@pytest.fixture
def job() -> str:
    """The name of a job that no other test has."""
    return f"job-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> Iterator[SharedStack]:
    """The ``STACK`` of the module, stopped after its tests."""
    stack: SharedStack = request.module.STACK
    yield stack
    stack.close()


@pytest.fixture
def stack(shared: SharedStack) -> Iterator[Stack]:
    """The module's stack, all of whose services are there; other tests have jobs of theirs there.

    Modules without a ``STACK`` have a fixture of their own in its place.
    """
    with shared.lent() as running:
        yield running
