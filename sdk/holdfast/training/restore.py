"""The rank's side of a restore: wait for the decision, load what it names.

Metadata decides and the agent fetches and verifies; a rank only waits, loads, and says that it
has loaded. See architecture 4.8.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from holdfast.core import env
from holdfast.core.decision import Decision, DecisionState
from holdfast.core.reports import RankReport
from holdfast.core.session import RestoreView, SessionView
from holdfast.core.user_events import Event
from holdfast.errors import (
    CheckpointError,
    CorruptionError,
    NotFoundError,
    NotReadyError,
    StaleGenerationError,
    UnavailableError,
)
from holdfast.format.canonical import strict_object
from holdfast.format.names import is_shared, is_under
from holdfast.format.notes import NOTES_BYTES_MAX
from holdfast.reading.files import open_files
from holdfast.reading.reader import Segments
from holdfast.said import is_first_to_say
from holdfast.state.capture import Capture
from holdfast.training.decided_value import decided_value
from holdfast.training.naming import Namer, Naming, Scope
from holdfast.training.session import AgentSession

RESTORE_S_MAX = 600.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The checkpoint that ``restore`` has loaded.

    ``attempt`` is the number of the attempt that saved it. ``sources`` are bytes by tier:
    ``memory``, ``peer`` or ``object``. ``seconds`` are those until a checkpoint was chosen
    (``decide``), until all bytes were on the node and verified (``fetch``), and of loading the
    tensors (``load``). With ``strict=False``, ``missing`` names state that the checkpoint lacks and
    that kept its values, ``unexpected`` what the state lacks.
    """

    step: int
    attempt: int
    sources: Mapping[str, int]
    seconds: Mapping[str, float]
    apply_rng: Callable[[], None] = field(repr=False)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What ``restore`` will load; it does not change any more.

    ``attempt`` is the number of the attempt that saved it. ``notes`` are those that were given
    with the step, empty: none, or the catalogue was lost since. ``sources``: bytes by tier,
    ``memory``, ``peer`` or ``object``. ``value(key)``, until ``restore``, is the plain data that
    ``state[key]`` was; it cannot be lost apart from the checkpoint.
    """

    step: int
    attempt: int
    notes: Mapping[str, object]
    sources: Mapping[str, int]
    value: Callable[[str], object] = field(compare=False, repr=False)


def timeout(environ: Mapping[str, str]) -> float:
    """Return how long a restore may take until it is confirmed and here, in seconds.

    Raises:
        InvalidRequestError: ``HOLDFAST_RESTORE_TIMEOUT`` is no time.
    """
    return env.seconds(environ, "HOLDFAST_RESTORE_TIMEOUT", RESTORE_S_MAX)


def decide(
    session: AgentSession, arena: Path, *, timeout_s: float, lost_is_fresh: bool, naming: Namer
) -> Decided | None:
    """Return what will be restored, once it is confirmed and here; None: begin at step 0.

    Raises:
        CheckpointError: as ``restore`` does.
    """
    chosen = choose(session, timeout_s=timeout_s, lost_is_fresh=lost_is_fresh, naming=naming)
    checkpoint = chosen.decision.checkpoint
    if _begins_anew(chosen.decision) or checkpoint is None:
        return None
    return Decided(
        step=checkpoint.step,
        attempt=checkpoint.generation,
        notes=_notes(chosen.decision),
        sources=_sources(chosen),
        value=partial(decided_value, session, arena, chosen),
    )


def restore(
    session: AgentSession,
    capture: Capture,
    arena: Path,
    *,
    timeout_s: float,
    lost_is_fresh: bool,
    scope: Scope,
    expected: Decided | None,
    admit_whole: Callable[[], object] = lambda: None,
) -> Restored | None:
    """Return what was restored into ``capture``, or None: there is no checkpoint of the job.

    Raises:
        StaleGenerationError: something else than ``expected`` is decided by now.
        CheckpointError: as ``choose`` says, or what is loaded does not fit the state.
    """
    naming = Naming.of(scope, capture.boxes, admit_whole)
    chosen = choose(session, timeout_s=timeout_s, lost_is_fresh=lost_is_fresh, naming=naming)
    decision = chosen.decision
    found = None if _begins_anew(decision) else decision.checkpoint
    if (expected and (expected.step, expected.attempt)) != (
        found and (found.step, found.generation)
    ):
        raise StaleGenerationError(
            f"the catalogue was lost after decide() and now chooses another step "
            f"({found.step if found else 0}): start the job again"
        )
    if _begins_anew(decision):
        if session.spec.rank:
            pass  # the first one says it for all
        elif decision.state is DecisionState.LOST:
            log.warning("training starts at step 0, no checkpoint can be read: %s", decision.reason)
        elif decision.reason:
            log.warning("training starts at step 0, as fresh= asks: %s", decision.reason)
        session.begun(None)
        return None
    return _loaded(
        session, capture, arena, chosen, scope, naming,
        timeout_s=timeout_s, lost_is_fresh=lost_is_fresh,
    )  # fmt: skip


def _loaded(
    session: AgentSession,
    capture: Capture,
    arena: Path,
    chosen: RestoreView,
    scope: Scope,
    naming: Naming,
    *,
    timeout_s: float,
    lost_is_fresh: bool,
) -> Restored:
    """Load what was chosen; name more of it where what this rank had named does not suffice."""
    lacking: CheckpointError
    while True:
        try:
            return _load(session, capture, arena, chosen.decision, chosen, scope)
        except NotReadyError as error:
            if session.needs is None or session.needs.whole:
                raise
            # It may lie in this rank's segment under another name. Or ranks that shared tensors
            # saved it: then any of them has it.
            lacking, naming = error, naming.wider(session.needs)
        except NotFoundError as error:
            if session.needs is None or not session.needs.in_parts:
                raise
            # Its agent was started anew: parts do not outlive it.
            lacking, naming = error, naming.wider(session.needs)
        what = ("what was fetched", "more")
        if naming.whole:
            own = "this rank's own segment" if capture.boxes is None else "what was fetched"
            what = (own, "the others")
        log.warning("%s may not have all (%s): fetching %s", what[0], lacking, what[1])
        try:
            chosen = choose(
                session, timeout_s=timeout_s, lost_is_fresh=lost_is_fresh, naming=naming
            )
        except UnavailableError as late:
            text = f"{lacking.message} in {what[0]}; {what[1]} did not come: {late.message}"
            raise UnavailableError(text) from lacking


def _begins_anew(decision: Decision) -> bool:
    return decision.fresh or decision.state is DecisionState.LOST


def choose(
    session: AgentSession,
    *,
    timeout_s: float,
    lost_is_fresh: bool,
    naming: Namer,
) -> RestoreView:
    """Return what was decided, once it is confirmed and all that is needed of it is here.

    A rank that names its needs does so here, for each checkpoint that is proposed.

    Raises:
        UnavailableError: no decision within ``timeout_s``.
        NotFoundError: the step that was asked for cannot be restored.
        StaleGenerationError: a newer attempt began meanwhile, or this one has two numbers.
        CorruptionError: checkpoints are known and none can be read, unless ``lost_is_fresh``.
    """
    generation = session.generation
    view = _wait(session, timeout_s=timeout_s, naming=naming)
    if view is None:
        raise UnavailableError(
            f"no checkpoint was chosen and fetched within {timeout_s:.0f} s: "
            f"{_progress(session.view)}; run holdfast doctor, or raise HOLDFAST_RESTORE_TIMEOUT"
        )
    if view.fenced:
        raise StaleGenerationError("a newer attempt of this job has begun: stop this one")
    chosen = view.restore
    assert chosen is not None
    decision = chosen.decision
    if not chosen.is_of(generation):
        raise StaleGenerationError(
            f"the catalogue was lost and has given this attempt two numbers, {generation} and "
            f"{decision.generation}: start the job again"
        )
    if decision.refused:
        raise NotFoundError(decision.reason)
    if decision.state is DecisionState.LOST and not lost_is_fresh:
        raise CorruptionError(
            f"the job has checkpoints, but none can be read: {decision.reason}; bring those nodes "
            f'back, or start over with another job name or on_failure="warn"'
        )
    return chosen


def _wait(session: AgentSession, *, timeout_s: float, naming: Namer) -> SessionView | None:
    """Return the view that ends the wait, None: not within ``timeout_s``; name needs meanwhile."""
    deadline = time.monotonic() + timeout_s
    while True:
        view = session.wait_view(
            lambda view: _settled(view, session) or _unnamed(view, session, naming) is not None,
            timeout_s=max(deadline - time.monotonic(), 0.0),
        )
        decision = _unnamed(view, session, naming) if view is not None else None
        if decision is None:
            return view
        needs, of_all = naming.needs(decision, session)
        session.name(needs, of_all=of_all)


def _unnamed(view: SessionView, session: AgentSession, naming: Namer) -> Decision | None:
    """Return a decision of which this rank has yet to say what it needs."""
    chosen = view.restore
    if view.fenced or not session.spec.names_needs or chosen is None:
        return None
    decision, needs = chosen.decision, session.needs
    if not chosen.is_of(session.generation) or decision.checkpoint is None:
        return None
    if not decision.shards_count:
        return None  # its catalogue was lost: of which shards it consists is not known
    if needs is None or needs.checkpoint != decision.checkpoint:
        return decision
    return None if naming.suffices(needs) else decision


def _sources(chosen: RestoreView) -> Mapping[str, int]:
    sources = Counter[str]()
    for segment in chosen.segments:
        sources[segment.source] += segment.held_bytes
    return dict(sources)


def _notes(decision: Decision) -> Mapping[str, object]:
    """Return the user's notes; notes that cannot be read are left out with a warning."""
    if not decision.notes:
        return {}
    try:
        return strict_object(decision.notes.encode(), what="notes", bytes_max=NOTES_BYTES_MAX)
    except CheckpointError as error:
        log.warning("the notes of the checkpoint cannot be read and are left out: %s", error)
        return {}


