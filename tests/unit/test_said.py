"""What all ranks of a node would say is said by one of them, in the first of all rounds."""

import pytest

from holdfast.said import FOLDER, is_first_to_say


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def test_a_text_is_said_once_and_another_one_too(folder):
    assert [is_first_to_say(text) for text in ("a", "b", "a", "b")] == [True, True, False, False]


def test_another_command_says_it_too(folder, monkeypatch):
    """One that a rank has started: its reader may be another one."""
    assert is_first_to_say("a")
    monkeypatch.setattr("sys.argv", ["other.py"])

    assert is_first_to_say("a")


@pytest.mark.parametrize("name", ["", "gone"])
def test_without_a_folder_each_rank_says_it(folder, monkeypatch, name):
    monkeypatch.setenv(FOLDER, str(folder / name) if name else "")

    assert all(is_first_to_say("a\udcff") for _ in range(2))
