"""Where the ranks of an engine leave each other a word about a save: the process group's store.

It takes no collective call, so threads use it beside training, and no file, so a rank can say that
it cannot write. Words are JSON; nothing is unpickled (P9).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from holdfast.core.ids import RunId
from holdfast.errors import ConflictError, OutcomeUnknownError


@dataclass(frozen=True, slots=True)
class Board:
    """The words about one save, by name. Each is said once and stays until it is forgotten.

    ``store`` is a ``torch.distributed.Store`` that all ranks reach; None: there is one rank, and
    nobody to tell. Every call raises ``OutcomeUnknownError`` if the store is gone: it ends with
    rank 0 or with the launcher.
    """

    store: Any
    run: RunId

    def tell(self, name: str, said: Mapping[str, object]) -> None:
        """Say something to all ranks."""
        if self.store is not None:
            with _errors():
                self.store.set(self._key(name), json.dumps(said))

    def told(self, name: str) -> Mapping[str, object] | None:
        """Return what was said, None: nothing yet.

        Raises:
            ConflictError: it is no JSON object.
        """
        if self.store is None:
            return None
        with _errors():
            if not self.store.check([self._key(name)]):
                return None
            text = self.store.get(self._key(name))
        try:
            said = json.loads(text)
        except ValueError as cause:
            raise ConflictError(f"what was said as {self._key(name)} is not JSON") from cause
        if not isinstance(said, dict):
            raise ConflictError(f"what was said as {self._key(name)} is not an object")
        return said

    def forget(self, names: Iterable[str]) -> None:
        """Remove words, said or not."""
        if self.store is not None:
            with _errors():
                for name in names:
                    self.store.delete_key(self._key(name))

    def _key(self, name: str) -> str:
        return f"holdfast/deepspeed/{self.run}/{name}"


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as cause:  # torch has its own errors of stores, all of this class
        raise OutcomeUnknownError(
            f"the process group's store does not answer, rank 0 or the launcher has ended: {cause}"
        ) from cause
