"""The copier of one accelerator: copies on a stream of their own, beside training's.

The host queues and never waits for bytes. Order is made on the device: the copies wait for an
event of the stream that training used when the save began, and whoever writes the sources next has
its own stream wait for an event of the copies. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdfast.copying.flight import IN_FLIGHT_BYTES_MAX, Flight
from holdfast.copying.port import Device


class StreamCopier:
    """The ``Copier`` of one accelerator.

    ``bytes_max`` bounds what ``later`` has under way, until ``hurry``.
    """

    def __init__(self, device: Device, bytes_max: int = IN_FLIGHT_BYTES_MAX) -> None:
        self._device = device
        self._side = device.new_stream()
        self._flight = Flight(device, bytes_max)

    @property
    def under_way(self) -> bool:
        """See ``Copier.under_way``."""
        return self._flight.under_way

    def now(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """See ``Copier.now``: on the stream of this thread, so that what it queues next waits."""
        self._flight.copy(self._device.current_stream(), targets, sources)
        self._flight.mark()

    def mark(self) -> None:
        """See ``Copier.mark``."""
        self._flight.hurry(on=False)
        self._side.wait_event(self._device.record(self._device.current_stream()))

    def later(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """See ``Copier.later``."""
        self._device.stand_aside()
        self._flight.make_room(sum([target.nbytes for target in targets]))
        self._flight.copy(self._side, targets, sources)

    def hurry(self) -> None:
        """See ``Copier.hurry``."""
        self._flight.hurry()

    def hold(self) -> None:
        """See ``Copier.hold``."""
        self._device.current_stream().wait_event(self._device.record(self._side))

    def land(self) -> None:
        """See ``Copier.land``."""
        self._device.stand_aside()
        self._flight.land()

    def answers(self, *, wait: bool = True) -> str:
        """Return why the device does not answer any more; empty: it does.

        With ``wait`` all that it was given here is done then, else this only asks.
        """
        try:
            event = self._device.record(self._side)
            if wait:
                event.synchronize()
            else:
                event.query()
        except RuntimeError as cause:
            return f"{self._device.name} does not answer any more: {cause}"
        return ""
