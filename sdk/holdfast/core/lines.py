"""Which checkpoints of a run are left behind: what follows from where it has gone on from. Pure.

A run moves: an attempt begins at a checkpoint, or a user rolls the run back to one. A *move* of
generation G to step s leaves behind every later checkpoint that was made before G. One to a
checkpoint that was itself left behind takes its line up again: what was left before it was made
stays so, and what came between is left instead.

What stands of each generation is all up to some step, its *cap*. Rules are the caps as a node can
use them, each by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest

from holdfast.core.ids import CheckpointId
from holdfast.core.node_view import SupersedeRule

NOTHING = -1
"""Of a move: the step, if none of step 0 stays either; ``of``, if it is to no checkpoint."""
MOVES_PER_RUN_MAX = 1024
"""One is added by each restart that made progress; they are a few bytes in row and view."""

_Caps = tuple[tuple[int, int], ...]
"""(generation below which, cap), by rising generation: of one the first that is above it counts."""


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """Under ``generation`` a run went on from ``step`` as generation ``of`` had made it.

    ``of`` is ``NOTHING`` where that is not known, or it began at step 0.
    """

    generation: int
    step: int
    of: int = NOTHING


def to(key: CheckpointId | None, generation: int) -> Move:
    """Return the move of ``generation`` to a checkpoint, None: to step 0."""
    return Move(generation, key.step, key.generation) if key else Move(generation, 0)


def with_moves(moves: Iterable[Move], *more: Move) -> tuple[Move, ...]:
    """Return the moves with some more, in their order; at the limit the oldest go.

    Of those that followed one another to one place the last is enough, and those whose
    generation another went back to.
    """
    ordered = sorted({*moves, *more}, key=_order)
    named = {one.of for one in ordered}
    lasting = [
        one
        for one, after in zip_longest(ordered, ordered[1:])
        if after is None or (one.step, one.of) != (after.step, after.of) or one.generation in named
    ]
    return tuple(lasting[-MOVES_PER_RUN_MAX:])


def _order(move: Move) -> tuple[int, int, int]:
    """Of one generation the strictest move comes last."""
    return (move.generation, -move.step, move.of)


def moves_of(rules: Iterable[SupersedeRule]) -> tuple[Move, ...]:
    """Return moves that left behind what ``rules`` say, where nobody knows what they went to."""
    return tuple(Move(rule.below_generation, rule.after_step) for rule in rules)


def rules_of(moves: Iterable[Move]) -> tuple[SupersedeRule, ...]:
    """Return what ``moves`` have left behind, by rising generation."""
    ordered = sorted(moves, key=_order)
    caps: list[_Caps] = [()]
    """After each of them, beginning with none."""
    for move in ordered:
        caps.append(_moved(caps, ordered, move))
    return _rules(caps[-1])


def leaves(rules: Iterable[SupersedeRule], move: Move) -> tuple[SupersedeRule, ...] | None:
    """Return the rules after one more move, the last; None: it takes up what they left behind.

    Then they follow from all moves again: ``rules_of``. Nearly never, and this costs far less.
    """
    caps = tuple((rule.below_generation, rule.after_step) for rule in rules)
    if _is_left(caps, move):
        return None
    return _rules(_lowered(caps, move.generation, move.step))


def _moved(before: Sequence[_Caps], moves: Sequence[Move], move: Move) -> _Caps:
    """Return the caps after ``move``, which follows those of ``moves`` that ``before`` has."""
    if not _is_left(before[-1], move):
        return _lowered(before[-1], move.generation, move.step)
    # The line is taken up as it was when that generation had begun.
    count = sum(one.generation <= move.of for one in moves[: len(before) - 1])
    taken_up = _lowered(before[count], move.of + 1, move.step)
    return (*taken_up, (move.generation, NOTHING))


def _is_left(caps: _Caps, move: Move) -> bool:
    """Tell whether ``move`` goes to a checkpoint that is left behind."""
    if move.of == NOTHING:
        return False
    cap = next((cap for below, cap in caps if move.of < below), None)
    return cap is not None and move.step > cap


def _lowered(caps: _Caps, below: int, step: int) -> _Caps:
    """Return the caps where nothing below that generation is above ``step``; none is raised."""
    known = [(end, min(cap, step)) for end, cap in caps if end < below]
    reach = next((min(cap, step) for end, cap in caps if end >= below), step)
    above = [(end, cap) for end, cap in caps if end > below]
    lowered = [*known, (below, reach), *above]
    runs = groupby(lowered, key=lambda item: item[1])
    return tuple(list(group)[-1] for _, group in runs)


def _rules(caps: _Caps) -> tuple[SupersedeRule, ...]:
    """Return a rule for each cap; where an older generation has a higher one it says from when."""
    rules, highest, begin = [], NOTHING, 0
    for below, cap in caps:
        since = 0 if cap >= highest else begin
        rules.append(SupersedeRule(after_step=cap, below_generation=below, from_generation=since))
        highest, begin = max(highest, cap), below
    return tuple(rules[-MOVES_PER_RUN_MAX:])
