"""The epochs that are left, counted over restarts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.errors import InvalidRequestError


class Epochs:
    """An iterable over the epochs that are left; put it into the state of a Checkpointer.

    ``current`` is the epoch that is being done, or the next one; an epoch in which the job was
    killed is entered again.
    """

    def __init__(self, end: int) -> None:
        self.end = end
        self.current = 0

    def __iter__(self) -> Iterator[int]:
        while self.current < self.end:
            yield self.current
            self.current += 1

    def __len__(self) -> int:
        return max(0, self.end - self.current)

    def state_dict(self) -> dict[str, object]:
        """Return where it is. ``end`` is the script's, and may be another one next time."""
        return {"current": self.current}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the epoch that was being done."""
        self.current = int(state["current"])


def remaining_epochs_until(epoch: int) -> Epochs:
    """Return the epochs from the present one to ``epoch``, which is not done itself.

    ``epochs = remaining_epochs_until(90)``, then ``for epoch in epochs:``. Make it before
    ``restore()`` and put it into the state: a job that comes back goes on with the epoch it was in.

    Raises:
        InvalidRequestError: ``epoch`` is no whole number from 0.
    """
    if type(epoch) is not int or epoch < 0:
        raise InvalidRequestError(f"remaining_epochs_until({epoch!r}): pass a whole number from 0")
    return Epochs(epoch)
