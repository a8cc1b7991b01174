"""The supervisor's rules: order, restarts, idleness, giving up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from holdfast_services.supervisor.domain import restarts
from holdfast_services.supervisor.domain.restarts import (
    START_WAITS,
    Answered,
    Exited,
    Kill,
    Publish,
    Start,
    StopAsked,
    Terminate,
    Tick,
)


@dataclass
class Driver:
    """Feeds events to the domain and keeps what it wants done; sayings apart."""

    stack: restarts.Stack
    now_s: float = 0.0
    said: list[str] = field(default_factory=list)

    def feed(
        self, event: restarts.SupervisorEvent, *, after_s: float = 0.0
    ) -> list[restarts.Action]:
        self.now_s += after_s
        self.stack, actions = restarts.handle(self.stack, event, self.now_s)
        self.said += [a.message for a in actions if isinstance(a, restarts.Say)]
        return [a for a in actions if not isinstance(a, restarts.Say)]


def new_driver(*nodes: str, idle_exit_s: float = 0.0) -> Driver:
    return Driver(restarts.new_stack(nodes, idle_exit_s=idle_exit_s, now_s=0.0))


def ready_driver(*nodes: str, idle_exit_s: float = 0.0) -> Driver:
    driver = new_driver(*nodes, idle_exit_s=idle_exit_s)
    driver.feed(Tick())
    for name in (restarts.METADATA, *nodes):
        driver.feed(Answered(name))
    return driver


def test_agents_start_once_metadata_answers_and_the_stack_is_published_once():
    driver = new_driver("a", "b")

    assert driver.feed(Tick()) == [Start("metadata")]
    assert driver.feed(Tick()) == []
    assert driver.feed(Answered("metadata")) == [Start("a"), Start("b")]
    assert driver.feed(Answered("b")) == []
    assert driver.feed(Answered("a")) == [Publish()]
    assert driver.feed(Tick()) == []


def test_a_child_that_dies_comes_back_after_a_wait_that_doubles_up_to_a_limit():
    driver = ready_driver("a")
    waits = []
    for _ in range(10):
        assert driver.feed(Exited("a", -9)) == []
        begin_s = driver.now_s
        while driver.feed(Tick(), after_s=0.1) != [Start("a")]:
            assert driver.now_s - begin_s <= START_WAITS.wait_s_max + 0.2
        waits.append(driver.now_s - begin_s)
        driver.feed(Answered("a"))

    assert waits[0] == pytest.approx(START_WAITS.first_s, abs=0.11)
    assert waits[1] == pytest.approx(2 * START_WAITS.first_s, abs=0.11)
    assert waits[-1] == pytest.approx(START_WAITS.wait_s_max, abs=0.11)
    assert sum("was killed by signal 9" in line for line in driver.said) == 10


def test_a_child_that_was_stable_waits_the_shortest_time_again():
    driver = ready_driver("a")
    for _ in range(4):
        driver.feed(Exited("a", 1))
        driver.feed(Tick(), after_s=START_WAITS.wait_s_max)
        driver.feed(Answered("a"))
    driver.feed(Exited("a", 1), after_s=restarts.STABLE_S)

    assert driver.feed(Tick(), after_s=START_WAITS.first_s) == [Start("a")]


def test_agents_come_back_while_metadata_is_away():
    driver = ready_driver("a")
    driver.feed(Exited("metadata", -9))
    driver.feed(Exited("a", -9))

    assert driver.feed(Tick(), after_s=START_WAITS.first_s) == [Start("metadata"), Start("a")]


def test_a_stack_that_never_was_ready_gives_up_and_says_why():
    driver = new_driver("a")
    driver.feed(Tick())
    for _ in range(restarts.STARTS_MAX):
        driver.feed(Exited("metadata", 1))
        driver.feed(Tick(), after_s=START_WAITS.wait_s_max)

    assert restarts.ended(driver.stack)
    assert driver.stack.failure == "metadata exited with code 1 3 times before the stack was ready"


def test_a_published_stack_never_gives_up():
    driver = ready_driver("a")
    for _ in range(50):
        driver.feed(Exited("a", 1))
        assert driver.feed(Tick(), after_s=START_WAITS.wait_s_max) == [Start("a")]

    assert not driver.stack.stopping


def test_a_child_that_never_answers_is_killed_once_and_started_again():
    driver = ready_driver("a")
    driver.feed(Exited("a", 1))
    driver.feed(Tick(), after_s=START_WAITS.first_s)

    assert driver.feed(Tick(), after_s=restarts.READY_S_MAX) == [Kill("a")]
    assert driver.feed(Tick(), after_s=1.0) == []
    driver.feed(Exited("a", -9))
    assert driver.feed(Tick(), after_s=START_WAITS.wait_s_max) == [Start("a")]


def test_agents_stop_before_metadata():
    driver = ready_driver("a", "b")

    assert driver.feed(StopAsked("test")) == [Terminate("a"), Terminate("b")]
    assert driver.feed(Exited("a", 0)) == []
    assert driver.feed(Exited("b", 0)) == [Terminate("metadata")]
    assert not restarts.ended(driver.stack)
    assert driver.feed(Exited("metadata", 0)) == []
    assert restarts.ended(driver.stack)


def test_what_does_not_stop_in_time_is_killed_once():
    driver = ready_driver("a")
    driver.feed(StopAsked("test"))

    assert driver.feed(Tick(), after_s=restarts.STOP_S_MAX) == [Kill("a")]
    assert driver.feed(Tick(), after_s=1.0) == []
    assert driver.feed(Exited("a", -9)) == [Terminate("metadata")]


def test_nothing_is_started_again_while_stopping():
    driver = ready_driver("a")
    driver.feed(Exited("a", 1))

    assert driver.feed(StopAsked("test")) == [Terminate("metadata")]
    assert driver.feed(Tick(), after_s=1.0) == []
    driver.feed(Exited("metadata", 0))
    assert restarts.ended(driver.stack)


def test_a_stack_without_trainers_ends_itself_when_it_was_asked_to():
    driver = ready_driver("a", idle_exit_s=10.0)

    assert driver.feed(Tick(needs_count=0), after_s=9.0) == []
    assert driver.feed(Tick(needs_count=1), after_s=9.0) == []
    assert driver.feed(Tick(needs_count=0), after_s=9.0) == []
    assert driver.feed(Tick(needs_count=0), after_s=1.0) == [Terminate("a")]


def test_an_idle_stack_stays_when_nobody_said_otherwise():
    driver = ready_driver("a")

    assert driver.feed(Tick(needs_count=0), after_s=1e6) == []


def test_the_worker_starts_with_the_agents_and_the_stack_does_not_wait_for_it():
    """P4: an object store that is away keeps nobody from training."""
    driver = new_driver("a", restarts.PERSISTENCE)
    driver.feed(Tick())

    assert driver.feed(Answered("metadata")) == [Start("a"), Start("persistence")]
    assert driver.feed(Answered("a")) == [Publish()]
    assert driver.feed(Answered("persistence")) == []


def test_a_worker_that_cannot_start_never_ends_the_stack():
    driver = new_driver("a", restarts.PERSISTENCE)
    driver.feed(Tick())
    driver.feed(Answered("metadata"))
    for _ in range(restarts.STARTS_MAX + 1):
        driver.feed(Exited("persistence", 1))
        assert driver.feed(Tick(), after_s=START_WAITS.wait_s_max) == [Start("persistence")]

    assert driver.feed(Answered("a")) == [Publish()]


def test_the_worker_stops_before_the_agents_that_it_reads_from():
    driver = ready_driver("a", restarts.PERSISTENCE)

    assert driver.feed(StopAsked("test")) == [Terminate("persistence")]
    assert driver.feed(Tick(), after_s=restarts.STOP_S_MAX) == [Kill("persistence")]
    assert driver.feed(Exited("persistence", -9)) == [Terminate("a")]
    assert driver.feed(Exited("a", 0)) == [Terminate("metadata")]
    driver.feed(Exited("metadata", 0))
    assert restarts.ended(driver.stack)


def test_agents_that_are_gone_already_do_not_hold_up_the_end():
    driver = ready_driver("a", restarts.PERSISTENCE)
    driver.feed(Exited("a", 1))
    driver.feed(Exited("persistence", 1))

    assert driver.feed(StopAsked("test")) == [Terminate("metadata")]
