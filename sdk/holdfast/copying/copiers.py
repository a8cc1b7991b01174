"""The copiers that a state needs: the host's, and one for each accelerator that has some of it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from holdfast.copying.copier import Copier, HostCopier
from holdfast.copying.port import Device
from holdfast.copying.stream_copier import StreamCopier


class Copiers:
    """Copiers by device, made when they are asked for; None is the host's.

    Threads call what they may call of a ``Copier``. ``lost`` says why an accelerator does not
    answer any more, empty: none is known not to. An error of CUDA that ends its context stays
    until the process ends.
    """

    def __init__(self) -> None:
        self.lost = ""
        self._host = HostCopier()
        self._streams: dict[Device, StreamCopier] = {}

    def of(self, device: Device | None) -> Copier:
        """Return the copier of ``device``.

        Raises:
            RuntimeError: it does not answer.
        """
        if device is None:
            return self._host
        copier = self._streams.get(device)
        if copier is None:
            try:
                copier = self._streams[device] = StreamCopier(device)
            except RuntimeError as cause:
                self.lost = f"{device.name} does not answer any more: {cause}"
                raise
        return copier

    @property
    def under_way(self) -> bool:
        """See ``Copier.under_way``."""
        return any(copier.under_way for copier in self._streams.values())

    def mark(self) -> None:
        """See ``Copier.mark``."""
        for copier in self._streams.values():
            copier.mark()

    def hurry(self) -> None:
        """See ``Copier.hurry``."""
        for copier in self._streams.values():
            copier.hurry()

    def hold(self) -> None:
        """See ``Copier.hold``."""
        for copier in self._streams.values():
            copier.hold()

    def land(self) -> None:
        """See ``Copier.land``."""
        for copier in self._streams.values():
            copier.land()

    def look(self, devices: Iterable[Device]) -> str:
        """Return why one of ``devices`` does not answer any more; empty: they do.

        Waits for nothing: training asks. While nothing is under way.
        """
        for device in devices:
            with suppress(RuntimeError):
                self.of(device)
        for copier in self._streams.values():
            self.lost = self.lost or copier.answers(wait=False)
        return self.lost

    def clear_up(self) -> None:
        """After an error: wait until nothing is under way, and see who answers still."""
        for copier in self._streams.values():
            with suppress(RuntimeError):
                copier.land()
            self.lost = self.lost or copier.answers()
