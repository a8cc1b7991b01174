"""The port to what lies in the bucket and this catalogue may not know: asked at each start."""

from __future__ import annotations

from typing import Protocol

from holdfast.core.ids import CheckpointId


class Archive(Protocol):
    """The object store as a source of checkpoints that this catalogue does not know."""

    async def adopt(self, job: str) -> CheckpointId | None:
        """Write every checkpoint of ``job`` that lies there into the catalogue; idempotent.

        Returns:
            The newest of them; None: there is none. Who begins an attempt on the strength of this
            asks for its row first, for the catalogue may have been lost since.

        Raises:
            UnavailableError: the store cannot be asked, so nobody knows whether the job is new.
        """
        ...