def _load(
    session: AgentSession,
    capture: Capture,
    arena: Path,
    decision: Decision,
    chosen: RestoreView,
    scope: Scope,
) -> Restored:
    assert decision.checkpoint is not None
    step = decision.checkpoint.step
    started_s = time.monotonic()
    located = [(arena / segment.file_name, segment.shard) for segment in chosen.segments]
    held = {segment.shard.id: segment.ranges for segment in chosen.segments}
    with open_files(located, held, parse=session.headers.parse) as segments:
        part = len(located) < decision.shards_count
        if scope.strict and part and capture.boxes is None:
            _check_apart(segments, scope.only)
        found = capture.load(
            segments,
            step=step,
            strict=scope.strict,
            only=scope.only,
            streams=scope.only is None,
            knows_all=session.needs_of_all,
        )
        for reason in capture.put_orders(segments) if scope.only is None else ():
            _say_order(session, located[0][1].job, reason)
    load_s = time.monotonic() - started_s
    sources = _sources(chosen)
    _say_costs(session, chosen, load_s, sum(sources.values()))
    session.begun(decision.checkpoint)
    if found.missing:
        _say(
            "the checkpoint lacks these parts of the state, which keep their values", found.missing
        )
    if found.unexpected:
        _say("the state lacks these parts of the checkpoint, which are ignored", found.unexpected)
    log.info("restored step %d from %s in %.2f s", step, sources, load_s + chosen.fetch_s)
    start = session.spec.start
    if session.spec.rank == 0 and start is not None and (start.fresh or step != start.step):
        text = "job %s: launch (%s) already started over or went back; now at step %d"
        log.warning(text, session.spec.job, start.name, step)
    return Restored(
        step=step,
        attempt=decision.checkpoint.generation,
        sources=sources,
        seconds={"decide": chosen.decide_s, "fetch": chosen.fetch_s, "load": load_s},
        apply_rng=capture.apply_rng,
        missing=found.missing,
        unexpected=found.unexpected,
    )


