"""What a holder says of its copy before any byte of it is fetched, and the check of that."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.shard import Shard
from holdfast.errors import DigestMismatchError, ManifestError
from holdfast.format.digest import split_digests
from holdfast.format.sidecar import check_digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A copy at an agent: in which incarnation of a slot, and the part digests it claims, joined.

    ``path`` is its file there, for processes of the same user on the same machine.
    """

    shard: Shard
    slot_incarnation: int
    part_digests: bytes
    path: str = ""

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The part digests, apart.

        Raises:
            ValueError: the last of them is torn.
        """
        return split_digests(self.part_digests)

    def check(self, wanted: Shard) -> None:
        """Check that this is what is wanted, and that the part digests give its root digest.

        Raises:
            DigestMismatchError: another root, length or identity under the same id.
        """
        if self.shard != wanted:
            raise DigestMismatchError(f"{wanted.id.key} is another segment there")
        try:
            check_digests(wanted, self.digests)
        except (ManifestError, ValueError) as cause:
            raise DigestMismatchError(
                f"{wanted.id.key} is another segment there: {cause}"
            ) from cause
