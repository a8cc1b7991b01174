"""The page of figures says what the records of its run say."""

import json

import pytest
from tests.bench import figures, sched_page


def test_the_tables_are_those_of_the_run_that_is_quoted():
    page = figures.PAGE.read_text()
    records = json.loads(figures.RUN.read_text())

    assert page == figures.rendered(page, records), "run `python -m tests.bench.figures`"


def test_no_record_of_the_run_is_left_out():
    page = figures.PAGE.read_text()
    records = json.loads(figures.RUN.read_text())

    assert [] == [
        r["name"] for r in records if f"`{r['name']}`" not in page and r["unit"] != "cores"
    ]


def test_a_table_without_records_is_refused():
    with pytest.raises(AssertionError, match="no record begins with"):
        figures.rendered("<!-- records: none/ -->\n<!-- end of records -->", [])


def test_records_of_some_names_replace_those_that_were_quoted():
    before = [{"name": "a/0"}, {"name": "b/0"}]
    run = [{"name": "a/1"}, {"name": "b/1"}]

    assert figures.taken(run, before, "") == run
    assert figures.taken(run, before, "b/") == [{"name": "a/0"}, {"name": "b/1"}]


def test_the_table_of_policies_is_what_was_found():
    page = sched_page.PAGE.read_text()
    rows = json.loads(sched_page.FOUND.read_text())

    assert page == sched_page.rendered(page, rows), "run `python -m tests.bench.sched_page`"
