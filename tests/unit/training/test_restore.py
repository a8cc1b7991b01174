"""What of a checkpoint a user may ask for, and which decision a rank takes."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from tests.said import attempt_spec

from holdfast.core.decision import Decision, DecisionState
from holdfast.core.ids import CheckpointId, Generation, RunId, ShardId, Step
from holdfast.core.needs import ByteRange, ShardNeed
from holdfast.core.session import LocalSegment, RestoreView, SessionView
from holdfast.core.shard import Shard
from holdfast.errors import (
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    StaleGenerationError,
    UnavailableError,
)
from holdfast.state.boxes_here import LocalBoxes
from holdfast.state.loading import Differences
from holdfast.training.headers import Headers
from holdfast.training.naming import Naming, Scope
from holdfast.training.restore import Decided, decide, restore
from holdfast.training.restore_needs import own_needs

NAMES = ("model", "optimizer")
NOWHERE = Path("/nowhere")


def test_all_or_some_names_of_the_state_are_loaded():
    """X6."""
    assert Scope(strict=False) == Scope.of(NAMES, strict=False, only=None)
    assert Scope(only=("model",)) == Scope.of(NAMES, strict=True, only={"model"})


@pytest.mark.parametrize("only", ["model", ["modle"], ["model.weight"]])
def test_a_name_that_the_state_lacks_is_refused(only):
    """A typing error must not load nothing."""
    with pytest.raises(InvalidRequestError, match="pass names of state"):
        Scope.of(NAMES, strict=True, only=only)


# -- which decision is taken ----------------------------------------------------------------------


class Agent:
    """What a rank's session offers a restore: its number, and the view that its agent has.

    Once this rank of 2 has named needs it gets the view of ``answers`` that they are answered by.
    """

    generation = 2

    def __init__(self, *, generation=2, names_needs=False, answers=()):
        self.spec = attempt_spec(rank=1, world_size=2, names_needs=names_needs)
        self.needs, self.answers = None, list(answers)
        self.needs_of_all = False
        self.headers = Headers(lambda *_: ())
        decision = Decision(
            number=1, state=DecisionState.CONFIRMED, generation=generation, fresh=True
        )
        self.view = SessionView(version="1", restore=RestoreView(decision=decision))
        self.began = []

    def name(self, needs, *, of_all=False):
        self.needs, self.needs_of_all = needs, of_all
        if self.answers:
            self.view = self.answers.pop(0)

    def wait_view(self, accept, *, timeout_s):
        return self.view if accept(self.view) else None

    def begun(self, restored):
        self.began.append(restored)


def restored_by(agent):
    return restore(
        agent,
        State(agent),
        Path(),
        timeout_s=1.0,
        lost_is_fresh=False,
        scope=Scope(),
        expected=None,
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

    decided = decide(agent, NOWHERE, timeout_s=1.0, lost_is_fresh=False, naming=Naming())

    assert Decided(step=7, attempt=1, notes=notes, sources={}, value=dict) == decided
    assert not agent.began, "nothing is loaded yet"


@pytest.mark.parametrize("now", [chosen(5), Agent(generation=2).view], ids=["other", "none"])
def test_what_is_loaded_is_what_was_decided(now):
    """The model was built for it; the catalogue was lost since."""
    agent = Agent(generation=2)
    agent.view = chosen(7)
    decided = decide(agent, NOWHERE, timeout_s=1.0, lost_is_fresh=False, naming=Naming())
    agent.view = now

    with pytest.raises(StaleGenerationError, match="start the job again"):
        restore(
            agent,
            State(agent),
            Path(),
            timeout_s=1.0,
            lost_is_fresh=False,
            scope=Scope(),
            expected=decided,
        )
    assert not agent.began


# -- what is needed of it -------------------------------------------------------------------------


def proposed(step=7, *, saved=2, count=None, **fields):
    """Return a view in which ``step`` is proposed, saved by ``saved`` ranks."""
    decision = Decision(
        number=1,
        state=DecisionState.PROPOSED,
        generation=2,
        checkpoint=CheckpointId(RunId("r"), Step(step), Generation(1)),
        world_size=saved,
        shards_count=saved if count is None else count,
    )
    return SessionView(version="1", restore=RestoreView(decision=decision, **fields))


def confirmed(view, needs, ranges=()):
    """Return the view in which that is confirmed and here, for the needs of this number.

    Those named first are of one segment, the others of all.
    """
    decision = replace(view.restore.decision, state=DecisionState.CONFIRMED)
    count = decision.shards_count if needs > 1 else 1
    here = tuple(
        LocalSegment(
            shard=Shard(
                id=ShardId(RunId("r"), Step(7), Generation(1), rank), job="j", world_size=2,
                plan_hash="", length_bytes=1, root_digest=b"",
            ),
            file_name=f"{rank}.seg",
            source="memory",
            ranges=ranges,
        )
        for rank in range(count)
    )  # fmt: skip
    restore = RestoreView(decision=decision, ready=True, needs=needs, segments=here)
    return replace(view, restore=restore)


@pytest.mark.parametrize(
    ("rank", "size", "saved", "count", "named"),
    [
        (1, 2, 2, 2, {1}),
        (0, 1, 2, 2, {0}),
        (1, 2, 4, 4, {0, 1}),
        (3, 4, 2, 2, {0, 1}),
        (1, 2, 2, 4, None),
    ],
    ids=["same", "fewer", "smaller world", "larger world", "volumes"],
)
def test_a_rank_with_a_state_of_its_own_needs_the_segment_that_it_takes(
    rank, size, saved, count, named
):
    """And rank 0's in another world size: its seed makes the new streams (state.capture)."""
    decision = proposed(saved=saved, count=count).restore.decision
    spec = attempt_spec(rank=rank, world_size=size, names_needs=True)
    needs = own_needs(decision, spec, 1, whole=False)

    assert needs.whole is (named is None)
    if named is not None:
        assert {need.rank for need in needs.shards} == named
        assert not any(need.ranges for need in needs.shards)