def _check_apart(segments: Segments, only: Collection[str] | None) -> None:
    """Refuse a part of a checkpoint whose ranks shared tensors: more of these lie in the others.

    What the state lacks of them would not be seen.
    """
    asked = (n for n in segments.specs() if only is None or is_under(n, only))
    name = next(filter(is_shared, asked), None)
    if name is not None:
        raise NotReadyError(
            f"the ranks that saved the checkpoint shared tensors, such as {name!r}", fqn=name
        )


def _say_costs(session: AgentSession, chosen: RestoreView, load_s: float, bytes_count: int) -> None:
    def change(report: RankReport) -> RankReport:
        costs = replace(
            report.costs,
            decide_s=chosen.decide_s,
            fetch_s=chosen.fetch_s,
            load_s=load_s,
            restored_bytes=bytes_count,
        )
        return replace(report, costs=costs)

    session.report(change)


def _say(what: str, names: Sequence[str]) -> None:
    text = f"{what}: {', '.join(names)}"
    if is_first_to_say(text):
        log.warning("%s", text)


def _say_order(session: AgentSession, job: str, reason: str) -> None:
    message = (
        f"the first steps may differ in the last bit from uninterrupted training, because DDP "
        f"adds gradients in another order: {reason}"
    )
    log.warning("%s", message)
    session.post(event=Event(kind="ddp_order_lost", severity="warning", message=message, job=job))


def _settled(view: SessionView, session: AgentSession) -> bool:
    """Tell whether the wait is over: fenced, lost, or confirmed and all that is needed here.

    Also if it is not decided for this attempt's number: nothing good comes after that.
    """
    if view.fenced:
        return True
    if view.restore is None:
        return False
    if not view.restore.is_of(session.generation):
        return True
    decision = view.restore.decision
    if decision.state is DecisionState.LOST:
        return True
    number = session.needs.number if session.needs else 0
    here = view.restore.ready and view.restore.needs == number
    return decision.state is DecisionState.CONFIRMED and (decision.fresh or here)


def _progress(view: SessionView) -> str:
    """Return the progress of the restore as text for an error message."""
    if view.restore is None:
        return "the agent has heard of no choice yet"
    decision = view.restore.decision
    ready = view.restore.ready
    where = "this node has all its shards" if ready else "shards are missing on this node"
    why = f" ({decision.reason})" if decision.reason else ""
    return f"the choice is {decision.state.name.lower()} and {where}{why}"
