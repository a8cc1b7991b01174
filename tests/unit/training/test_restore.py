"""What of a checkpoint a user may ask for, and which decision a rank takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.core.facts import Decision, DecisionState
from holdfast.core.ids import CheckpointId, Generation, RunId, Step
from holdfast.core.session import RestoreView, SessionView
from holdfast.errors import InvalidRequestError, StaleGenerationError
from holdfast.training.restore import Decided, Part, decide, restore

NAMES = ("model", "optimizer")


def test_all_or_some_names_of_the_state_are_loaded():
    """X6."""
    assert Part(strict=False) == Part.of(NAMES, strict=False, only=None)
    assert Part(only=("model",)) == Part.of(NAMES, strict=True, only={"model"})


@pytest.mark.parametrize("only", ["model", ["modle"], ["model.weight"]])
def test_a_name_that_the_state_lacks_is_refused(only):
    """A typing error must not load nothing."""
    with pytest.raises(InvalidRequestError, match="pass names of state"):
        Part.of(NAMES, strict=True, only=only)


# -- which decision is taken ----------------------------------------------------------------------


class Agent:
    """What a rank's session offers a restore: its number, and the view that its agent has."""

    generation = 2

    def __init__(self, **fields):
        decision = Decision(number=1, state=DecisionState.CONFIRMED, fresh=True, **fields)
        self.view = SessionView(version="1", restore=RestoreView(decision=decision))
        self.began = []

    def wait_view(self, accept, *, timeout_s):
        return self.view if accept(self.view) else None

    def begun(self, restored):
        self.began.append(restored)


def restored_by(agent):
    return restore(
        agent, None, Path(), timeout_s=1.0, lost_is_fresh=False, part=Part(), expected=None
    )


def test_a_rank_begins_by_a_decision_for_its_own_attempt():
    agent = Agent(generation=2)

    assert restored_by(agent) is None
    assert agent.began == [None]


@pytest.mark.parametrize("state", [s for s in DecisionState if s is not DecisionState.UNSPECIFIED])
def test_a_rank_ends_that_was_answered_another_number_than_its_agent(state):
    """M1, M2: the catalogue was lost between two registrations; the rank would train as 2 by the
    decision of 1, and be stopped at its next registration."""
    agent = Agent(generation=1)
    decision = replace(agent.view.restore.decision, state=state, fresh=False)
    agent.view = replace(agent.view, restore=RestoreView(decision=decision))

    with pytest.raises(StaleGenerationError, match="two numbers, 2 and 1: start the job"):
        restored_by(agent)
    assert not agent.began


def chosen(step, notes=""):
    """Return a view in which ``step`` is confirmed and here."""
    decision = Decision(
        number=1,
        state=DecisionState.CONFIRMED,
        generation=2,
        checkpoint=CheckpointId(RunId("r"), Step(step), Generation(1)),
        notes=notes,
    )
    return SessionView(version="1", restore=RestoreView(decision=decision, ready=True))


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("", {}),
        ('{"width":5}', {"width": 5}),
        ("[5]", {}),
        ("no JSON", {}),
        ('{"a":' + "9" * (32 << 10) + "}", {}),
    ],
)
def test_what_is_decided_has_step_attempt_and_notes(text, notes):
    """P9: what is no short JSON object is left out."""
    agent = Agent(generation=2)
    agent.view = chosen(7, text)

    decided = decide(agent, timeout_s=1.0, lost_is_fresh=False)

    assert Decided(step=7, attempt=1, notes=notes, sources={}) == decided
    assert not agent.began, "nothing is loaded yet"


@pytest.mark.parametrize("now", [chosen(5), Agent(generation=2).view], ids=["other", "none"])
def test_what_is_loaded_is_what_was_decided(now):
    """The model was built for it; the catalogue was lost since."""
    agent = Agent(generation=2)
    agent.view = chosen(7)
    decided = decide(agent, timeout_s=1.0, lost_is_fresh=False)
    agent.view = now

    with pytest.raises(StaleGenerationError, match="start the job again"):
        restore(
            agent, None, Path(), timeout_s=1.0, lost_is_fresh=False, part=Part(), expected=decided
        )
    assert not agent.began