def decided(agent):
    return decide(agent, NOWHERE, timeout_s=1.0, lost_is_fresh=False, naming=Naming())


def test_needs_are_named_for_each_checkpoint_that_is_proposed():
    later, earlier = proposed(7), proposed(5)
    agent = Agent(names_needs=True, answers=[earlier, confirmed(earlier, needs=2)])
    agent.view = later

    assert decided(agent).step == 5
    assert (agent.needs.number, agent.needs.checkpoint.step) == (2, 5)


def test_an_answer_to_needs_that_were_named_before_does_not_count():
    """It would load without what was named since."""
    view = proposed()
    agent = Agent(names_needs=True, answers=[confirmed(view, needs=0)])
    agent.view = view

    with pytest.raises(UnavailableError, match="no checkpoint was chosen and fetched"):
        decided(agent)


@pytest.mark.parametrize("reason", ["whole job", "catalogue lost"])
def test_nothing_is_named_where_all_is_needed_or_the_shards_are_unknown(reason):
    agent = Agent(names_needs=reason == "catalogue lost")
    agent.view = proposed(count=0) if reason == "catalogue lost" else proposed()

    with pytest.raises(UnavailableError):
        decided(agent)
    assert agent.needs is None


FOUND = Differences()


class State:
    """A capture that finds all it wants once all of the checkpoint is there."""

    boxes = None

    def __init__(self, agent):
        self.agent = agent
        self.tries = []

    def load(self, segments, **how):
        self.tries.append(self.agent.needs.whole)
        if not self.agent.needs.whole:
            raise NotReadyError("the checkpoint has no tensor 'w'")
        return FOUND

    def put_orders(self, segments):
        return ()

    def apply_rng(self):
        pass


class Files:
    """The segments that are read: tensors by name, of what was named."""

    def __init__(self):
        self.names = ("rank.1.model.w", "holdfast.rank.1")

    def specs(self):
        return dict.fromkeys(self.names)


