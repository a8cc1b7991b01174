"""Links to the objects of a checkpoint, for people without keys to the store (F90)."""

from __future__ import annotations

import asyncio

from holdfast.core.shard import Shard
from holdfast.errors import ExhaustedError
from holdfast.format.keys import manifest_key, segment_key, sidecar_key
from holdfast.objectstore import ObjectStore
from holdfast_services.metadata.transactor import Transactor
from holdfast_services.metadata.usecases import users
from holdfast_services.metadata.usecases.users import At

LINKS_COUNT_MAX = 20_000


async def links(transactor: Transactor, store: ObjectStore, at: At, valid_s: int) -> dict[str, str]:
    """Return a URL for every object of a checkpoint, by name; anybody can read it for ``valid_s``.

    Raises:
        NotFoundError: no such job or checkpoint.
        PreconditionError: it is not in the object store, or the store has no such links.
        ExhaustedError: there are more than ``LINKS_COUNT_MAX``.
    """
    shards = await transactor.read(lambda c: users.shards(c, at))
    keys = [manifest_key(at.job, shards[0].id.checkpoint), *map(_segment, shards)]
    keys += map(_sidecar, shards)
    if len(keys) > LINKS_COUNT_MAX:
        raise ExhaustedError(f"{len(keys)} objects, at most {LINKS_COUNT_MAX} links")
    return await asyncio.to_thread(
        lambda: {key.rpartition("/")[2]: store.presign(key, valid_s) for key in keys}
    )


def _segment(shard: Shard) -> str:
    return segment_key(shard.job, shard.id, shard.world_size)


def _sidecar(shard: Shard) -> str:
    return sidecar_key(shard.job, shard.id, shard.world_size)
