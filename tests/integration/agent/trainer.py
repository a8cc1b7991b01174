"""Forks trainers without torch: each locks its session, then does what standard input says.

``python trainer.py`` has a socket as its input: a message names arena and session, and brings the
trainer's own input and output; the answer is its pid. What it imports all trainers have at once.

``write SLOT INC STEP GENERATION [SIZE] [RANK] [RUN] [WORLD_SIZE]`` fills and closes; ``begin``
stops half way and keeps the lock; ``finish`` closes what was begun; each answers with one line.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from holdfast.core.ids import Generation, Rank, RunId, ShardId, Step
from holdfast.format.segment import SegmentIdentity, blob_spec, header_template

ORDER_BYTES_MAX = 4096
fds: dict[int, tuple[int, mmap.mmap]] = {}


def template(length: int, rank: int, run: str, world_size: int):
    """A header for a segment of exactly ``length`` bytes."""
    identity = SegmentIdentity(
        id=ShardId(RunId(run), Step(0), Generation(1), Rank(rank)),
        job="job",
        world_size=world_size,
        plan_hash="p" * 32,
    )
    size = length
    while True:
        made = header_template(identity, [blob_spec("data", size)])
        if made.length_bytes <= length:
            break
        size -= made.length_bytes - length
    return header_template(identity, [blob_spec("data", size)])


def payload(step: int, length: int) -> bytes:
    """Bytes that only this step has."""
    seed = hashlib.sha256(str(step).encode()).digest()
    return (seed * (length // len(seed) + 1))[:length]


def begin(arena: Path, slot: str, incarnation: str, step: int, length: int):
    name = arena / f"{slot}.{incarnation}.open"
    inode = name.stat().st_ino
    if inode not in fds:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        fds[inode] = (fd, mmap.mmap(fd, length))
    fd, view = fds[inode]
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    data = payload(step, length)
    view[: length // 2] = data[: length // 2]
    return fd, view, data


def finish(arena: Path, begun, held) -> str:
    slot, incarnation, step, generation, length, rank, run, world_size = begun
    fd, view, data = held
    view[length // 2 :] = data[length // 2 :]
    made = template(length, rank, run, world_size)
    head = made.fill(step=step, generation=generation, parent=None)
    view[: len(head)] = head
    try:
        name = arena / f"{slot}.{incarnation}.open"
        name.rename(name.with_suffix(".closed"))
    except FileNotFoundError:
        return "gone"
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
    return "closed"


def train(arena: Path, session: str) -> None:
    """Be a trainer until the input ends."""
    lock = os.open(
        arena / "sessions" / session, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
    )
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("locked", flush=True)
    begun = None
    for line in sys.stdin:
        verb, *words = line.split()
        if verb in ("write", "begin"):
            slot, incarnation, step, generation, *rest = words
            length, rank, run, world_size = (*rest, *("1048576", "0", "r1", "1")[len(rest) :])
            begun = (
                slot, incarnation, int(step), int(generation),
                int(length), int(rank), run, int(world_size),
            )  # fmt: skip
            try:
                held = begin(arena, slot, incarnation, int(step), int(length))
            except OSError as error:
                print(type(error).__name__, flush=True)
                continue
            if verb == "begin":
                print("begun", flush=True)
                continue
        print(finish(arena, begun, held), flush=True)


def live(order: bytes, streams: list[int]) -> None:
    """Be the process of one trainer."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    arena, session = order.decode().split("\n")
    try:
        train(Path(arena), session)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    """Fork trainers until nobody can ask for one any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries them
    orders = socket.socket(fileno=os.dup(0))
    while True:
        order, streams, _, _ = socket.recv_fds(orders, ORDER_BYTES_MAX, 2)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            live(order, streams)
        for stream in streams:
            os.close(stream)
        orders.send(str(pid).encode())


if __name__ == "__main__":
    main()
