"""The headers of a checkpoint's segments, as this rank's agent gives them: each parsed once.

A restore asks for them to say what it needs, and meets most of them again where it loads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from holdfast.core.ids import CheckpointId, Rank, ShardId
from holdfast.core.needs import Head
from holdfast.errors import ManifestError, NotReadyError
from holdfast.format.header import parse_header
from holdfast.format.segment import SegmentHeader, header_length

FindHeads = Callable[[CheckpointId, Collection[int]], Collection[Head]]


class Headers:
    """Headers that ``find`` asks the agent for. Keeps what was parsed until ``forget``."""

    def __init__(self, find: FindHeads) -> None:
        self._find = find
        self._parsed: dict[bytes, SegmentHeader] = {}

    def of(self, checkpoint: CheckpointId, ranks: Collection[int]) -> list[SegmentHeader]:
        """Return the headers of the segments of all ``ranks``.

        Raises:
            NotReadyError: one is not to be had.
            ManifestError: one breaks a rule, or is of another checkpoint.
        """
        found: dict[int, SegmentHeader] = {}
        while len(found) < len(ranks):
            heads = self._find(checkpoint, [rank for rank in ranks if rank not in found])
            for head in heads:
                header = self.parse(head.data, head.length_bytes)
                wanted = ShardId(
                    checkpoint.run, checkpoint.step, checkpoint.generation, Rank(head.rank)
                )
                if header.identity.id != wanted:
                    raise ManifestError(
                        f"the head of {wanted.key} is that of {header.identity.id.key}"
                    )
                found[head.rank] = header
            if not heads:
                raise NotReadyError(f"{len(found)} of {len(ranks)} heads were found")
        return list(found.values())

    def parse(self, data: bytes | memoryview, length_bytes: int) -> SegmentHeader:
        """Return what ``parse_header`` does; of the same bytes the same object."""
        head = bytes(data[: header_length(bytes(data[:8]))])
        known = self._parsed.get(head)
        if known is None or known.length_bytes != length_bytes:
            known = self._parsed[head] = parse_header(head, length_bytes)
        return known

    def forget(self) -> None:
        """Let go of what was parsed: training begins."""
        self._parsed.clear()
