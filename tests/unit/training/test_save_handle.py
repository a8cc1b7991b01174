"""A save handle: levels rise, waits end at a level, an error or a deadline."""

import threading

import pytest

from holdfast.core.persistence_rules import PersistRule
from holdfast.core.session import StepLevels
from holdfast.errors import (
    ExhaustedError,
    InvalidRequestError,
    OutcomeUnknownError,
    PreconditionError,
    UnavailableError,
)
from holdfast.training.save_handle import SaveHandle, postponed_step

REACHABLE = frozenset({"staged", "local", "replicated"})
RULE = "persist= takes the first step committed at or after each 100"


def test_a_wait_is_met_by_a_stronger_level():
    """F19"""
    handle = SaveHandle(7, reachable=REACHABLE)
    handle.learn(StepLevels(step=7, local=True, replicated=True))

    assert handle.wait("local", timeout_s=0).level == "replicated"


def test_weaker_news_does_not_lower_the_level():
    handle = SaveHandle(7, reachable=REACHABLE)
    handle.learn(StepLevels(step=7, local=True, replicated=True))
    handle.learn(StepLevels(step=7, local=True))
    handle.reach("staged")

    assert handle.level == "replicated"


def test_a_wait_wakes_when_the_level_is_reached_elsewhere():
    handle = SaveHandle(7, reachable=REACHABLE)
    waiter = threading.Thread(target=handle.wait, args=("local", 30))
    waiter.start()
    handle.learn(StepLevels(step=7, sealed=True, local=True))
    waiter.join(30)

    assert not waiter.is_alive()


def test_an_abandoned_save_ends_every_wait_at_once():
    """F61: what failed is named."""
    handle = SaveHandle(7, reachable=REACHABLE)
    handle.learn(StepLevels(step=7, abandoned=True, reason="rank 1 had no free slot"))

    with pytest.raises(PreconditionError, match="rank 1 had no free slot"):
        handle.wait("local")
    assert handle.ended


def test_what_an_abandoned_save_concerns_is_said_once():
    handle = SaveHandle(7, reachable=REACHABLE)
    handle.fail(UnavailableError("no slot", step=7, node="a"))

    with pytest.raises(PreconditionError) as refused:
        handle.wait("local")
    assert {"step": "7", "node": "a"} == refused.value.context
    assert 1 == str(refused.value).count("step 7")


def test_a_level_that_this_step_is_not_due_for_is_refused_at_once():
    handle = SaveHandle(7, reachable=REACHABLE)

    with pytest.raises(PreconditionError, match="not become durable: persist= is not set"):
        handle.wait("durable")


def persisted(step=7):
    return SaveHandle(step, reachable=REACHABLE | {"durable"}, rule=RULE)


def test_a_committed_step_that_is_not_draining_is_not_due_for_durable():
    """Said at once, with the rule: which steps go is decided as they are committed."""
    handle = persisted()
    with pytest.raises(OutcomeUnknownError, match="did not become durable"):
        handle.wait("durable", timeout_s=0)
    handle.learn(StepLevels(step=7, sealed=True, local=True))

    with pytest.raises(PreconditionError, match=f"step 7 will not become durable: {RULE}"):
        handle.wait("durable")
    assert not handle.ended
    handle.learn(StepLevels(step=7, sealed=True, local=True, replicated=True))
    assert handle.ended


def test_a_wait_for_durable_ends_at_once_when_the_step_turns_out_not_to_be_due():
    handle = persisted()
    refused = []

    def wait():
        with pytest.raises(PreconditionError, match="not become durable: persist= takes"):
            handle.wait("durable", timeout_s=30)
        refused.append(True)

    waiter = threading.Thread(target=wait)
    waiter.start()
    handle.learn(StepLevels(step=7, sealed=True, local=True))
    waiter.join(30)

    assert refused


def test_a_draining_step_becomes_durable():
    """F85"""
    handle = persisted()
    handle.learn(StepLevels(step=7, local=True, replicated=True, draining=True))
    assert (handle.draining, handle.ended) == (True, False)
    with pytest.raises(
        OutcomeUnknownError, match="step 7 is replicated and did not become durable"
    ):
        handle.wait("durable", timeout_s=0)
    handle.learn(StepLevels(step=7, local=True, replicated=True, durable=True))

    assert handle.wait("durable", timeout_s=0).level == "durable"
    assert (handle.draining, handle.ended) == (False, True)


def test_a_drain_that_was_given_up_is_told_from_a_step_that_was_never_due():
    handle = persisted()
    handle.learn(StepLevels(step=7, local=True, replicated=True, draining=True))
    handle.learn(StepLevels(step=7, local=True, replicated=True))

    with pytest.raises(PreconditionError, match=r"upload .* was given up, .* persist_lost"):
        handle.wait("durable", timeout_s=0)
    assert handle.wait("replicated", timeout_s=0) is handle
    assert handle.ended


