"""Follows one ``Trainer.fit`` of Lightning: has it begin where it was, and saves its steps."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.errors import InvalidRequestError
from holdfast.integrations.followed import Followed, Saving
from holdfast.integrations.lightning import progress
from holdfast.integrations.lightning.drawing import counted
from holdfast.integrations.lightning.parts import movers_of, parts_of
from holdfast.patches import Patches
from holdfast.state.passes import PassedLoader


class FitRun:
    """One ``fit``, from ``on_fit_start`` on; ``end`` puts back what was replaced in the trainer.

    Raises:
        CheckpointError: as ``Followed`` does, and what is said by ``Saving.refuse``.
    """

    def __init__(self, trainer: Any, saving: Saving) -> None:
        self._trainer = trainer
        self._saving = saving
        self._patches = Patches()
        self._saved: dict[str, Any] | None = None
        self._drawn: PassedLoader | None = None
        self._followed: Followed | None = None
        try:
            self._followed = Followed(saving)
        except InvalidRequestError as error:
            saving.refuse(error)
            return
        self._prepare(self._followed)

    def _prepare(self, followed: Followed) -> None:
        loop = self._trainer.fit_loop
        if followed.decided is not None:
            self._saved = progress.check(followed.decided.value("progress"))
            progress.announce(self._trainer, self._saved)  # so there is no sanity check, either
        self._patches.replace(loop, "setup_data", self._setting_up)
        self._patches.replace(loop.epoch_loop, "advance", self._advancing)

    def end(self, error: BaseException | None = None) -> None:
        """End it, after ``error`` at once; a repeat is harmless.

        Raises:
            CheckpointError: as ``Followed.end`` does.
        """
        self._patches.undo()
        followed, self._followed = self._followed, None
        if followed is not None:
            followed.end(error)

    def _setting_up(self, original: Any) -> Any:
        def set_up() -> None:
            if self._saved is not None and not self._is_loaded:
                progress.forget_restart(self._trainer)
            module = sys.modules[type(self._trainer.fit_loop).__module__]
            patches = Patches()
            patches.replace(module, "_select_data_fetcher", self._selecting)
            try:
                original()
            finally:
                patches.undo()

        return set_up

    @property
    def _is_loaded(self) -> bool:
        return self._followed is None or self._followed.is_loaded

    def _selecting(self, original: Any) -> Any:
        def select(*args: Any, **kwargs: Any) -> Any:
            fetcher = original(*args, **kwargs)
            self._patches.replace(fetcher, "setup", lambda set_up: self._count(fetcher, set_up))
            return fetcher

        return select

    def _count(self, fetcher: Any, original: Any) -> Any:
        def set_up(combined: Any) -> None:
            original(combined)
            if self._followed is None:
                return
            try:
                self._drawn = counted(fetcher)
            except InvalidRequestError as error:
                self._give_up(error)
                return
            if self._followed.is_loaded:
                self._followed.state["loader"] = self._drawn

        return set_up

    def _give_up(self, error: InvalidRequestError) -> None:
        """Let it train without saves, if it has not gone on from a checkpoint."""
        if self._saved is not None:
            raise error
        self._saving.refuse(error)
        followed, self._followed = self._followed, None
        if followed is not None:
            followed.end(error)

    def _advancing(self, original: Any) -> Any:
        def advance(fetcher: Any) -> None:
            if self._followed is not None and not self._followed.is_loaded:
                self._load(self._followed, fetcher)
            step = self._trainer.global_step
            if self._followed is not None and self._followed.is_new(step):
                self._followed.state["progress"] = progress.taken(self._trainer)
                if not self._followed.save(step, movers_of(self._trainer)):
                    self._followed = None
            original(fetcher)

        return advance

    def _load(self, followed: Followed, fetcher: Any) -> None:
        """Load before the first batch; the batches that were given before are drawn anew."""
        assert self._drawn is not None
        followed.state["progress"] = progress.taken(self._trainer)
        parts = {**parts_of(self._trainer), "loader": self._drawn}
        with _own_signals(self._trainer):
            try:
                restored = followed.load(parts, movers_of(self._trainer))
            except InvalidRequestError as error:
                self._give_up(error)
                return
        if not restored:
            followed.step = self._trainer.global_step
            return
        progress.put(self._trainer, progress.check(followed.state["progress"]))
        iter(fetcher)


@contextmanager
def _own_signals(trainer: Any) -> Iterator[None]:
    """Have the handlers that are put in place inside pass signals on to those of the script.

    Not to Lightning's, which ends the process with the exit code of success.
    """
    before = trainer._signal_connector._original_handlers.get(signal.SIGTERM)  # noqa: SLF001
    main = threading.current_thread() is threading.main_thread()
    if before is not None and main:
        signal.signal(signal.SIGTERM, before)
    yield
