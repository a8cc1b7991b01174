"""Tables for people, JSON for machines; progress only on a terminal."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import contextmanager

import pytest

from holdfast.cli import output
from holdfast.cli.output import Report, Table, plain, print_report, progress

END = "<all that was told>"
TABLE = Table(("job", "newest step"), (("gpt", "12"), ("team/longer", "-")))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(report: Report, *, as_json: bool, out: io.StringIO | None = None) -> str:
    stream = out or io.StringIO()
    print_report(report, as_json=as_json, out=stream)
    return stream.getvalue()


def test_plain_columns_are_aligned_and_end_without_blanks():
    assert plain(TABLE) == "job          newest step\ngpt          12\nteam/longer  -"


def test_a_table_without_rows_still_names_its_columns():
    assert plain(Table(("a", "b"), ())) == "a  b"


def test_json_is_the_data_and_nothing_else():
    report = Report(data=[{"job": "gpt"}], text=["words", TABLE])

    assert json.loads(printed(report, as_json=True)) == [{"job": "gpt"}]


def test_people_get_words_and_tables_in_order():
    report = Report(data=None, text=["words", TABLE])

    assert printed(report, as_json=False) == f"words\n{plain(TABLE)}\n"


@pytest.mark.parametrize("out", [io.StringIO, Terminal])
def test_what_others_have_said_never_steers_the_terminal(out):
    """Events quote what scripts raise; lines of ours stay lines."""
    said = "\x1b]0;title\x07red"
    report = Report(data=None, text=[f"first\n{said}", Table(("event",), ((said,),))])
    text = printed(report, as_json=False, out=out())

    assert not {"\x1b]", "\x07"} & {text[at : at + n] for at in range(len(text)) for n in (1, 2)}
    assert "first\n" in text
    assert 2 == text.count(r"\x1b]0;title\x07red")


def test_a_terminal_gets_all_cells_too_and_markup_is_not_interpreted():
    table = Table(("job",), (("[red]x[/red]",),))

    assert "[red]x[/red]" in printed(Report(data=None, text=[table]), as_json=False, out=Terminal())


def test_progress_draws_nothing_when_nobody_watches(capsys):
    with progress("verifying", 2) as advance:
        advance()
        advance()

    assert capsys.readouterr() == ("", "")


@contextmanager
def watched(monkeypatch):
    """Make standard error a terminal; yield a list that gets what it was told in the end."""
    ours, theirs = os.openpty()
    told: list[str] = []
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        yield told
        print(END, end="", file=terminal, flush=True)
        text = ""
        while not text.endswith(END):  # a terminal hands on what it was told in pieces
            text += os.read(ours, 4096).decode()
        told.append(text.removesuffix(END))
    os.close(ours)


def test_a_bar_grows_with_the_pieces_when_somebody_watches(monkeypatch):
    monkeypatch.setattr(output, "SHOW_PROGRESS_AFTER_S", 0.0)
    with watched(monkeypatch) as told, progress("verifying", 3) as advance:
        for _ in range(3):
            advance()

    assert told[0].replace("\r\n", "\n").split("\r") == [
        "",
        f"verifying [{'#' * 10}{'.' * 20}] 1/3",
        f"verifying [{'#' * 20}{'.' * 10}] 2/3",
        f"verifying [{'#' * 30}] 3/3\n",
    ]


def test_what_is_done_at_once_draws_no_bar(monkeypatch):
    monkeypatch.setattr(output, "SHOW_PROGRESS_AFTER_S", 3600.0)
    with watched(monkeypatch) as told:
        with progress("verifying", 1) as advance:
            advance()
        print("end", end="", file=sys.stderr)

    assert told == ["end"]
