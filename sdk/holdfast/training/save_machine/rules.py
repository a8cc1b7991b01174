"""The rules of saving: ``handle(state, event) -> (state, actions)``. No thread, clock or torch.

From "this step is due" to a closed slot, and what becomes of each step. The training thread waits
for three things only, each bounded: the end of an earlier copy (``GATE_S_MAX``), a free slot
(``BUSY_WAIT_S_MAX``, or ``RETURN_S_MAX`` if one is on its way back; after one save without a slot
later saves do not wait), and a slot of a new plan (``NEW_PLAN_S_MAX`` and as long as touching its
memory may take, once per plan). Whatever fails, the step is abandoned for the attempt, which is
said, and training goes on (P4). A step that found no slot is *owed* until training goes on.

One save is ``Due``, ``Prepared``, ``SlotReady``, then ``Copied`` and ``Closed``, wherever these
happen. Nothing here is done per tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core.abandoned_step import AbandonedStep
from holdfast.core.announcements import Announcement
from holdfast.core.text import tellable
from holdfast.core.user_events import Event
from holdfast.errors import (
    CheckpointError,
    ExhaustedError,
    NonFiniteError,
    PreconditionError,
    StaleGenerationError,
    UnavailableError,
)
from holdfast.training.save_machine import events as ev
from holdfast.training.save_machine.slot_wait import LOOK_S, slot_wait_s, wait_left_s
from holdfast.training.save_machine.state import BUSY_WAIT_S_MAX, Claim, Refusal, SaveState
from holdfast.training.unsaved_steps import reason_text

GATE_S_MAX = 30.0
NEW_PLAN_S_MAX = 30.0
REFUSED_PLAN_S = 30.0
EAGER_SAVES_MAX = 3

AWAY = "the node's agent does not answer (see `holdfast doctor`)"
BEHIND = "earlier steps are not committed yet (save less often, or see `holdfast doctor`)"
LOST = "the agent lost its bytes before they were safe"
LATE = "this rank heard too late that the step should be saved"
LARGE = "; step() counts optimizer steps, not samples or tokens: news come at most 1000 steps ahead"
STEPS_LATE_MAX = 1000
EAGER = (
    "no optimizer step was seen between two saves, or one was captured in a graph, so saves copy "
    "everything before returning"
)

Actions = list[ev.SaveAction]
Handled = tuple[SaveState, Actions]


def handle(state: SaveState, event: ev.SaveEvent, *, now_s: float) -> Handled:
    """Return the state after ``event`` and what to do now, in order; ``state`` is not changed.

    At most the last action is answered by an event. ``now_s`` is of a monotonic clock.
    """
    note: Callable[[SaveState, Any, float], Handled] = _NOTES[type(event)]
    return note(state, event, now_s)


# ----------------------------------------------------------------------------- a save begins


def _loaded(state: SaveState, event: ev.Loaded, _now_s: float) -> Handled:
    return state._replace(parent=(event.step, event.generation)), []


def _stepped(state: SaveState, event: ev.Stepped, now_s: float) -> Handled:
    state, actions = _settle_owed(state, now_s, agent_lost=event.agent_lost)
    announced = event.announced
    if announced is None or not state.answered < announced.step <= event.step:
        return state, actions
    state = state._replace(answered=announced.step)
    reached = event.reached or announced.step
    if reached < event.step and not event.known:
        state, more = _abandon(state, reached, now_s, _late(announced, event.step))
        actions += more
    return state, actions


def _late(announced: Announcement, step: int) -> str:
    hint = LARGE if step - announced.step > STEPS_LATE_MAX else ""
    return f"{LATE} ({announced.reason.text}){hint}"


def _heard_late(state: SaveState, event: ev.HeardLate, now_s: float) -> Handled:
    """Give a step up that others save, and may wait at; an owed one: they wait for it, too."""
    if event.announced.step <= state.answered:
        return state, []
    owed = _without(state.owed, event.reached)
    state = state._replace(answered=event.announced.step, owed=owed)
    return _abandon(state, event.reached, now_s, _late(event.announced, event.step))


def _due(state: SaveState, event: ev.Due, now_s: float) -> Handled:
    state, actions = _settle_owed(state, now_s, agent_lost=event.agent_lost)
    step = event.step
    claim = Claim(step, suspects=event.suspects)
    state = state._replace(
        saving=(*[other for other in state.saving if other.step != step], claim),
        newest=max(state.newest, step),
        before=state.newest if state.newest < step else state.before,
        saves_count=state.saves_count + 1,
    )
    actions.append(ev.Post(saving=state.steps_saving, note=event.note))
    if state.fenced:
        error = StaleGenerationError("a newer attempt of this job trains")
        state, more = _abandon(state, step, now_s, str(error), error)
        return state, actions + more
    actions.append(ev.Prepare(step, GATE_S_MAX if state.hanging is None else 0.0))
    return state, actions


def _note_refused(state: SaveState, event: ev.NoteRefused, _now_s: float) -> Handled:
    reason = f"step {event.step} is saved without its notes: {event.error}"
    news = _event(state, "notes_refused", reason, event.step)
    return state._replace(failure=event.error), [ev.Post(event=news), ev.Warn(reason)]


def _copy_hangs(state: SaveState, event: ev.CopyHangs, now_s: float) -> Handled:
    reason = "the next save began before a slot was free"
    actions: Actions = []
    if state.hanging is None:
        actions.append(ev.GiveUpCopy(reason))
    if state.copying is not None:
        state, more = _copy_given_up(state, ev.CopyGivenUp(state.copying, reason), now_s)
        actions += more
    error = UnavailableError("the copy of an earlier step does not end")
    state, more = _abandon(state, event.step, now_s, str(error), error)
    return state, actions + more


def _prepared(state: SaveState, event: ev.Prepared, now_s: float) -> Handled:
    if state.reserved == event.plan:
        return state, [ev.TakeSlot(event.step, 0.0)]
    refused = state.refused
    if refused and refused.plan == event.plan and now_s - refused.at_s < REFUSED_PLAN_S:
        return _abandon(state, event.step, now_s, reason_text(refused.error), refused.error)
    # A reservation that was interrupted is made again: the plan is not reserved before its answer.
    state = state._replace(patience_s=NEW_PLAN_S_MAX, refused=None)
    return state, [ev.Reserve(event.step, event.plan)]


def _reserved(state: SaveState, event: ev.Reserved, _now_s: float) -> Handled:
    # What hindered slots before is told again if it still does: the agent has just taken the plan.
    patience_s = NEW_PLAN_S_MAX + event.touch_s
    state = state._replace(reserved=event.plan, patience_s=patience_s, hindrance="")
    return state, [ev.TakeSlot(event.step, 0.0)]


def _refused(state: SaveState, event: ev.Refused, now_s: float) -> Handled:
    state = state._replace(refused=Refusal(event.plan, now_s, event.error))
    return _abandon(state, event.step, now_s, reason_text(event.error), event.error)


# ------------------------------------------------------------------------------------- slots


def _no_slot(state: SaveState, event: ev.NoSlot, _now_s: float) -> Handled:
    """Wait for a slot, as long as one may come and once for the step, then owe it."""
    step = event.step
    if state.owed == step:
        return state, []
    actions: Actions = []
    if state.wished != step:
        state = state._replace(wished=step)
        actions.append(ev.Post(wants_slot=step))
        left_s = slot_wait_s(state, step, agent_lost=event.agent_lost)
    else:
        left_s = wait_left_s(state, agent_lost=event.agent_lost, lost_s_max=NEW_PLAN_S_MAX)
    if left_s > 0:
        wait_s = min(left_s, LOOK_S)
        return state._replace(waits_s=left_s - wait_s), [*actions, ev.TakeSlot(step, wait_s)]
    # One wait is enough to learn that protection is behind: until a slot is free again, later
    # saves are given up at once instead of stopping the training thread each time.
    return state._replace(patience_s=0.0, owed=step), [*actions, ev.KeepMoment(step)]


def _slot_ready(state: SaveState, event: ev.SlotReady, _now_s: float) -> Handled:
    step = event.step
    actions: Actions = []
    if state.wished is not None:
        actions.append(ev.Post(wants_slot=0))
    if event.eager and state.saves_count > EAGER_SAVES_MAX and not state.eager_told:
        actions.append(ev.Post(event=_event(state, "save_eager", EAGER, step)))
        state = state._replace(eager_told=True)
    state = state._replace(
        patience_s=BUSY_WAIT_S_MAX,
        wished=None,
        owed=None if state.owed == step else state.owed,
        copying=step,
    )
    return state, [*actions, ev.Begin(step, state.parent, not event.eager)]


def _awaited(state: SaveState, event: ev.Awaited, now_s: float) -> Handled:
    """Save the owed step for the waiting caller; give it up if its state has changed."""
    if state.owed is None or state.fenced:
        return state, []
    if event.changed:
        return _settle_owed(state, now_s, agent_lost=event.agent_lost)
    return state, [ev.GoBack(state.owed, event.left_s if state.hanging is None else 0.0)]


def _went_back(state: SaveState, event: ev.WentBack, _now_s: float) -> Handled:
    return state, [ev.TakeSlot(event.step, event.left_s)]


# ------------------------------------------------------------------------------- a save ends


def _copied(state: SaveState, event: ev.Copied, _now_s: float) -> Handled:
    return state, [ev.CloseSlot(event.step)]


def _closed(state: SaveState, event: ev.Closed, _now_s: float) -> Handled:
    step = event.step
    saving = state.saving
    if any(claim.step == step for claim in saving):  # else it is sealed already
        saving = tuple([Claim(step, event.name) if c.step == step else c for c in saving])
    state = state._replace(
        saving=saving,
        copying=_without(state.copying, step),
        hanging=_without(state.hanging, step),  # it was whole before it could be stopped
        refused_count=0,
    )
    return state, [ev.Stage(step), ev.Post(closed_slot=event.name.slot)]


def _copy_given_up(state: SaveState, event: ev.CopyGivenUp, now_s: float) -> Handled:
    if state.copying != event.step:
        return state, []
    state = state._replace(copying=None, hanging=event.step)
    return _abandon(state, event.step, now_s, event.reason)


def _copy_failed(state: SaveState, event: ev.CopyFailed, now_s: float) -> Handled:
    if state.hanging == event.step:  # it was abandoned when it was given up
        return state._replace(hanging=None), []
    state = state._replace(copying=_without(state.copying, event.step))
    return _abandon(state, event.step, now_s, event.reason, event.error)


def _non_finite(state: SaveState, event: ev.NonFinite, now_s: float) -> Handled:
    """Refuse a step; whatever was given up meanwhile, its bytes are not kept."""
    step = event.step
    if state.hanging == step:  # it was abandoned when it was given up
        return _counted(state._replace(hanging=None), step, event.names), []
    state = state._replace(copying=_without(state.copying, step))
    return _refuse(state, step, now_s, event.names)


def _counted(state: SaveState, step: int, names: tuple[str, ...]) -> SaveState:
    """Return the state with one refusal more; a step is refused once, whatever finds it."""
    count = state.refused_count + (state.refused_step != step)
    return state._replace(refused_count=count, refused_step=step, refused_names=names)


def _refuse(state: SaveState, step: int, now_s: float, names: tuple[str, ...]) -> Handled:
    reason = f"NaN or infinity in {', '.join(names)}"
    error = NonFiniteError(f"step {step} is refused: {reason}", step=step)
    return _abandon(_counted(state, step, names), step, now_s, reason, error)


def _failed(state: SaveState, event: ev.Failed, now_s: float) -> Handled:
    state = state._replace(
        copying=_without(state.copying, event.step), owed=_without(state.owed, event.step)
    )
    return _abandon(state, event.step, now_s, event.reason, event.error)


def _slots_lost(state: SaveState, event: ev.SlotsLost, now_s: float) -> Handled:
    actions: Actions = []
    for step in event.steps:
        state, more = _abandon(state, step, now_s, LOST)
        actions += more
    return state, actions


def _settle_owed(state: SaveState, now_s: float, *, agent_lost: bool) -> Handled:
    """Training has gone on: a step that found no slot cannot be saved any more."""
    if state.owed is None:
        return state, []
    step, state = state.owed, state._replace(owed=None)
    reason = f"no free slot: {AWAY if agent_lost else state.hindrance or BEHIND}"
    return _abandon(state, step, now_s, reason, ExhaustedError(reason, step=step))


def _abandon(
    state: SaveState,
    step: int,
    now_s: float,
    reason: str,
    error: CheckpointError | None = None,
) -> Handled:
    """Give ``step`` up for all ranks; tell its handle and, if it is news, people.

    One whose notes are not finite is refused for them: it would be, had it got any further.
    """
    suspects = next((claim.suspects for claim in state.saving if claim.step == step), ())
    if suspects and not isinstance(error, NonFiniteError | StaleGenerationError):
        return _refuse(state, step, now_s, suspects)
    failure = error or PreconditionError(reason, step=step)
    lapse, text = state.lapse.lost(step, reason, now_s)
    state = state._replace(lapse=lapse, failure=failure)
    state, saving = _release(state, {step})
    given_up = AbandonedStep(
        run=state.author.run, step=step, generation=state.author.generation, reason=reason
    )
    news = None
    if text and isinstance(failure, NonFiniteError):
        news = _event(state, "save_refused", text, step)
    elif text:
        news = _event(state, "save_abandoned", text, step)
    actions: Actions = [
        ev.Fail(step, failure),
        ev.Post(saving=saving, abandoned=given_up, event=news),
    ]
    if text:
        actions.append(ev.Warn(f"{text}; training goes on"))
    return state, actions


def _release(state: SaveState, steps: set[int]) -> tuple[SaveState, tuple[int, ...] | None]:
    """Return the state in which ``steps`` are waited for no more, and what is; None: as before."""
    saving = tuple([claim for claim in state.saving if claim.step not in steps])
    if len(saving) == len(state.saving):
        return state, None
    state = state._replace(saving=saving)
    return state, state.steps_saving


# ---------------------------------------------------------------------------- the agent's news


def _view(state: SaveState, event: ev.View, _now_s: float) -> Handled:
    view = event.view
    told: Actions = [ev.Learn(view.steps)] if view.steps else []
    done: Actions = []
    if bool(view.degraded) != state.outage:
        state = state._replace(outage=bool(view.degraded))
        done.append(ev.Warn(_outage_text(view.degraded)))
    lapse, over = state.lapse, set[int]()
    local_step, copied_step = state.local_step, state.copied_step
    sealed_before = max((levels.step + 1 for levels in view.steps if levels.sealed), default=0)
    for levels in view.steps:
        if levels.local:
            local_step = max(local_step, levels.step)
            lapse, text = lapse.saved(levels.step)
            if text:
                done.append(ev.Warn(text))
        if levels.replicated or levels.durable:
            copied_step = max(copied_step, levels.step)
        if levels.sealed or levels.abandoned:
            over.add(levels.step)
    state = state._replace(
        lapse=lapse,
        local_step=local_step,
        copied_step=copied_step,
        hindrance=tellable(view.hindrance),
    )
    state, saving = _release(state, over)
    if saving is not None:
        told.append(ev.Post(saving=saving, sealed_before=sealed_before))
    state, more = _learn_end(state, event)
    told += [action for action in more if isinstance(action, ev.Tell)]
    done += [action for action in more if isinstance(action, ev.Do)]
    # Last: whoever takes a slot knows by now what became of the step that lay in it.
    return state, [*told, *done, ev.Offer(view.leases)]


def _learn_end(state: SaveState, event: ev.View) -> Handled:
    """Take over why steps get no further than ``local``, and that none is saved any more."""
    view = event.view
    actions: Actions = []
    if view.shortage != state.shortage:
        state = state._replace(shortage=view.shortage)
        actions.append(ev.LackCopies(view.shortage))
        if view.shortage and state.author.rank == 0:
            advice = "start agents on more nodes, or lower `replicas`"
            actions.append(ev.Warn(f"steps stay local: {view.shortage}; {advice}"))
    if view.fenced and not state.fenced:
        error = StaleGenerationError("a newer attempt of this job trains: stop this one")
        state = state._replace(fenced=True, failure=error)
        actions += [
            ev.FailAll(error),
            ev.Warn(f"{error}; this process saves nothing any more", "error"),
        ]
    return state, actions


def _outage_text(degraded: str) -> str:
    if degraded:
        return f"{degraded}; training and saves go on, but no step is committed until then"
    return "the metadata service answers again; steps are committed again"


def _closing(state: SaveState, _event: ev.Closing, _now_s: float) -> Handled:
    return state, [ev.FailAll(PreconditionError("the Checkpointer is closed"))]


def _failure_taken(state: SaveState, _event: ev.FailureTaken, _now_s: float) -> Handled:
    return state._replace(failure=None), []


def _event(state: SaveState, kind: str, message: str, step: int) -> Event:
    author = state.author
    count = str(state.lapse.lost_count)
    context = {"step": str(step), "rank": str(author.rank), "abandoned": count}
    return Event(kind=kind, severity="warning", message=message, job=author.job, context=context)


def _without(known: int | None, step: int) -> int | None:
    return None if known == step else known


_NOTES: dict[type, Callable[[SaveState, Any, float], Handled]] = {
    ev.Loaded: _loaded,
    ev.Stepped: _stepped,
    ev.HeardLate: _heard_late,
    ev.Due: _due,
    ev.NoteRefused: _note_refused,
    ev.CopyHangs: _copy_hangs,
    ev.Prepared: _prepared,
    ev.Reserved: _reserved,
    ev.Refused: _refused,
    ev.SlotReady: _slot_ready,
    ev.NoSlot: _no_slot,
    ev.Copied: _copied,
    ev.Closed: _closed,
    ev.CopyGivenUp: _copy_given_up,
    ev.CopyFailed: _copy_failed,
    ev.NonFinite: _non_finite,
    ev.Failed: _failed,
    ev.SlotsLost: _slots_lost,
    ev.Awaited: _awaited,
    ev.WentBack: _went_back,
    ev.View: _view,
    ev.Closing: _closing,
    ev.FailureTaken: _failure_taken,
}
