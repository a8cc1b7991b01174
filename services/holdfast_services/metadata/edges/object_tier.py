"""What the edges are given of the object tier, where there is one."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.errors import PreconditionError
from holdfast_services.kit.queue import Queue
from holdfast_services.metadata.calls.catalogue_from_bucket import BucketArchive
from holdfast_services.metadata.calls.health import StoreHealth


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectTier:
    """The object tier as the edges use it: the archive of its store, and its queue. Owns nothing.

    The queue is asked for figures only.
    """

    health: StoreHealth
    archive: BucketArchive | None = None
    queue: Queue | None = None


def expect_archive(tier: ObjectTier) -> BucketArchive:
    """Return the archive, which takes in checkpoints from the store.

    Raises:
        PreconditionError: there is no object store.
    """
    if tier.archive is None:
        raise PreconditionError("the metadata service has no HOLDFAST_STORE")
    return tier.archive
