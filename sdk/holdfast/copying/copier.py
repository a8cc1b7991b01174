"""The port of what copies a state into host memory, and its implementation for tensors there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from holdfast.errors import InvalidRequestError

Tensors = Sequence[torch.Tensor]


class Copier(Protocol):
    """Copies tensors that lie in one place into host memory, of one state after the other.

    Training calls ``mark``, ``now``, ``hurry`` and ``hold``, one thread of ours ``later`` and
    ``land``. Targets and sources live until ``land`` has returned or raised. Where copies are
    queued, a ``RuntimeError`` says that the device fails, or has no memory left.
    """

    @property
    def under_way(self) -> bool:
        """Whether copies were taken of which nobody knows yet that they have ended."""
        ...

    def now(self, targets: Tensors, sources: Tensors) -> None:
        """Copy the sources as they are now, whatever this thread does to them next."""
        ...

    def mark(self) -> None:
        """Have the copies of ``later`` see the sources as this thread has left them by now."""
        ...

    def later(self, targets: Tensors, sources: Tensors) -> None:
        """Copy the sources; may wait until enough of the copies before are done."""
        ...

    def hurry(self) -> None:
        """Have ``later`` wait for nothing any more, until the next ``mark``."""
        ...

    def hold(self) -> None:
        """Have what this thread does next come after all that ``later`` has taken."""
        ...

    def land(self) -> None:
        """Wait until all that was taken is in its place."""
        ...


class HostCopier:
    """The copier of tensors in host memory, and of those on devices that have no streams here.

    A copy is done when its call returns, so nothing is ever under way.
    """

    under_way = False

    def now(self, targets: Tensors, sources: Tensors) -> None:
        """See ``Copier.now``.

        Raises:
            InvalidRequestError: torch cannot copy such tensors.
        """
        if not targets:
            return
        try:
            with torch.no_grad():
                # One call, no loop under the GIL.
                torch._foreach_copy_(list(targets), list(sources))
        except NotImplementedError as cause:
            raise InvalidRequestError(f"torch cannot copy this state: {cause}") from cause

    later = now

    def mark(self) -> None:
        """See ``Copier.mark``."""

    def hurry(self) -> None:
        """See ``Copier.hurry``."""

    def hold(self) -> None:
        """See ``Copier.hold``."""

    def land(self) -> None:
        """See ``Copier.land``."""