def test_a_step_that_was_pinned_later_can_be_waited_for_again():
    handle = persisted()
    handle.learn(StepLevels(step=7, local=True))
    handle.learn(StepLevels(step=7, local=True, draining=True))

    with pytest.raises(OutcomeUnknownError):
        handle.wait("durable", timeout_s=0)


def test_a_level_that_was_reached_stays_good_after_a_later_failure():
    handle = SaveHandle(7, reachable=REACHABLE)
    handle.reach("local")
    handle.fail(ExhaustedError("no room for copies"))

    assert handle.wait("local", timeout_s=0) is handle
    with pytest.raises(PreconditionError, match="no room for copies"):
        handle.wait("replicated", timeout_s=0)


def test_a_deadline_says_how_far_it_got():
    handle = SaveHandle(7, reachable=REACHABLE)
    handle.reach("staged")

    with pytest.raises(OutcomeUnknownError, match="step 7 is staged and did not become local"):
        handle.wait("local", timeout_s=0)
    assert issubclass(OutcomeUnknownError, TimeoutError)


def test_an_unknown_level_is_refused():
    with pytest.raises(InvalidRequestError, match="'saved'"):
        SaveHandle(7, reachable=REACHABLE).wait("saved")


def committed(step, **fields):
    return StepLevels(step=step, sealed=True, local=True, **fields)


@pytest.mark.parametrize(
    ("rule", "steps", "expected"),
    [
        (PersistRule(steps=10), [committed(21), committed(10, draining=True)], 21),
        (PersistRule(steps=10), [committed(19), committed(10, draining=True)], -1),
        (PersistRule(steps=10), [committed(21), committed(10, durable=True)], -1),
        (PersistRule(steps=10), [committed(20, draining=True)], -1),
        (
            PersistRule(steps=10),
            [committed(25), committed(20, durable=True), committed(7, draining=True)],
            -1,
        ),
        (PersistRule(steps=10), [StepLevels(step=21), committed(10, draining=True)], -1),
        (PersistRule(seconds=5), [committed(11), committed(10, draining=True)], 11),
        (PersistRule(steps=10), [], -1),
    ],
    ids=["due", "not due", "idle", "newest", "pinned", "not committed", "by time", "nothing"],
)
def test_only_the_newest_step_that_is_due_may_be_postponed(rule, steps, expected):
    """F88: one step drains at a time; the newest one there is goes after it."""
    assert expected == postponed_step(rule, steps)


def test_a_postponed_step_can_be_waited_for_until_another_goes_instead():
    """The last step of a run becomes durable although an older one was still on its way."""
    handle = persisted(20)
    handle.learn(committed(20), postponed=True)
    with pytest.raises(OutcomeUnknownError):
        handle.wait("durable", timeout_s=0)
    assert not handle.ended

    handle.learn(committed(20))
    with pytest.raises(PreconditionError, match="not become durable: persist= takes"):
        handle.wait("durable", timeout_s=0)


LACK = "replicas=1 needs 2 live nodes, but only 1 is there"


def test_missing_nodes_end_a_wait_for_copies_at_once_and_no_other():
    """X9: while they are missing; ``error`` says it too."""
    handle = SaveHandle(7, reachable=REACHABLE)
    handle.lack_copies(LACK)

    with pytest.raises(PreconditionError, match=LACK):
        handle.wait("replicated")
    assert not handle.ended
    handle.reach("local")
    assert handle.wait("local", timeout_s=0) is handle
    assert LACK in str(handle.error)
    assert (handle.ended, handle.abandoned) == (True, False)


def test_nodes_that_come_back_let_a_step_be_replicated_after_all():
    handle = SaveHandle(7, reachable=REACHABLE)
    handle.reach("local")
    handle.lack_copies(LACK)
    handle.lack_copies("")

    assert handle.error is None
    assert not handle.ended
    with pytest.raises(OutcomeUnknownError):
        handle.wait("replicated", timeout_s=0)
    handle.reach("replicated")
    handle.lack_copies(LACK)
    assert handle.wait("replicated", timeout_s=0).error is None


def test_a_shortage_wakes_who_waits_for_copies():
    """Nobody waits for what cannot come, nor leaves before the step is ``local``."""
    handle = SaveHandle(7, reachable=REACHABLE)
    waiter = threading.Thread(target=handle.wait_copies, args=(30,))
    waiter.start()
    handle.lack_copies(LACK)
    assert waiter.is_alive()
    handle.reach("local")
    waiter.join(30)

    assert not waiter.is_alive()


def test_copies_do_not_matter_to_the_object_store():
    handle = persisted()
    handle.lack_copies(LACK)
    handle.learn(StepLevels(step=7, local=True, draining=True))
    handle.learn(StepLevels(step=7, local=True, durable=True))

    assert handle.wait("replicated", timeout_s=0).error is None
