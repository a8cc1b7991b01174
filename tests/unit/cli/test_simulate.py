"""``holdfast simulate`` prints a row for each policy, and writes what it was asked for."""

import json

import pytest
from tests.unit.scheduler.traces import JOBS, write

from holdfast.cli.main import main


@pytest.fixture
def trace(tmp_path):
    return str(write(tmp_path / "trace.jsonl", JOBS[:4]))


def test_a_row_for_each_policy_and_the_files_that_were_asked_for(trace, tmp_path, capsys):
    asked = ["simulate", trace, "--nodes", "2", "--policy", "price", "--policy", "sia"]
    files = ["--out", str(tmp_path / "out.json"), "--html", str(tmp_path / "page.html")]

    assert 0 == main([*asked, *files])
    told = capsys.readouterr().out.splitlines()
    assert 0 == main([*asked, "--json"])
    runs = json.loads(capsys.readouterr().out)["runs"]

    assert ["policy", "price", "sia"] == [line.split()[0] for line in told[:3]]
    assert ["price", "sia"] == [run["summary"]["policy"] for run in runs]
    assert runs == [
        {key: run[key] for key in ("summary", "applications")}
        for run in json.loads((tmp_path / "out.json").read_text())["runs"]
    ]
    assert "<svg" in (tmp_path / "page.html").read_text()


def test_a_trace_that_is_not_there_is_an_error_that_names_it(tmp_path, capsys):
    assert 1 == main(["simulate", str(tmp_path / "none.csv")])
    assert "none.csv does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--keep", "2"], ["--round-s", "0"], ["--noise", "nan"]])
def test_a_number_out_of_its_bounds_is_a_wrong_command_line(trace, wrong, capsys):
    with pytest.raises(SystemExit):
        main(["simulate", trace, *wrong])
    assert "must be" in capsys.readouterr().err
