"""What must hold: one function for each promise and invariant, named by its number.

They read the whole world and the ghosts, not what one party believes. ``TRANSITIONS`` are asked
of every change of a run as it is committed, ``STATES`` after each event that has moved a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.segments import root

from holdfast.core.decision import DecisionState
from holdfast.core.ids import CheckpointId
from holdfast.core.inventory import HeldState
from holdfast.core.protection import NO_COPIES, Parity, Protection
from holdfast.core.slot_names import SlotState
from holdfast_services.metadata.domain.model import Checkpoint, Run

if TYPE_CHECKING:
    from tests.simulation.ghosts import Ghosts
    from tests.simulation.node import File


class Broken(AssertionError):  # noqa: N818 - a promise is broken, no error was made
    """Something that must hold did not; the text begins with its number."""


def name(key: CheckpointId | None) -> str:
    """Return a checkpoint for people."""
    return f"step {key.step} of generation {key.generation}" if key else "a fresh start"


def age(key: CheckpointId) -> tuple[int, int]:
    """Return what later checkpoints have more of: a later attempt may be at an earlier step."""
    return key.generation, key.step


# -- changes of a run --------------------------------------------------------------------------


def p1_levels_are_whole(ghosts: Ghosts, before: Run, after: Run) -> None:
    """A level comes after every shard of the checkpoint, of one attempt, reached it."""
    for row, old in _rows(before, after):
        key = row.id
        if old is None:
            closed = ghosts.closed.get(key, {})
            lines = [closed.get(rank, set()) for rank in range(row.world_size)]
            if not set.intersection(*lines):
                raise Broken(f"P1: {name(key)} is committed, and its ranks closed {closed}")
        if row.replicated_at_s is not None and (old is None or old.replicated_at_s is None):
            _p1_replicated(ghosts, row, after)


def _p1_replicated(ghosts: Ghosts, row: Checkpoint, run: Run) -> None:
    asked = run.attempt.protection if run.attempt else NO_COPIES
    for rank in range(row.world_size):
        holders = ghosts.sealed_on.get((row.id, rank), set())
        if len(holders) <= asked.losses and not _is_summed(ghosts, row.id, rank, asked):
            raise Broken(
                f"P1: {name(row.id)} is replicated, and rank {rank} was only on {sorted(holders)}"
            )


def _is_summed(ghosts: Ghosts, key: CheckpointId, rank: int, asked: Protection) -> bool:
    """Tell whether as many elements as were asked for were ever made of a shard, on nodes apart."""
    return isinstance(asked, Parity) and any(
        min(len({number for number, _ in made}), len({node for _, node in made})) >= asked.m
        for stripe, made in ghosts.elements_on.items()
        if stripe.checkpoint == key and rank in [int(shard.id.rank) for shard in stripe.members]
    )


def p1_m6_durable_follows_the_manifest(ghosts: Ghosts, before: Run, after: Run) -> None:
    """``durable`` comes after the manifest and all objects, and not to what was left behind.

    It is given on a worker's word; what the same transaction decides thereupon comes after it. A
    manifest that was written before, and is found later, is a fact.
    """
    for row, old in _rows(before, after):
        if row.durable_at_s is None or (old is not None and old.durable_at_s is not None):
            continue
        if row.id not in ghosts.manifests:
            raise Broken(f"M6: {name(row.id)} is durable, and no manifest was ever written")
        if old is not None and old.draining and before.superseded(row.id):
            raise Broken(f"M6: {name(row.id)} became durable after it was left behind")


def p2_only_the_newest_commits(ghosts: Ghosts, before: Run, after: Run) -> None:
    """A new step is of the newest attempt; what a restore has, or had, chosen may get a row."""
    newest = max(ghosts.numbers, default=0)
    chosen = {run.decision.checkpoint for run in (before, after) if run.decision}
    for row, old in _rows(before, after):
        if old is None and row.id.generation < newest and row.id not in chosen:
            raise Broken(f"P2: {name(row.id)} is committed, and generation {newest} has begun")


def p2_numbers_grow(ghosts: Ghosts, before: Run, after: Run) -> None:
    """The generation of a run never goes back."""
    if after.generation < before.generation:
        raise Broken(f"M1: generation {before.generation} became {after.generation}")


def m2_confirmed_stays(ghosts: Ghosts, before: Run, after: Run) -> None:
    """A confirmed decision never changes, and numbers grow."""
    old, new = before.decision, after.decision
    if old is None or new is None:
        return
    if new.number < old.number:
        raise Broken(f"M2: decision {old.number} was followed by {new.number}")
    same = (old.state, old.checkpoint, old.fresh) == (new.state, new.checkpoint, new.fresh)
    if new.number == old.number and old.state is DecisionState.CONFIRMED and not same:
        raise Broken(f"M2: confirmed decision {old.number} changed from {old} to {new}")


def m3_pinned_and_superseded(ghosts: Ghosts, before: Run, after: Run) -> None:
    """What is proposed is pinned, and what is confirmed leaves later steps behind, at once."""
    decision = after.decision
    if decision is None or decision.checkpoint is None or decision == before.decision:
        return
    if decision.state is DecisionState.PROPOSED and decision.checkpoint not in after.pins:
        raise Broken(f"M3: {name(decision.checkpoint)} is proposed and not pinned")
    if decision.state is DecisionState.CONFIRMED and not any(
        rule.after_step <= decision.checkpoint.step and rule.below_generation >= decision.generation
        for rule in after.rules
    ):
        raise Broken(f"M3: {name(decision.checkpoint)} is confirmed and supersedes nothing")


def m3_nothing_else_is_superseded(ghosts: Ghosts, before: Run, after: Run) -> None:
    """The rules leave behind what restores left behind, and nothing that stands (A5)."""
    if after.rules is before.rules:
        return
    for key in ghosts.manifests:
        if key not in ghosts.gone and ghosts.in_line(key) and after.superseded(key):
            raise Broken(f"M3: {name(key)} is superseded, and no restore left it behind")


def m5_levels_stay(ghosts: Ghosts, before: Run, after: Run) -> None:
    """A level, once committed, is not taken back, nor are the user's notes."""
    rows = {row.id: row for row in after.checkpoints}
    for old in before.checkpoints:
        new = rows.get(old.id)
        if new is None:
            continue
        for level in ("local_at_s", "replicated_at_s", "durable_at_s", "copied_at_s"):
            if getattr(old, level) is not None and getattr(new, level) is None:
                raise Broken(f"M5: {name(old.id)} lost its {level}")
    for row in after.checkpoints:
        if row.notes:
            ghosts.notes[row.id] = row.notes
        elif row.id in ghosts.notes:
            raise Broken(f"M5: {name(row.id)} lost its notes")


