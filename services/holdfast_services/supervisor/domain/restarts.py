"""When to start, restart, publish and stop the services of one machine. Pure.

``handle(state, event, now_s)`` returns the next state and what the shell should do. Order: the
metadata service starts first, agents and the persistence worker once it answers. They stop the
other way round, worker, scheduler and executors before the agents: they may still need them.
A child that ends is started again for as long as the stack lives, after a wait that doubles up
to a bound; each time it is said. Only a stack that never became ready gives up. Ready is
what training needs: the worker is none of that, so neither it nor its store holds a stack up.

Units: seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from holdfast.core.retry import Waits

START_WAITS = Waits(first_s=0.2, wait_s_max=10.0)
STABLE_S = 30.0
READY_S_MAX = 45.0
STOP_S_MAX = 3.5
# Three turns of stopping, and the draining of pipes after each.
STACK_STOP_S_MAX = 3 * (STOP_S_MAX + 0.5)
STARTS_MAX = 3

METADATA = "metadata"
PERSISTENCE = "persistence"
SCHEDULER = "scheduler"
EXECUTOR = "-executor"
"""What the names of executors end with, behind that of their node."""
_STOP_TURNS = {PERSISTENCE: 0, SCHEDULER: 0, METADATA: 2}
_EXECUTORS_STOP_TURN = 0
_AGENTS_STOP_TURN = 1


class Phase(Enum):
    """Where one child is in its life."""

    DOWN = "down"  # due to be started at ``due_s``
    STARTING = "starting"  # runs, does not answer yet
    READY = "ready"
    STOPPING = "stopping"  # was asked to end
    ENDED = "ended"  # gone, and not to come back


RUNNING = frozenset({Phase.STARTING, Phase.READY, Phase.STOPPING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One supervised process; ``failures`` counts ends in a row, each short of ``STABLE_S``."""

    name: str
    phase: Phase = Phase.DOWN
    since_s: float = 0.0
    due_s: float = 0.0
    failures: int = 0
    killed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """All children, metadata first. ``published``: it has once been ready."""

    children: tuple[Child, ...]
    idle_exit_s: float = 0.0
    published: bool = False
    busy_s: float = 0.0
    stopping: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; ``needs_count`` trainers live, or items are not in the store yet."""

    needs_count: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """The child serves."""

    name: str


@dataclass(frozen=True, slots=True)
class Exited:
    """The child's process has ended; ``code`` as in ``subprocess`` (negative: a signal)."""

    name: str
    code: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The stack is asked to end."""

    why: str


SupervisorEvent = Tick | Answered | Exited | StopAsked


@dataclass(frozen=True, slots=True)
class Start:
    """Start the child's process and probe it until it answers."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the child to end."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End the child without asking."""

    name: str


@dataclass(frozen=True, slots=True)
class Publish:
    """All that training needs serves for the first time: tell the world where."""


@dataclass(frozen=True, slots=True)
class Say:
    """Write a line into the log."""

    message: str
    warning: bool = False


Action = Start | Terminate | Kill | Publish | Say


def new_stack(others: tuple[str, ...], *, idle_exit_s: float, now_s: float) -> Stack:
    """Return a stack of which nothing runs yet: metadata and ``others``, agents and the worker.

    ``idle_exit_s`` 0 means never.
    """
    names = (METADATA, *others)
    children = tuple(Child(name=name, due_s=now_s) for name in names)
    return Stack(children=children, idle_exit_s=idle_exit_s, busy_s=now_s)


def ended(stack: Stack) -> bool:
    """Tell whether the stack was stopped and nothing of it runs."""
    return stack.stopping and all(child.phase is Phase.ENDED for child in stack.children)


def handle(stack: Stack, event: SupervisorEvent, now_s: float) -> tuple[Stack, list[Action]]:
    """Return the stack after ``event`` and what to do, in order."""
    actions: list[Action] = []
    match event:
        case Answered(name):
            stack = _answered(stack, name, now_s, actions)
        case Exited(name, code):
            stack = _exited(stack, name, code, now_s, actions)
        case StopAsked(why):
            stack = _stop(stack, why, "", actions)
        case Tick(needs_count):
            stack = _idle(stack, needs_count, now_s, actions)
    stack = _publish(stack, now_s, actions)
    return _advance(stack, now_s, actions), actions


def _answered(stack: Stack, name: str, now_s: float, actions: list[Action]) -> Stack:
    child = _child(stack, name)
    if child.phase is not Phase.STARTING:
        return stack
    actions.append(Say(f"{name} is ready"))
    return _with(stack, replace(child, phase=Phase.READY, since_s=now_s))


