"""What a rank whose state is all its own needs of a checkpoint: whose segments, and which bytes.

It is named once a checkpoint is proposed; see ADR 0033. Should it not suffice, the rank names more:
of bytes all of its segment, of its segment the whole checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

from holdfast.core.attempts import AttemptSpec
from holdfast.core.decision import Decision
from holdfast.core.ids import CheckpointId, Rank, ShardId
from holdfast.core.needs import Head, Needs, ShardNeed, checked
from holdfast.errors import CheckpointError
from holdfast.format import byte_ranges
from holdfast.format.index import Index, of_some
from holdfast.format.names import blob_name, is_under, name_for
from holdfast.format.segment import parse_header

log = logging.getLogger(__name__)

FindHeads = Callable[[CheckpointId, Collection[int]], Collection[Head]]


def own_needs(decision: Decision, spec: AttemptSpec, number: int, *, whole: bool) -> Needs:
    """Return what a rank whose state is all its own needs of a decision's checkpoint.

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


def of_names(needs: Needs, source: int, only: Collection[str], find: FindHeads) -> Needs:
    """Return what of ``needs`` is under the names ``only`` of the state, by byte ranges.

    ``source`` is the rank whose state is taken: its text, and what it saved under those names. All
    of ``needs``, if its header is not to be had, or the ranges are too many. Nobody has verified
    that header: a false one costs bytes, and what is then missing where it is read is seen there.
    """
    if needs.whole:
        return needs
    try:
        index = _index(needs.checkpoint, source, find)
        if index is None:
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


def _index(checkpoint: CheckpointId, source: int, find: FindHeads) -> Index | None:
    """Return the index of the segment of ``source`` alone, None: of no such segment."""
    wanted = ShardId(checkpoint.run, checkpoint.step, checkpoint.generation, Rank(source))
    headers = [
        header
        for head in find(checkpoint, [source])
        for header in [parse_header(head.data, head.length_bytes)]
        if header.identity.id == wanted
    ]
    index = of_some(headers) if headers else None
    return index if index and index.tensor(blob_name(source)) else None
