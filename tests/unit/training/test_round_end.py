"""A rank at the last step of its round: it waits to be ended, and never for ever."""

import signal
import threading
from dataclasses import replace

import pytest
from tests.unit.training.savers import attempt

from holdfast.core.announcements import Announcement, SaveReason
from holdfast.core.session import SessionView
from holdfast.errors import UnavailableError
from holdfast.training import round_end
from holdfast.training.preemption import Preemption
from holdfast.training.round_end import RoundEnd, goes_on
from holdfast.training.save_handle import SaveHandle
from holdfast.training.session import AgentSession

LAST = Announcement(step=7, reason=SaveReason.RESCALE)
TAKEN_BACK = replace(LAST, reason=SaveReason.OPERATOR)
JOIN_S_MAX = 60.0


class Rank:
    """One Checkpointer's part in the end of a round; ``save`` runs as training, on a thread."""

    def __init__(self, folder):
        self.session = AgentSession(folder / "nobody.sock")
        self.session._spec = attempt()
        self.preemption = Preemption({signal.SIGTERM}, grace_s=60)
        self.end = RoundEnd(self.session, self.preemption)
        self.handle = SaveHandle(7, reachable=frozenset({"staged", "local"}))
        self.looked = threading.Event()
        self.hear(LAST)

    def hear(self, announcement, **more):
        view = SessionView(version="1", announcement=announcement, **more)
        self.session._take(view, lambda _: None)

    def save(self, announced=LAST):
        self.result = None
        self.training = threading.Thread(target=self._save, args=(announced,))
        self.training.start()
        return self

    def _save(self, announced):
        self.result = self.end.saved(announced, self.handle)

    def goes_on(self):
        """Return what it was told, once it goes on."""
        self.training.join(JOIN_S_MAX)
        assert not self.training.is_alive(), "it waits for ever"
        return self.result

    def close(self):
        self.end.close()
        self.session.close(timeout_s=0.1)


@pytest.fixture
def rank(tmp_path):
    made = Rank(tmp_path)
    made.handle.reach("staged")
    yield made
    made.close()


@pytest.fixture
def waits(monkeypatch):
    """Nothing but news ends a wait; set once a rank waits for its agent's news."""
    monkeypatch.setattr(round_end, "END_S_MAX", 1e6)
    reached, wait = threading.Event(), AgentSession.wait_view

    def waiting(*arguments, **options):
        reached.set()
        return wait(*arguments, **options)

    monkeypatch.setattr(AgentSession, "wait_view", waiting)
    return reached


@pytest.mark.parametrize("reason", [reason for reason in SaveReason if not reason.ends_round])
def test_after_any_other_announced_step_training_goes_on(rank, waits, reason):
    assert rank.save(Announcement(step=7, reason=reason)).goes_on() is False
    assert not waits.is_set()


def test_it_goes_on_when_the_round_does(rank, waits):
    rank.save()
    assert waits.wait(JOIN_S_MAX)
    rank.hear(TAKEN_BACK)

    assert rank.goes_on() is False


def test_it_goes_on_when_the_step_was_given_up(rank, waits):
    rank.save()
    assert waits.wait(JOIN_S_MAX)
    rank.handle.fail(UnavailableError("another rank has no memory"))

    assert rank.goes_on() is False


def test_a_save_that_fails_at_once_is_not_waited_for(tmp_path, waits):
    rank = Rank(tmp_path)
    rank.handle.fail(UnavailableError("no memory"))

    assert rank.save().goes_on() is False
    assert not waits.is_set()
    rank.close()


def test_a_signal_ends_the_wait_and_the_rank(rank, waits):
    rank.save()
    assert waits.wait(JOIN_S_MAX)
    rank.preemption.hear(signal.SIGTERM)

    assert rank.goes_on() is True


def test_a_signal_that_came_before_leaves_nothing_to_wait_for(tmp_path, waits):
    rank = Rank(tmp_path)
    rank.preemption.hear(signal.SIGTERM)

    assert rank.save().goes_on() is True, "its copy is another wait's affair"
    assert not waits.is_set()
    rank.close()


def test_the_wait_for_the_end_begins_with_the_end_of_the_copy(rank, monkeypatch):
    """A large state takes longer than a launcher needs: else the steps behind would be lost."""
    awaited = []
    monkeypatch.setattr(SaveHandle, "wait", lambda _, level, __: awaited.append(level))
    monkeypatch.setattr(round_end, "END_S_MAX", 0.0)

    assert rank.save().goes_on() is False
    assert awaited == ["staged"]


@pytest.mark.parametrize("limit", ["COPY_S_MAX", "END_S_MAX"])
def test_whatever_happens_training_goes_on(tmp_path, monkeypatch, limit):
    """A copy that does not end; a round that nobody ends."""
    monkeypatch.setattr(round_end, limit, 0.2)
    rank = Rank(tmp_path)
    if limit == "END_S_MAX":
        rank.handle.reach("staged")

    assert rank.save().goes_on() is False
    rank.close()


def test_of_several_in_a_process_the_last_one_to_save_waits(tmp_path, waits):
    (tmp_path / "other").mkdir()
    first, second = Rank(tmp_path), Rank(tmp_path / "other")
    for rank in (first, second):
        rank.handle.reach("staged")
    assert first.save().goes_on() is False
    assert not waits.is_set()

    second.save()
    assert waits.wait(JOIN_S_MAX)
    second.hear(TAKEN_BACK)
    assert second.goes_on() is False

    waits.clear()
    second.hear(replace(LAST, step=9))
    first.save()
    assert first.goes_on() is False, "the other one's last step is still to come"
    second.close()
    first.save()
    assert waits.wait(JOIN_S_MAX), "one that is closed has none"
    first.hear(TAKEN_BACK)
    first.goes_on()
    first.close()


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (SessionView(version="1", announcement=LAST), False),
        (SessionView(version="1"), False),
        (SessionView(version="1", announcement=TAKEN_BACK), True),
        (SessionView(version="1", announcement=replace(LAST, step=20)), True),
        (SessionView(version="1", announcement=LAST, fenced=True), True),
    ],
)
def test_what_an_agent_says_to_a_rank_that_waits(view, expected):
    """One that has just restarted says nothing yet: that is no word to go on."""
    assert goes_on(view, LAST) is expected
