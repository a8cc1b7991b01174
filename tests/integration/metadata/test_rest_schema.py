"""REST answers as its OpenAPI description says, whatever it is asked (F92)."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.integration.metadata.process import fork

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
EXAMPLES_COUNT = 8
ENDLESS = "/api/v1/events"


@pytest.fixture(scope="module")
def service(kit, tmp_path_factory):
    """A service with a job that has a checkpoint."""
    running = fork(tmp_path_factory.mktemp("metadata"))
    running.save(kit)
    yield running
    running.stop()


def test_every_route_answers_as_described(service):
    described = schemathesis.openapi.from_url(f"{service.rest_url}/openapi.json")
    operations = [one.ok() for one in described.exclude(path=ENDLESS).get_all_operations()]
    assert len(operations) > 20

    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(max_examples=EXAMPLES_COUNT, deadline=None, database=None, derandomize=True,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        def answers(case):
            case.call_and_validate(checks=CHECKS, timeout=30)

        answers()
    assert service.process.poll() is None
