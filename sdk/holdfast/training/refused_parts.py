"""Has what a guard has refused written into a folder, to be looked at; no restore ever reads it.

Nobody waits for the folder. One thread copies the slot piece by piece, another one gives these to
the folder and may hang there: it reads no slot, so the slot is put back once nothing has moved for
``STILL_S_MAX``, and nothing more is kept.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.logs import steady_logger
from holdfast.snapshot.buffer import SlotBuffer
from holdfast.snapshot.engine import Snapshot
from holdfast.training.kept_files import KeptFile, delete_left

KEPT_COUNT_MAX = 4
"""Files that one process writes: a training that goes on with NaN must not fill the disk."""
PIECE_BYTES = 4 << 20
"""Copied at once, under the interpreter's lock; three of them are in memory beside the slot."""
STILL_S_MAX = 30.0
"""A folder that has taken no piece of a file for so long hangs."""
THREAD_NAME, READER_NAME = "holdfast-keep", "holdfast-keep-read"

log = steady_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Task:
    """A slot to be written into a file, and who takes it back once it was read."""

    file: KeptFile
    buffer: SlotBuffer
    length_bytes: int
    let_go: Callable[[SlotBuffer], None]


class RefusedParts:
    """One rank's part of the first of refused steps that follow each other, as a file each time.

    Files are ``<folder>/step-<step>-attempt-<generation>-rank-<rank>.safetensors``, the segment as
    it lay in its slot: any safetensors reader opens them. They appear whole, and replace nothing.

    ``tell`` is called with what people should know if a file is not kept, on any thread.
    """

    def __init__(self, folder: Path, *, rank: int, who: str, tell: Callable[[str], None]) -> None:
        self._folder = folder
        self._rank = rank
        self._who = who
        self._tell = tell
        self._count = 0
        self._in_a_row = False
        self._given_up = False
        self._ended = False
        self._idle = threading.Event()
        self._idle.set()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # For each file itself, its bytes, None; and None in place of a file at the end.
        self._pieces: queue.Queue[KeptFile | bytes | None] = queue.Queue(maxsize=1)
        for name, target in ((THREAD_NAME, self._write_files), (READER_NAME, self._read_slots)):
            # Now: at exit no thread starts any more. Daemons: a process does not wait for a folder.
            threading.Thread(target=target, name=name, daemon=True).start()

    def take(
        self, snapshot: Snapshot, *, refused: bool, let_go: Callable[[SlotBuffer], None]
    ) -> bool:
        """Have a copied snapshot written if it is the first that is refused; waits for nothing.

        Returns:
            Whether its slot is read from now on: ``let_go`` takes it back, once, on another thread.
        """
        first, self._in_a_row = refused and not self._in_a_row, refused
        if not first or self._ended or self._given_up or self._count >= KEPT_COUNT_MAX:
            return False
        if not self._idle.is_set():
            self._say_lost(snapshot.step, "an earlier one is still being written")
            return False
        self._count += 1
        self._idle.clear()
        file = KeptFile(self._folder, snapshot.step, snapshot.generation, self._rank)
        self._tasks.put(_Task(file, snapshot.buffer, snapshot.plan.length_bytes, let_go))
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait until what was taken is written, but not for a folder that hangs."""
        if not self._idle.is_set():
            log.info("%s: waits until what was refused is written", self._who)
            self._idle.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Wait as ``wait`` does; nothing is taken any more, and the threads end."""
        self.wait(timeout_s)
        self._ended = True
        self._tasks.put(None)

    def _read_slots(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                self._read(task)
                self._pieces.put(None, timeout=STILL_S_MAX)
            except queue.Full:
                still = f"{self._folder} has taken nothing for {STILL_S_MAX:.0f} s"
                self._give_up(task.file.step, still)
            except Exception as error:  # noqa: BLE001 - the edge of this thread
                self._give_up(task.file.step, f"its slot cannot be read: {error}")
        with contextlib.suppress(queue.Full):
            self._pieces.put(None, timeout=STILL_S_MAX)

    def _read(self, task: _Task) -> None:
        """Hand a slot over to the other thread; puts the slot back in any case.

        Raises:
            queue.Full: nothing was taken for so long.
        """
        try:
            self._pieces.put(task.file, timeout=STILL_S_MAX)
            for begin in range(0, task.length_bytes, PIECE_BYTES):
                end = min(begin + PIECE_BYTES, task.length_bytes)
                piece = task.buffer.between(begin, end).numpy().tobytes()
                self._pieces.put(piece, timeout=STILL_S_MAX)
        finally:
            task.let_go(task.buffer)

    def _give_up(self, step: int, reason: str) -> None:
        """Keep nothing more; the other thread hears of it if it ever comes back."""
        self._given_up = True  # first: what it takes after this is the end of no file
        with contextlib.suppress(queue.Empty):
            self._pieces.get_nowait()
        self._pieces.put_nowait(None)
        self._say_lost(step, f"{reason}; what is refused from now on is not kept either")
        self._idle.set()

    def _write_files(self) -> None:
        while not self._given_up and isinstance(file := self._pieces.get(), KeptFile):
            pieces = self._handed_over()
            try:
                delete_left(self._folder, attempt=file.attempt)
                file.write(pieces)
            except Exception as error:  # noqa: BLE001 - the edge of this thread
                if not self._given_up:  # else it was said
                    self._say_lost(file.step, str(error))
                self._pass_over(pieces)
            else:
                log.warning("%s: step %d, refused, is kept in %s", self._who, file.step, file.path)
            self._idle.set()

    def _handed_over(self) -> Iterator[bytes]:
        """Yield the pieces of one file.

        Raises:
            TimeoutError: it was given up: some are missing.
        """
        while isinstance(piece := self._pieces.get(), bytes):
            yield piece
        if self._given_up:
            raise TimeoutError(f"{self._folder} was given up")

    @staticmethod
    def _pass_over(pieces: Iterator[bytes]) -> None:
        with contextlib.suppress(TimeoutError):
            for _ in pieces:
                continue

    def _say_lost(self, step: int, reason: str) -> None:
        text = f"step {step}, refused, is not kept: {reason}"
        log.warning("%s: %s", self._who, text)
        self._tell(text)
