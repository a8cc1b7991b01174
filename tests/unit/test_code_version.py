"""What is recorded of how an attempt was started (G19): a real repository, and none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast import code_version
from holdfast.core.origin import COMMAND_LENGTH_MAX, Origin, Tree, kept
from holdfast.errors import InvalidRequestError


def git(folder, *words):
    made = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(made, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("print(1)\n")
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


@pytest.fixture
def patient(monkeypatch):
    """A machine that is busy with tests answers later than a start would wait for."""
    monkeypatch.setattr(code_version, "GIT_S_MAX", 30.0)


def test_the_commit_of_the_script_and_whether_files_have_changed_since(
    repository, monkeypatch, patient
):
    monkeypatch.setattr(sys, "argv", [str(repository / "train.py"), "--lr", "3e-4", "two words"])
    head = git(repository, "rev-parse", "HEAD")

    clean = code_version.origin({})
    (repository / "train.py").write_text("print(2)\n")
    dirty = code_version.origin({})

    assert (head, Tree.CLEAN) == (clean.commit, clean.tree)
    assert (head, Tree.DIRTY) == (dirty.commit, dirty.tree)
    assert clean.command.endswith("train.py --lr 3e-4 'two words'")
    assert "@" in clean.user


def test_a_file_that_git_does_not_know_is_no_change(repository, patient):
    (repository / "output.log").write_text("x")

    assert code_version.of_repository(repository)[1] is Tree.CLEAN


@pytest.mark.parametrize("what", ["no repository", "no commit", "no git"])
def test_where_nothing_is_known_of_the_code_nothing_is_said(tmp_path, monkeypatch, patient, what):
    """Also where ``git`` finds a repository further up, it is the one that the script is in."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    if what == "no commit":
        git(tmp_path, "init", "-q")
    if what == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))

    assert code_version.of_repository(tmp_path) == ("", Tree.UNKNOWN)


def test_a_git_that_hangs_keeps_a_start_no_longer_than_its_limit(tmp_path, monkeypatch):
    """P4: a start waits for nothing that it does not need."""
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(code_version, "GIT_S_MAX", 0.05)

    assert code_version.of_repository(tmp_path) == ("", Tree.UNKNOWN)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("4fe1c9a", ("4fe1c9a", Tree.CLEAN)),
        ("4fe1c9a-dirty", ("4fe1c9a", Tree.DIRTY)),
        ("image:2026-11", ("image:2026-11", Tree.CLEAN)),
    ],
)
def test_a_commit_that_the_user_names_wins_over_the_repository(
    repository, monkeypatch, text, found
):
    """Images have no repository; whoever builds one knows."""
    monkeypatch.setattr(sys, "argv", [str(repository / "train.py")])

    made = code_version.origin({"HOLDFAST_COMMIT": text})

    assert found == (made.commit, made.tree)


def test_a_command_line_with_a_secret_is_left_out_if_asked(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-key=hunter2"])

    made = code_version.origin({"HOLDFAST_RECORD_COMMAND": "0", "HOLDFAST_COMMIT": "x"})

    assert not made.command
    with pytest.raises(InvalidRequestError, match="HOLDFAST_RECORD_COMMAND"):
        code_version.origin({"HOLDFAST_RECORD_COMMAND": "no", "HOLDFAST_COMMIT": "x"})


def test_what_cannot_be_kept_is_cut_and_marked_and_never_refused():
    odd = Origin(commit="a\0b", command="x" * 5000, user="u\ud800\n")

    assert kept(odd) == Origin(commit="a?b", command="x" * COMMAND_LENGTH_MAX, user="u??")