@pytest.fixture
def files(monkeypatch):
    files = Files()
    opened = nullcontext(files)
    monkeypatch.setattr("holdfast.training.restore.open_files", lambda *_, **parse: opened)
    return files


@pytest.fixture
def no_files(files):
    """Nothing is in them that matters."""


def restoring(agent, *, strict=True):
    state = State(agent)
    agent.report = lambda change: None
    view = agent.view
    agent.answers += [confirmed(view, needs=1), confirmed(view, needs=2)]
    found = restore(
        agent, state, Path(), timeout_s=1.0, lost_is_fresh=False, scope=Scope(strict=strict),
        expected=Decided(step=7, attempt=1, notes={}, sources={}, value=dict),
    )  # fmt: skip
    return found.step, state.tries


def test_a_state_that_was_saved_by_several_ranks_is_fetched_whole(no_files):
    """A job that shared tensors when it was saved, and does not now: any rank may have them."""
    agent = Agent(names_needs=True)
    agent.view = proposed()

    assert restoring(agent) == (7, [False, True])
    assert agent.needs.whole


def test_what_may_be_missing_is_looked_for_everywhere(no_files):
    """strict=False: a tensor in another rank's segment must not pass for one that is nowhere."""
    agent = Agent(names_needs=True)
    agent.view = proposed()

    assert restoring(agent, strict=False) == (7, [True])


@pytest.mark.parametrize("shared", [False, True])
def test_what_only_others_have_is_looked_for_if_the_ranks_shared_tensors(
    files, monkeypatch, shared
):
    """strict: of shared tensors others have some, which the state may lack; of its own none."""
    agent = Agent(names_needs=True)
    agent.view = proposed()
    monkeypatch.setattr(
        State, "load", lambda self, segments, **how: self.tries.append(agent.needs.whole) or FOUND
    )
    if shared:
        files.names += ("model.b",)

    assert restoring(agent) == (7, [shared])


def test_what_its_own_segment_lacks_is_named_if_the_others_do_not_come(no_files):
    """They may not fit: for a model of another structure that is no advice."""
    agent = Agent(names_needs=True)
    agent.view = proposed()
    agent.answers = [confirmed(agent.view, needs=1), confirmed(agent.view, needs=1)]
    state = State(agent)

    with pytest.raises(UnavailableError, match="no tensor 'w' in this rank's own segment"):
        restore(
            agent, state, Path(), timeout_s=0.0, lost_is_fresh=False, scope=Scope(),
            expected=Decided(step=7, attempt=1, notes={}, sources={}, value=dict),
        )  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
def test_all_of_a_checkpoint_is_named_only_where_it_fits(no_files, strict):
    """P8: refused with the sum, where it waited for room until its time was over."""
    agent = Agent(names_needs=True)
    agent.view = view = proposed()
    agent.answers = [confirmed(view, needs=1), confirmed(view, needs=2)]

    def refuse():
        raise ExhaustedError("8 GiB to restore, but the budget is 2 GiB")

    with pytest.raises(ExhaustedError, match="8 GiB to restore"):
        restore(
            agent, State(agent), Path(), timeout_s=1.0, lost_is_fresh=False,
            scope=Scope(strict=strict), admit_whole=refuse,
            expected=Decided(step=7, attempt=1, notes={}, sources={}, value=dict),
        )  # fmt: skip
    assert agent.needs is None or not agent.needs.whole


def test_what_is_nowhere_is_refused_once_all_was_looked_at(no_files, monkeypatch):
    agent = Agent(names_needs=True)
    agent.view = proposed()

    def nothing(self, segments, **how):
        raise NotReadyError("the checkpoint has no tensor 'w'")

    monkeypatch.setattr(State, "load", nothing)
    with pytest.raises(NotReadyError, match="no tensor 'w'"):
        restoring(agent)
    assert agent.needs.number == 2


