"""Fills tensors of an accelerator from host memory, on a stream of their own. Times are seconds."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.copying.batches import Pair, batches
from holdfast.copying.flight import IN_FLIGHT_BYTES_MAX, Flight
from holdfast.copying.port import Device

STALLED_S_MAX = 60.0


def load(
    device: Device,
    pairs: Iterable[Pair],
    *,
    bytes_max: int = IN_FLIGHT_BYTES_MAX,
    stalled_s_max: float = STALLED_S_MAX,
) -> None:
    """Fill targets on ``device`` from sources in host memory; returns when all is there.

    What this thread's stream has queued for the targets is done before, and whatever it gets next
    comes after.

    Args:
        device: Where the targets are.
        pairs: Each of equal shape; the dtype of a target may be another.
        bytes_max: How much may be under way.
        stalled_s_max: How long a part of that may take.

    Raises:
        UnavailableError: one takes longer: copies are still under way, and may never end.
        RuntimeError: the device fails, or has no memory left; nothing is under way.
    """
    flight = Flight(device, bytes_max, stalled_s_max)
    side, current = device.new_stream(), device.current_stream()
    side.wait_event(device.record(current))
    try:
        for batch in batches(pairs):
            flight.make_room(sum([target.nbytes for target, _ in batch]))
            flight.copy(side, [target for target, _ in batch], [source for _, source in batch])
        current.wait_event(device.record(side))
    finally:
        flight.land()
