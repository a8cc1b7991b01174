"""The port to what lies in the bucket and this catalogue may not know: asked at each start."""

from __future__ import annotations

from typing import Protocol


class Archive(Protocol):
    """The object store as a source of checkpoints that this catalogue does not know."""

    async def adopt(self, job: str) -> None:
        """Write every checkpoint of ``job`` that lies there into the catalogue; idempotent.

        Raises:
            UnavailableError: the store cannot be asked, so nobody knows whether the job is new.
        """
        ...
