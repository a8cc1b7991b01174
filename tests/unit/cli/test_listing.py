"""What ``ls`` and ``rm`` say of jobs, of a service that knows these."""

from __future__ import annotations

import pytest

from holdfast.cli.arguments import parser
from holdfast.cli.catalogue import ls
from holdfast.cli.keep import rm
from holdfast.cli.rest import Rest
from holdfast.errors import NotFoundError


def job(name, *, running=False, step=0, newest_step=None):
    return {
        "job": name,
        "run": "0123456789ab",
        "running": running,
        "generation": 1,
        "world_size": 1,
        "step": step,
        "newest_step": newest_step,
    }


class Service:
    def __init__(self, *jobs):
        self._jobs = list(jobs)

    def jobs(self):
        return self._jobs

    def checkpoints(self, name):
        raise NotFoundError(f"no job {name}", job=name)


@pytest.fixture
def service(monkeypatch):
    def serve(*jobs):
        monkeypatch.setattr(Rest, "find", lambda _: Service(*jobs))

    return serve


def test_a_stopped_job_that_saved_nothing_is_at_no_step(service):
    """After ``down`` only the catalogue speaks of it, and that knows no step."""
    service(job("a"), job("b", running=True), job("c", step=7, newest_step=7))

    (table,) = ls(parser().parse_args(["ls"]), {}).text

    assert [row[5:] for row in table.rows] == [("-", "-"), ("0", "-"), ("7", "7")]


def test_removing_a_job_that_has_only_roles_names_them(service):
    service(job("gan/generator"), job("gan/critic"), job("gan2"))

    with pytest.raises(NotFoundError, match=r"no job gan, but its roles: gan/critic, gan/gene"):
        rm(parser().parse_args(["rm", "gan"]), {})


def test_removing_a_job_that_nobody_knows_says_so(service):
    service(job("gan2"))

    with pytest.raises(NotFoundError) as caught:
        rm(parser().parse_args(["rm", "gan"]), {})
    assert "no job gan" == str(caught.value)
