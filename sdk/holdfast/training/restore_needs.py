"""What a rank needs of a checkpoint that does not need all of it: whose segments, which bytes.

It is named once a checkpoint is proposed; see ADR 0033. Should it not suffice, the rank names more:
of bytes all of its segment, of its segment the whole checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import replace

from holdfast.core.attempts import AttemptSpec
from holdfast.core.decision import Decision
from holdfast.core.needs import HEADS_COUNT_MAX, Needs, ShardNeed, checked
from holdfast.errors import CheckpointError, NotReadyError
from holdfast.format import byte_ranges
from holdfast.format.boxes import Box, whole
from holdfast.format.index import Index, IndexedTensor, of_some
from holdfast.format.names import (
    blob_name,
    blob_rank,
    is_under,
    name_for,
    own_name,
    own_rank,
    unranked,
)
from holdfast.garbage import no_collection
from holdfast.state.boxes_here import LocalBoxes
from holdfast.state.survey import CapturedTensor, Home
from holdfast.training.headers import Headers

log = logging.getLogger(__name__)


def own_needs(decision: Decision, spec: AttemptSpec, number: int, *, whole: bool) -> Needs:
    """Return what a rank needs of a decision's checkpoint, if each has a state of its own.

    The segment of the rank whose state it takes and, in another world size, that of rank 0, whose
    seed the random streams follow from; see ``state.capture``. All of it, should the ranks that
    saved it have more than a segment each.
    """
    assert decision.checkpoint is not None
    saved = decision.world_size
    ranks = {spec.rank % saved} | ({0} if saved != spec.world_size else set())
    return Needs(
        checkpoint=decision.checkpoint,
        shards=tuple(ShardNeed(rank=one) for one in sorted(ranks)),
        number=number,
        whole=whole or decision.shards_count != saved,
    )


def of_names(needs: Needs, source: int, only: Collection[str], headers: Headers) -> Needs:
    """Return what of ``needs`` is under the names ``only`` of the state, by byte ranges.

    ``source`` is the rank whose state is taken: its text, and what it saved under those names. All
    of ``needs``, if its header is not to be had, or the ranges are too many. Nobody has verified
    that header: a false one costs bytes, and what is then missing where it is read is seen there.
    """
    if needs.whole:
        return needs
    try:
        index = of_some(headers.of(needs.checkpoint, [source]))
        if index.tensor(blob_name(source)) is None:
            return needs
        own = ((tensor, name_for(tensor.fqn, source)) for tensor in index.tensors)
        wanted = [
            (tensor.fqn, tensor.boxes[0].box)
            for tensor, name in own
            if tensor.fqn == blob_name(source) or (name is not None and is_under(name, only))
        ]
        return checked(replace(needs, shards=byte_ranges.needs(index, wanted)))
    except CheckpointError as error:
        log.info("all of the segment is fetched, not only %s: %s", ", ".join(only), error)
        return needs


@no_collection()
def of_boxes(
    needs: Needs,
    source: int,
    boxes: LocalBoxes,
    only: Collection[str] | None,
    headers: Headers,
    *,
    saved: int,
    world_size: int,
    far: bool = False,
) -> tuple[Needs, bool]:
    """Return by byte ranges what a rank loads that has boxes of tensors which others hold, too.

    Where as many ranks saved it, that may all be in its own segment and those of the ranks that
    hold the same boxes; where others did, in those of the ranks that had its part of each tensor.
    If their heads do not tell of all of it, those of all do. All of the checkpoint, if that cannot
    be told. Beside it: whether what any group of ranks has saved under a name is among it.

    Args:
        needs: What is known without a header.
        source: The rank whose state is taken where each has its own.
        boxes: What this rank has of which tensors.
        only: Names of the state that are loaded; None: all.
        headers: Those of the checkpoint's segments.
        saved: How many ranks saved the checkpoint.
        world_size: How many there are now.
        far: The heads of all are asked for: those of the ranks near did not tell everything.
    """
    if needs.whole:
        return needs, True
    others = saved if saved != world_size else 0
    # Rank 0's has the seed of the random streams, and the order in which DDP adds gradients up.
    texts = {blob_name(source)} | ({blob_name(0)} if others or boxes.beside_shared else set())
    # What a rank takes over from those that are no more.
    taken = set(range(source, saved, world_size)) if others and boxes.takes_over else set()
    texts |= set(map(blob_name, taken))
    near = None if far else _near(source, boxes, others)
    near = near and near | taken
    everybody = list(range(saved))
    looks = [(everybody, far or others > 0)]
    if near is not None and len(near) < saved:
        looks = [(sorted(near), False), (everybody, True)]
    for ranks, everyone in looks:
        if len(ranks) > HEADS_COUNT_MAX:
            continue
        try:
            index = of_some(headers.of(needs.checkpoint, ranks))
            wanted = list(
                _wanted(index, source, texts, boxes, only, everyone=everyone, other_than=others)
            )
            return checked(replace(needs, shards=byte_ranges.needs(index, wanted))), everyone
        except CheckpointError as error:
            log.info("not only the segments of %s: %s", ranks, error)
    return replace(needs, whole=True), True


def _near(source: int, boxes: LocalBoxes, others: int) -> set[int] | None:
    """Return whose heads may tell all that a rank needs; None: anybody may have saved it.

    ``others``: how many ranks saved, if there are now more or less; else 0.
    """
    if boxes.beside_shared:
        return None
    if not others:
        return {source, *(rank for tensor in boxes.cut() for rank in tensor.holders)}
    if boxes.sections or boxes.elsewhere:
        return None
    savers = boxes.likely_savers(others)
    return None if savers is None else {source, *savers}


def _wanted(
    index: Index,
    source: int,
    texts: Collection[str],
    boxes: LocalBoxes,
    only: Collection[str] | None,
    *,
    everyone: bool,
    other_than: int,
) -> Iterator[tuple[str, Box]]:
    """Yield what is to be loaded, by its name in the checkpoint, with its region.

    ``everyone``: also what any group of ranks has saved under a name, where that may be meant, with
    the texts of these groups. Otherwise the mesh is taken for that which saved. ``other_than``: how
    many ranks saved, if there are now more or less; else 0.

    Raises:
        NotReadyError: a tensor of which this rank has a box is not in the index.
    """
    seen: set[str] = set()
    texts = set(texts)
    for name, stored in _by_name(index).items():
        if blob_rank(name) is not None or boxes.is_elsewhere(name):
            continue
        held, own = boxes.find(name), own_name(name, source)
        meant = {name, own}
        if held and held.mesh:
            # A group of other ranks is not the one that saved, and has no tensor of its own there.
            meant = {name} if other_than else {name, own_name(name, held.mesh[0])}
        of_any = everyone and (
            is_under(name, boxes.dealt) or _may_be_of_any(name, stored, held, source, other_than)
        )
        others = list(stored) if of_any else []
        # An optimizer's groups are there, also if nothing else of it is.
        texts.update(blob_name(rank) for rank in map(own_rank, others) if rank is not None)
        if only is not None and not is_under(name, only):
            continue
        seen |= {name} if others or not meant.isdisjoint(stored) else set()
        for one in sorted({*meant, *others, own} & stored.keys()):
            shape = stored[one].shape
            yield one, held.box if held and held.shape == shape else whole(shape)
    found = filter(None, map(index.tensor, sorted(texts)))
    yield from ((text.fqn, whole(text.shape)) for text in found)
    for held in boxes.cut():
        if held.fqn not in seen and (only is None or is_under(held.fqn, only)):
            raise NotReadyError(f"no header has tensor {held.fqn!r}", fqn=held.fqn)


def _may_be_of_any(
    name: str, stored: Collection[str], held: CapturedTensor | None, source: int, other_than: int
) -> bool:
    """Tell whether any group of ranks may have saved what is ``held`` here; see ``state.owners``.

    ``other_than``: see ``_wanted``.
    """
    if held is None or name in stored:
        return False
    of_ddp = held.home is Home.SHARED and held.fqn == name
    of_group = len(stored) < other_than
    return bool(held.mesh) or of_ddp or of_group or own_name(name, source) not in stored


def _by_name(index: Index) -> dict[str, dict[str, IndexedTensor]]:
    """Return all tensors by the names that their ranks have for them, then by those stored."""
    found: dict[str, dict[str, IndexedTensor]] = {}
    for tensor in index.tensors:
        found.setdefault(unranked(tensor.fqn), {})[tensor.fqn] = tensor
    return found