@pytest.mark.parametrize(
    "lacking",
    [NotReadyError("bytes of tensor 'w' were not fetched"), NotFoundError("segment is gone")],
    ids=["a tensor of two names is saved under one", "the agent was started anew"],
)
def test_where_parts_do_not_suffice_its_own_segment_comes_before_all_the_others(
    no_files, monkeypatch, lacking
):
    """All segments may be more than any node holds; parts do not outlive the agent."""
    agent = Agent(names_needs=True)
    agent.view = view = proposed()
    agent.report = lambda *_: ()
    agent.answers = [confirmed(view, needs=1), confirmed(view, needs=2)]
    part = ShardNeed(rank=1, ranges=(ByteRange(begin=0, end=5),))
    monkeypatch.setattr(
        "holdfast.training.restore_needs.of_names", lambda needs, *_: replace(needs, shards=(part,))
    )
    tries = []

    def load(self, segments, **how):
        tries.append(agent.needs)
        if agent.needs.in_parts:
            raise lacking
        return FOUND

    monkeypatch.setattr(State, "load", load)
    restore(
        agent, State(agent), Path(), timeout_s=1.0, lost_is_fresh=False,
        scope=Scope(only=("model",)),
        expected=Decided(step=7, attempt=1, notes={}, sources={}, value=dict),
    )  # fmt: skip

    assert [(needs.number, needs.in_parts) for needs in tries] == [(1, True), (2, False)]
    assert tries[-1].shards == (ShardNeed(rank=1),)
    assert not tries[-1].whole


def test_of_boxes_more_is_named_by_the_heads_of_all_before_everything_is(no_files, monkeypatch):
    """A state that its own header does not tell of is in a mate's; all may be more than fits."""
    agent = Agent(names_needs=True)
    agent.view = view = proposed()
    agent.report = lambda *_: ()
    agent.answers = [confirmed(view, needs=number) for number in (1, 2, 3)]
    part = ShardNeed(rank=1, ranges=(ByteRange(begin=0, end=5),))
    named, loads = [], []

    def of_boxes(needs, *_, far, **how):
        named.append(far)
        return needs if needs.whole else replace(needs, shards=(part,)), far

    def load(self, segments, **how):
        assert how["knows_all"] == agent.needs_of_all
        loads.append(agent.needs.number)
        if not agent.needs.whole:
            raise NotReadyError("the checkpoint has no tensor 'w'")
        return FOUND

    monkeypatch.setattr("holdfast.training.restore_needs.of_boxes", of_boxes)
    monkeypatch.setattr(State, "load", load)
    monkeypatch.setattr(State, "boxes", LocalBoxes({}, {}))
    restore(
        agent, State(agent), Path(), timeout_s=1.0, lost_is_fresh=False, scope=Scope(),
        expected=Decided(step=7, attempt=1, notes={}, sources={}, value=dict),
    )  # fmt: skip

    assert named == [False, True]
    assert loads == [1, 2, 3]
    assert agent.needs.whole


def test_what_of_a_segment_is_here_is_told_to_whoever_reads_it(no_files, monkeypatch):
    """P3: in the file there are zeros elsewhere."""
    here = (ByteRange(begin=0, end=5),)
    agent = Agent(names_needs=True)
    agent.view = confirmed(proposed(), needs=1, ranges=here)
    agent.needs = own_needs(agent.view.restore.decision, agent.spec, 1, whole=False)
    agent.report = lambda change: None
    told = []
    monkeypatch.setattr(
        "holdfast.training.restore.open_files",
        lambda located, held, **parse: told.append(held) or nullcontext(Files()),
    )
    monkeypatch.setattr(State, "load", lambda *_, **how: FOUND)
    restored = restore(
        agent, State(agent), Path(), timeout_s=1.0, lost_is_fresh=False, scope=Scope(),
        expected=Decided(step=7, attempt=1, notes={}, sources={}, value=dict),
    )  # fmt: skip

    [segment] = agent.view.restore.segments
    assert told == [{segment.shard.id: here}]
    assert restored.sources == {"memory": 5}
