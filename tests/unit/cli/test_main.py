"""The command line: what it refuses, how it says so, what it costs to start."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from argparse import SUPPRESS
from pathlib import Path

import pytest

from holdfast.cli.arguments import parse, parser
from holdfast.cli.catalogue import Target
from holdfast.cli.main import EXIT_FAILED, main

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
        ["retain", "gpt", "--last", "-1"],
        ["links", "gpt", "--valid", "30d"],
        ["show", "gpt", "--attempt", "3"],
        ["show", "gpt@1", "--attempt", "last"],
        ["verify", "/a/folder", "--attempt", "3"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: holdfast")


def test_an_option_of_the_script_before_its_name_is_told_where_it_belongs(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--lr", "3e-4", "train.py"])

    assert "arguments: --lr; what the script takes comes after its name" in capsys.readouterr().err


@pytest.mark.parametrize("rule", ["--last", "--every", "--spaced", "--best"])
def test_a_rule_of_0_is_refused_with_what_to_say_instead(rule, capsys):
    """It would be no rule, and without one the store keeps everything: the opposite of none."""
    with pytest.raises(SystemExit):
        main(["retain", "gpt", rule, "0"])

    assert "--all to keep everything; the newest checkpoint is never" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "target"),
    [("gpt", Target("gpt")), ("gpt@12", Target("gpt", 12)), ("a/b.c@0", Target("a/b.c", 0))],
)
def test_a_target_is_a_job_and_perhaps_a_step(text, target):
    assert parser().parse_args(["show", text]).target == target


@pytest.mark.parametrize("command", ["show", "verify", "rm", "pin", "unpin", "links"])
def test_an_attempt_chooses_between_checkpoints_of_one_step(command):
    args = parse([command, "gpt@12", "--attempt", "3"])

    assert Target("gpt", 12, 3) == (args.place if command == "verify" else args.target)


def commands():
    [choices] = [one.choices for one in parser()._actions if isinstance(one.choices, dict)]
    return choices


@pytest.mark.parametrize("name", commands())
def test_help_is_whole_sentences_and_an_example_that_works(name):
    command = commands()[name]
    said, _, example = command.epilog.partition("Example: holdfast ")
    arguments = [one for one in command._actions if one.dest != "help"]

    assert ("", name) == (said, shlex.split(example)[0]), "an example of this command"
    assert callable(parse(shlex.split(example)).command), "and it is parsed"
    for text in (command.description, *(a.help for a in arguments if a.help != SUPPRESS)):
        assert text, f"{name}: an argument says nothing"
        sentence = text.removesuffix(".")
        assert re.match(r"(The|This|With|Checkpoints|More)\b.* \w+s?\b", text), text
        assert sentence != text, f"{name}: {text!r} is no sentence: subject, verb, full stop"


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
