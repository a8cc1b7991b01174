"""What ``ledger`` says of a job's time."""

from __future__ import annotations

import pytest

from holdfast.cli.arguments import parser
from holdfast.cli.ledger import ledger
from holdfast.cli.rest import Rest

NOTHING = {"trained_s": 0.0, "productive_s": 0.0, "stalled_s": 0.0, "lost_s": {}, "down_s": {},
           "productive_share": None}  # fmt: skip


@pytest.fixture
def told(monkeypatch):
    def tell(*months, **total):
        class Service:
            def of_job(self, method, job, path):
                assert (method, job, path) == ("GET", "gpt", "/ledger")
                whole = {**NOTHING, **total, "month": ""}
                return {
                    "job": job,
                    "months": [{**NOTHING, **one} for one in months],
                    "total": whole,
                }

        monkeypatch.setattr(Rest, "find", lambda _: Service())
        return ledger(parser().parse_args(["ledger", "gpt"]), {})

    return tell


def test_a_job_that_never_trained_says_so(told):
    report = told()

    assert report.text == ["gpt has not trained yet"]
    assert report.data["months"] == []


def test_each_month_has_a_line_and_all_of_them_the_last_one(told):
    down = {"process": 60.0, "node": 1e-9}
    report = told(
        {"month": "2026-10", "productive_s": 90.0, "stalled_s": 5.0, "productive_share": 0.9},
        {"month": "2026-11", "down_s": down, "productive_share": 0.0},
        productive_s=90.0,
        productive_share=0.45,
    )

    (table,) = report.text

    assert table.rows == (
        ("2026-10", "90.0 %", "90 s", "5.0 s", "-", "-"),
        ("2026-11", "0.0 %", "-", "-", "-", "60 s (node 1e-09 s, process 60 s)"),
        ("all", "45.0 %", "90 s", "-", "-", "-"),
    )


def test_a_month_without_any_time_has_no_share(told):
    (table,) = told({"month": "2026-10"}).text

    assert table.rows[0] == ("2026-10", "-", "-", "-", "-", "-")