def _exited(stack: Stack, name: str, code: int, now_s: float, actions: list[Action]) -> Stack:
    child = _child(stack, name)
    if stack.stopping:
        return _with(stack, replace(child, phase=Phase.ENDED, since_s=now_s))
    stable = child.phase is Phase.READY and now_s - child.since_s >= STABLE_S
    failures = 1 if stable else child.failures + 1
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    if not stack.published and failures >= STARTS_MAX and name != PERSISTENCE:
        failure = f"{name} {how} {failures} times before the stack was ready"
        stack = _with(stack, replace(child, phase=Phase.ENDED, since_s=now_s))
        return _stop(stack, failure, failure, actions)
    wait_s = START_WAITS.wait_s(failures)
    actions.append(
        Say(f"{name} {how} ({failures} in a row), starting it again in {wait_s:.1f} s", True)
    )
    return _with(
        stack,
        Child(name=name, since_s=now_s, due_s=now_s + wait_s, failures=failures),
    )


def _idle(stack: Stack, needs_count: int, now_s: float, actions: list[Action]) -> Stack:
    if needs_count or not stack.published or stack.stopping:
        return replace(stack, busy_s=now_s)
    if stack.idle_exit_s and now_s - stack.busy_s >= stack.idle_exit_s:
        return _stop(stack, f"no trainer for {stack.idle_exit_s:g} s", "", actions)
    return stack


def _publish(stack: Stack, now_s: float, actions: list[Action]) -> Stack:
    needed = (child for child in stack.children if child.name != PERSISTENCE)
    ready = all(child.phase is Phase.READY for child in needed)
    if stack.published or stack.stopping or not ready:
        return stack
    actions.append(Publish())
    return replace(stack, published=True, busy_s=now_s)


def _stop(stack: Stack, why: str, failure: str, actions: list[Action]) -> Stack:
    if stack.stopping:
        return stack
    actions.append(Say(f"stopping: {why}", bool(failure)))
    children = tuple(
        child if child.phase in RUNNING else replace(child, phase=Phase.ENDED)
        for child in stack.children
    )
    return replace(stack, children=children, stopping=True, failure=failure)


def _advance(stack: Stack, now_s: float, actions: list[Action]) -> Stack:
    """Start what is due, or stop what may stop, and end what has overrun its deadline."""
    steps = _stops(stack, now_s) if stack.stopping else _starts(stack, now_s)
    for child, action in steps:
        actions.extend(action)
        stack = _with(stack, child)
    return stack


def _starts(stack: Stack, now_s: float) -> Iterator[tuple[Child, list[Action]]]:
    metadata = _child(stack, METADATA)
    # After the first time the others do not wait for metadata: they live without it.
    open_to_others = stack.published or metadata.phase is Phase.READY
    for child in stack.children:
        may_start = child is metadata or open_to_others
        if child.phase is Phase.DOWN and may_start and now_s >= child.due_s:
            yield replace(child, phase=Phase.STARTING, since_s=now_s), [Start(child.name)]
        elif (
            child.phase is Phase.STARTING
            and not child.killed
            and now_s - child.since_s >= READY_S_MAX
        ):
            late = Say(f"{child.name} does not answer after {READY_S_MAX:g} s, killing it", True)
            yield replace(child, killed=True), [late, Kill(child.name)]


def _stops(stack: Stack, now_s: float) -> Iterator[tuple[Child, list[Action]]]:
    living = [child for child in stack.children if child.phase is not Phase.ENDED]
    turn = min(map(_stop_turn, living), default=0)
    for child in living:
        if _stop_turn(child) != turn:
            continue
        if child.phase in (Phase.STARTING, Phase.READY):
            asked = replace(child, phase=Phase.STOPPING, since_s=now_s)
            yield asked, [Terminate(child.name)]
        elif (
            child.phase is Phase.STOPPING
            and not child.killed
            and now_s - child.since_s >= STOP_S_MAX
        ):
            late = Say(f"{child.name} did not end in {STOP_S_MAX:g} s, killing it", True)
            yield replace(child, killed=True), [late, Kill(child.name)]


def _stop_turn(child: Child) -> int:
    if child.name.endswith(EXECUTOR):
        return _EXECUTORS_STOP_TURN
    return _STOP_TURNS.get(child.name, _AGENTS_STOP_TURN)


def _child(stack: Stack, name: str) -> Child:
    return next(child for child in stack.children if child.name == name)


def _with(stack: Stack, child: Child) -> Stack:
    children = tuple(child if old.name == child.name else old for old in stack.children)
    return replace(stack, children=children)
