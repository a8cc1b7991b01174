"""Plain data of a checkpoint that was chosen, read before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.session import RestoreView
from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.format import blob
from holdfast.format.tree import decode
from holdfast.reading.files import open_files
from holdfast.training.session import AgentSession


def decided_value(session: AgentSession, arena: Path, chosen: RestoreView, key: str) -> object:
    """Return what ``state[key]`` was in the chosen checkpoint, as this rank will load it.

    Args:
        session: Of this rank, before its restore.
        arena: Where the node keeps segments.
        chosen: The checkpoint, which is on this node.
        key: A key of the user's mapping, of plain data.

    Raises:
        NotFoundError: the checkpoint has nothing under ``key``.
        InvalidRequestError: it is an object or a tensor, or there are some in it.
        CheckpointError: the bytes are gone, or no text of ours.
    """
    located = [(arena / segment.file_name, segment.shard) for segment in chosen.segments]
    held = {segment.shard.id: segment.ranges for segment in chosen.segments}
    with open_files(located, held, parse=session.headers.parse) as segments:
        tree = blob.decode(segments.blob(session.spec.rank % segments.world_size)).live.tree
    if key not in tree:
        raise NotFoundError(f"the checkpoint has nothing under {key!r}", key=key)

    def refuse(name: str) -> object:
        raise InvalidRequestError(f"{name!r} of the checkpoint is no plain data", key=key)

    return decode(tree[key], leaf=refuse)
