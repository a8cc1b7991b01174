"""The guard: what holds a NaN or an infinity is not saved (G21), on real slots and threads."""

import threading

import numpy as np
import pytest
import torch
from tests.unit.training.savers import outcome, saver_of, stepped

import holdfast
from holdfast.errors import (
    InvalidRequestError,
    NonFiniteError,
    PreconditionError,
    StaleGenerationError,
)
from holdfast.guards import RefuseNonFinite, checked_guard
from holdfast.snapshot.finite_check import NAMES_COUNT_MAX, SPAN_BYTES_MAX
from holdfast.training.save_machine import events as ev
from holdfast.training.save_machine.rules import handle
from holdfast.training.save_machine.state import Author, SaveState

NAN, INF = float("nan"), float("inf")
GUARD = RefuseNonFinite()


def saved(folder, state, guard=GUARD):
    with saver_of(folder, state, guard=guard) as saver:
        return outcome(saver, 2)


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
BYTES = (torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e8m0fnu)


@pytest.mark.parametrize("dtype", [*FLOATS, *BYTES, torch.complex64])
@pytest.mark.parametrize("at", [0, 17, -1])
def test_one_bad_element_of_any_dtype_that_has_some_refuses_the_step(tmp_path, dtype, at):
    plain = torch.ones(1000).to(dtype)
    plain[at] = torch.full((1,), NAN).to(dtype)[0]

    failure = saved(tmp_path, {"table": plain, "other": torch.ones(3)})

    assert failure.message == "step 2 is refused: NaN or infinity in table"


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2, torch.complex64])
@pytest.mark.parametrize("bad", [INF, -INF])
def test_an_infinity_refuses_the_step_too(tmp_path, dtype, bad):
    plain = torch.ones(5).to(dtype)
    plain[2] = bad

    assert isinstance(saved(tmp_path, {"table": plain}), NonFiniteError)


@pytest.mark.parametrize(
    "good",
    [
        torch.full((64,), torch.finfo(torch.float32).max),
        torch.full((64,), -torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16),
        torch.full((64,), 5e-324, dtype=torch.float64),
        torch.full((64,), 448.0).to(torch.float8_e4m3fn),
        torch.full((64,), 57344.0).to(torch.float8_e5m2),
        torch.full((64,), -1, dtype=torch.int64),
        torch.full((64,), 255, dtype=torch.uint8),
        torch.tensor([True, False]),
        torch.empty(0),
        torch.tensor(3.0),
    ],
    ids=lambda tensor: str(tensor.dtype) + str(tuple(tensor.shape)),
)
def test_what_is_finite_is_saved_however_large_or_empty_it_is(tmp_path, good):
    """Sums of such numbers overflow; and all bits set is a whole number like any other."""
    assert saved(tmp_path, {"table": good, "count": 7, "best": INF}) is None


def test_what_an_optimizer_holds_is_looked_at_and_told_by_name(tmp_path):
    """Deferred tensors are copied behind the training thread, and looked at there."""
    weight = torch.nn.Parameter(torch.ones(3))
    state = stepped(weight)
    with saver_of(tmp_path, state, guard=GUARD) as saver:
        weight.data[1] = NAN
        failure = outcome(saver, 2)

    assert "model.0" in failure.message


def test_only_some_of_many_bad_tensors_are_named(tmp_path):
    state = {f"t{number:02}": torch.tensor([INF]) for number in range(40)}

    failure = saved(tmp_path, state)

    assert NAMES_COUNT_MAX == len(failure.message.rpartition(" in ")[2].split(", "))


