"""What Holdfast uses of an accelerator: streams, events, and memory that its driver knows.

Whatever fails raises what torch raises, a ``RuntimeError``. Work that is queued on one stream is
done in that order; between two streams only an event that one of them waits for makes an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream that was reached, or will be."""

    def query(self) -> bool:
        """Tell whether it was reached."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until it is reached."""
        ...


class Stream(Protocol):
    """Work of one device, done in the order in which it is queued."""

    def wait_event(self, event: Any) -> None:
        """Have all that is queued from now on wait for ``event``; the host does not wait."""
        ...


class Device(Protocol):
    """One accelerator; any thread may use it.

    ``name`` is for people, such as ``cuda:0``.
    """

    name: str

    def current_stream(self) -> Stream:
        """Return the stream that the calling thread queues its work on."""
        ...

    def new_stream(self) -> Stream:
        """Return a stream beside it."""
        ...

    def record(self, stream: Any) -> Event:
        """Return the point in ``stream`` after all that was queued on it until now."""
        ...

    def copy(
        self, stream: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """Queue copies between this device and host memory, each of equal shapes and dtypes.

        Both sides must live until they are done, which only an event tells. Where the memory of the
        host is not registered, this may block until they are.
        """
        ...

    def register(self, memory: torch.Tensor, *, writable: bool = True) -> None:
        """Make mapped memory of the host known to the driver, so that copies never block.

        Pages stay where they are until ``unregister``. Takes long: some 0.1 s for each GiB.
        Not ``writable``: copies only come from there.
        """
        ...

    def unregister(self, memory: torch.Tensor) -> None:
        """Undo ``register``; nothing that is queued may use ``memory`` any more."""
        ...

    def stand_aside(self) -> None:
        """Have what this thread asks of the device end no capture of a graph by another thread.

        For threads that training does not use, since it is for good.
        """
        ...


class Devices(Protocol):
    """The accelerators of this process."""

    def of(self, tensor: torch.Tensor) -> Device | None:
        """Return the one that ``tensor`` lies on; None: on none that copies by streams."""
        ...

    def capturing(self) -> bool:
        """Tell whether what this thread queues is not done, but captured in a graph."""
        ...
