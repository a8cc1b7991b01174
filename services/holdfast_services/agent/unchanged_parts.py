"""Which parts of a segment lie in its slot already, left there by what the slot held before.

What the slot held says where to look, and the bytes decide: those that rotted meanwhile, or that
somebody wrote, do not have the digest. So nothing depends on whose segment it was. Blocking.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from holdfast.format.digest import part_digest, part_ranges, split_digests


def unchanged_parts(
    view: memoryview, digests: Sequence[bytes], before: bytes, stop: threading.Event
) -> set[int]:
    """Return the numbers of the parts of ``view`` that have the bytes which ``digests`` say.

    Args:
        view: The slot.
        digests: Of the parts of the segment that it is to hold.
        before: Digests, joined, of the segment that it held: no other parts are hashed than those
            that are the same in both.
        stop: Ends the search; what was found by then is returned.
    """
    alike = {i for i, (a, b) in enumerate(zip(split_digests(before), digests)) if a == b}  # noqa: B905
    found: set[int] = set()
    for index, (begin, end) in enumerate(part_ranges(len(view))):
        if stop.is_set():
            break
        if index in alike and part_digest(view[begin:end]) == digests[index]:
            found.add(index)
    return found