def test_a_bad_element_in_a_later_span_is_found_and_named(tmp_path):
    """A tensor of several spans, beside others of its dtype: each element counts."""
    big = torch.zeros(SPAN_BYTES_MAX // 4 * 2 + 3)
    big[-2] = NAN
    state = {"a": torch.zeros(7), "big": big, "z": torch.zeros(7)}

    failure = saved(tmp_path, state)

    assert failure.message.endswith("in big")


def test_what_is_excluded_may_hold_anything(tmp_path):
    """Masks have infinities by right."""
    state = {"model": {"mask": torch.tensor([0.0, -INF]), "weight": torch.ones(2)}}
    (tmp_path / "again").mkdir()

    assert saved(tmp_path, state, RefuseNonFinite(exclude=("*.mask",))) is None
    assert isinstance(saved(tmp_path / "again", state), NonFiniteError)


def test_a_name_as_events_tell_it_excludes_that_tensor_whatever_is_in_it():
    """Names of the user's may have what patterns give a meaning."""
    assert RefuseNonFinite(exclude=("table[0].*",)).excludes("table[0].*")
    assert not RefuseNonFinite(exclude=("table[0]",)).excludes("table[1]")


@pytest.mark.parametrize(
    ("notes", "named"),
    [
        ({"loss": NAN}, "notes['loss']"),
        ({"loss": np.float32(INF)}, "notes['loss']"),
        ({"loss": 0.5, "grad": -INF}, "notes['grad']"),
        ({"loss": 0.5, "other": NAN}, None),
        ({"loss": 10**400}, None),
        ({"loss": "nan"}, None),
        ({"loss": None}, None),
        ({"loss": torch.tensor(INF)}, None),
        ({}, None),
        (None, None),
    ],
)
def test_a_loss_that_is_no_number_refuses_the_step_before_anything_is_copied(
    tmp_path, notes, named
):
    guard = RefuseNonFinite(notes=("loss", "grad"))
    with saver_of(tmp_path, {"w": torch.ones(3)}, guard=guard) as saver:
        failure = outcome(saver, 2, notes)
        latest = saver._performer.latest

    assert (failure is None) == (named is None)
    if named:
        assert failure.message == f"step 2 is refused: NaN or infinity in {named}"
        assert latest is None


def test_a_refused_slot_is_ready_for_the_next_save(tmp_path):
    """One slot: what was refused in it does not keep it."""
    state = {"w": torch.tensor([NAN])}
    with saver_of(tmp_path, state, guard=GUARD) as saver:
        first = outcome(saver, 2)
        state["w"][0] = 1.0
        made = saver.save(3)
        assert saver._performer.engine.wait(30)
        saver._performer.engine.close(30)

        assert isinstance(first, NonFiniteError)
        assert made._failure is None
        assert saver._state.refused_count == 0


def test_without_a_guard_nobody_looks(tmp_path):
    assert saved(tmp_path, {"w": torch.tensor([NAN])}, None) is None


def test_looking_never_happens_on_the_training_thread(tmp_path, monkeypatch):
    """Also where all is eager, and the copy has ended before ``save`` returns."""
    looked = []
    with saver_of(tmp_path, {"w": torch.ones(3)}, guard=GUARD) as saver:
        check = saver._performer._finite
        real = check.non_finite
        monkeypatch.setattr(
            check, "non_finite", lambda *a: looked.append(threading.current_thread()) or real(*a)
        )
        assert outcome(saver, 2) is None

    assert looked
    assert threading.main_thread() not in looked


def test_as_many_refusals_in_a_row_as_it_takes_stop_training(tmp_path):
    """S4: only because it was asked for; a save in between begins the count anew."""
    state = {"w": torch.tensor([NAN])}
    with saver_of(tmp_path, state, guard=RefuseNonFinite(stop_after=2)) as saver:
        outcome(saver, 2, {"loss": 1.0})
        saver.check_refusals()
        saver.save(3, {"loss": NAN})
        with pytest.raises(NonFiniteError, match=r"2 saves in a row .*notes\['loss'\]"):
            saver.check_refusals()


# -- the rules ------------------------------------------------------------------------------------

STATE = SaveState(Author("j", "r", 1, 0))


def test_a_refusal_is_an_event_of_its_own_and_is_told_to_all_ranks():
    """One rank's refusal abandons the step for all: it is no checkpoint of the job."""
    state, _ = handle(STATE, ev.Due(5), now_s=0.0)

    state, actions = handle(state, ev.NonFinite(5, ("w", "v")), now_s=0.0)

    posted = next(a for a in actions if isinstance(a, ev.Post))
    assert (5, "save_refused") == (posted.abandoned.step, posted.event.kind)
    assert "NaN or infinity in w, v" in posted.abandoned.reason
    assert posted.saving == ()
    assert (1, ("w", "v")) == (state.refused_count, state.refused_names)
    assert isinstance(state.failure, NonFiniteError)


def test_a_copy_that_was_given_up_and_then_refused_is_abandoned_once():
    state, _ = handle(STATE, ev.Due(5), now_s=0.0)
    state = state._replace(copying=5)
    state, _ = handle(state, ev.CopyGivenUp(5, "slow"), now_s=0.0)

    state, actions = handle(state, ev.NonFinite(5, ("w",)), now_s=0.0)

    assert (None, []) == (state.hanging, actions)


def test_a_step_that_is_refused_for_its_notes_counts_once_whatever_else_befalls_it():
    """Its copy hangs, is given up, and then ends after all and is looked at."""
    state, _ = handle(STATE, ev.Due(5, suspects=("notes['loss']",)), now_s=0.0)
    state = state._replace(copying=5)

    state, actions = handle(state, ev.CopyGivenUp(5, "slow"), now_s=0.0)

    assert isinstance(state.failure, NonFiniteError)
    assert "save_refused" == next(a for a in actions if isinstance(a, ev.Post)).event.kind
    assert 1 == state.refused_count
    state, _ = handle(state, ev.NonFinite(5, ("notes['loss']", "w")), now_s=0.0)
    assert (1, ("notes['loss']", "w")) == (state.refused_count, state.refused_names)
    state, _ = handle(state, ev.NonFinite(6, ("w",)), now_s=0.0)
    assert 2 == state.refused_count


def test_a_newer_attempt_is_told_whatever_the_notes_are():
    state, _ = handle(STATE._replace(fenced=True), ev.Due(5, suspects=("n",)), now_s=0.0)

    assert isinstance(state.failure, StaleGenerationError)
    assert 0 == state.refused_count


# -- the value ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"exclude": "*.mask"},
        {"exclude": ("",)},
        {"exclude": (1,)},
        {"notes": ["loss"]},
        {"stop_after": -1},
        {"stop_after": True},
        {"stop_after": 2.0},
        {"keep": ""},
        {"keep": 3},
    ],
)
def test_a_guard_that_makes_no_sense_is_refused_by_name(wrong):
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        RefuseNonFinite(**wrong)


def test_what_is_no_guard_is_refused():
    with pytest.raises(InvalidRequestError, match="is no guard"):
        checked_guard("refuse")
    assert checked_guard(None) is None
    assert issubclass(NonFiniteError, PreconditionError)
    assert holdfast.RefuseNonFinite is RefuseNonFinite