def _rows(before: Run, after: Run) -> list[tuple[Checkpoint, Checkpoint | None]]:
    if after.checkpoints is before.checkpoints:
        return []
    known = {row.id: row for row in before.checkpoints}
    return [(row, known.get(row.id)) for row in after.checkpoints if row != known.get(row.id)]


TRANSITIONS: tuple[Callable[[Ghosts, Run, Run], None], ...] = (
    p1_levels_are_whole,
    p1_m6_durable_follows_the_manifest,
    p2_only_the_newest_commits,
    p2_numbers_grow,
    m2_confirmed_stays,
    m3_pinned_and_superseded,
    m3_nothing_else_is_superseded,
    m5_levels_stay,
)


# -- states --------------------------------------------------------------------------------------


def p5_the_floor_holds(ghosts: Ghosts) -> None:
    """What is acknowledged, or committed and not given up, or later, can be put together."""
    for key, what in ((ghosts.floor, "acknowledged"), (ghosts.hope, "committed")):
        if key is not None and not ghosts.whole_from(key):
            raise Broken(f"P5: {name(key)} was {what}, and not all of it is anywhere any more")


def p8_within_budget(ghosts: Ghosts) -> None:
    """No node uses more memory than its budget."""
    for node in ghosts.nodes.values():
        if node.used_bytes > node.budget_bytes:
            raise Broken(f"P8: {node.name} uses {node.used_bytes} of {node.budget_bytes} bytes")


def a2_nothing_under_a_lock(ghosts: Ghosts) -> None:
    """A slot that a process still writes is neither free nor sealed."""
    for node in ghosts.nodes.values():
        for file in node.files.values():
            if file.holder is not None and file.name.state in (SlotState.FREE, SlotState.SEALED):
                raise Broken(f"A2: {file.name.file_name} of {node.name} is written by a process")


def a4_sealed_is_verified(ghosts: Ghosts) -> None:
    """What is sealed has the bytes of its digest, unless a bit has flipped since."""
    for node in ghosts.nodes.values():
        for file in node.files.values():
            held = file.name.state in (SlotState.SEALED, SlotState.ELEMENT)
            if held and not (file.flipped or intact(file)):
                raise Broken(f"A4: {file.name.file_name} of {node.name} is sealed with other bytes")


def intact(file: File) -> bool:
    """Tell whether a file has the bytes that its header and sidecar stand for."""
    if file.element is not None:
        return root(file.data) == file.element.root_digest
    return file.shard is not None and root(file.data) == file.shard.root_digest


def good(file: File) -> bool:
    """Tell whether a restore could use a file."""
    sealed = file.name.state is SlotState.SEALED and file.held is HeldState.SEALED
    return sealed and intact(file)


def good_element(file: File) -> bool:
    """Tell whether a lost shard could be made of a file."""
    return file.name.state is SlotState.ELEMENT and intact(file)


STATES: tuple[Callable[[Ghosts], None], ...] = (
    p5_the_floor_holds,
    p8_within_budget,
    a2_nothing_under_a_lock,
    a4_sealed_is_verified,
)
