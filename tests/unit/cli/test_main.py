"""The command line: what it refuses, how it says so, what it costs to start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.catalogue import Target
from holdfast.cli.main import EXIT_FAILED, main, parser

SDK = Path(__file__).parents[3] / "sdk"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["up", "--nodes", "0"],
        ["up", "--nodes", "many"],
        ["up", "--port", "65536"],
        ["show"],
        ["show", "../etc"],
        ["show", "gpt@newest"],
        ["verify", "gpt", "--tier", "disk"],
        ["rm", "gpt", "--maybe"],
        ["export", "gpt", "out"],
        ["export", "gpt", "out", "--format", "zip"],
        ["retain", "gpt", "--spaced", "soon"],
        ["links", "gpt", "--valid", "30d"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: holdfast")


@pytest.mark.parametrize(
    ("text", "target"),
    [("gpt", Target("gpt")), ("gpt@12", Target("gpt", 12)), ("a/b.c@0", Target("a/b.c", 0))],
)
def test_a_target_is_a_job_and_perhaps_a_step(text, target):
    assert parser().parse_args(["show", text]).target == target


@pytest.mark.parametrize("command", [["status"], ["ls"], ["show", "gpt"], ["verify", "gpt"]])
def test_an_error_is_one_line_that_says_what_to_do(command, tmp_path, capsys):
    code = main([*command, "--dir", str(tmp_path)])
    out, err = capsys.readouterr()

    assert (code, out) == (EXIT_FAILED, "")
    assert err.startswith(f"holdfast: no stack runs in {tmp_path}")
    assert err.endswith("run `holdfast up`; see docs/reference/errors.md#not_found\n")
    assert err.count("\n") == 1


def test_an_error_is_json_for_machines(tmp_path, capsys):
    code = main(["status", "--json", "--dir", str(tmp_path)])
    out, err = capsys.readouterr()

    assert (code, out) == (EXIT_FAILED, "")
    assert json.loads(err)["error"]["kind"] == "not_found"


def test_down_where_nothing_runs_is_success(tmp_path, capsys):
    code = main(["down", "--keep", "--json", "--dir", str(tmp_path)])

    assert code == 0
    assert json.loads(capsys.readouterr().out) == {"stopped": False, "pid": None, "freed_bytes": 0}


def test_the_command_line_imports_neither_torch_nor_grpc():
    heavy = "import holdfast.cli.main, sys; print({'torch', 'grpc', 'rich'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", heavy],
        env={**os.environ, "PYTHONPATH": str(SDK)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == "set()"
