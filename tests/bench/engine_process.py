"""One transfer engine of others over TCP: ``python engine_process.py NAME LENGTH_BYTES``.

Runs in whatever interpreter has the engine's wheel: needs nothing of this project. Two processes:
reads all of the far one's memory once for every line of the standard input, and prints the seconds
that took. Engines verify nothing; after each read, outside of the time, some bytes are compared.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

BLOCK_BYTES = 1 << 20
NEAR, FAR = "near", "far"
READS_COUNT = 2
"""Read side by side, as our fetch has two streams."""
POLL_S = 0.0005


class Memory:
    """Touched memory and where it lies."""

    def __init__(self, length_bytes: int) -> None:
        self.map = mmap.mmap(-1, length_bytes)
        self.map.madvise(23)  # MADV_POPULATE_WRITE
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        step = length_bytes // READS_COUNT
        self.ranges = [(at, step) for at in range(0, length_bytes, step)]


class Mooncake:
    """Mooncake's TransferEngine with its TCP transport, the handshake between the two."""

    def __init__(self, _: str, memory: Memory) -> None:
        from mooncake.engine import TransferEngine

        self._memory = memory
        self._engine = TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert self._engine.register_memory(memory.address, len(memory.map)) == 0

    def told(self) -> Any:
        """What the near process needs in order to read."""
        return f"127.0.0.1:{self._engine.get_rpc_port()}", self._memory.address

    def read(self, told: Any) -> None:
        """Fill the memory with that of the far process."""
        place, address = told
        code = self._engine.batch_transfer_sync_read(
            place,
            [self._memory.address + at for at, _ in self._memory.ranges],
            [address + at for at, _ in self._memory.ranges],
            [length for _, length in self._memory.ranges],
        )
        assert code == 0, f"Mooncake said {code}"


class Nixl:
    """NIXL with its UCX backend, which has TCP."""

    def __init__(self, name: str, memory: Memory) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
        self._memory = memory
        self._agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(memory.address, len(memory.map), 0, "")], "DRAM")
        self._met: dict[bytes, str] = {}

    def told(self) -> Any:
        """What the near process needs in order to read."""
        return self._agent.get_agent_metadata(), self._memory.address

    def read(self, told: Any) -> None:
        """Fill the memory with that of the far process."""
        metadata, address = told
        if metadata not in self._met:
            name = self._agent.add_remote_agent(metadata)
            self._met[metadata] = name.decode() if isinstance(name, bytes) else name
        mine, theirs = (
            self._agent.get_xfer_descs(
                [(begin + at, length, 0) for at, length in self._memory.ranges], "DRAM"
            )
            for begin in (self._memory.address, address)
        )
        handle = self._agent.initialize_xfer("READ", mine, theirs, self._met[metadata])
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        assert state == "DONE", f"NIXL said {state}"


ENGINES: dict[str, Callable[[str, Memory], Mooncake | Nixl]] = {"mooncake": Mooncake, "nixl": Nixl}


def main() -> None:
    """Read as often as there are lines of input."""
    name, length_bytes = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # the engines log to the standard output
    memory = Memory(length_bytes)
    engine = ENGINES[name](NEAR, memory)
    here, there = multiprocessing.Pipe()
    far = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(there, name, length_bytes), daemon=True
    )
    far.start()
    block, told = here.recv()
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        memory.map[-BLOCK_BYTES:] = bytes(BLOCK_BYTES)
        started_s = time.perf_counter()
        engine.read(told)
        took_s = time.perf_counter() - started_s
        assert memory.map[-BLOCK_BYTES:] == memory.map[:BLOCK_BYTES] == block
        print(took_s, file=answers, flush=True)
    os._exit(0)  # their threads do not always end


def _serve(there: Connection, name: str, length_bytes: int) -> None:
    """Let the near process read until it is gone."""
    memory = Memory(length_bytes)
    block = os.urandom(BLOCK_BYTES)
    memory.map[:] = block * (length_bytes // BLOCK_BYTES)
    engine = ENGINES[name](FAR, memory)
    there.send((block, engine.told()))
    try:
        there.recv()
    except EOFError:
        os._exit(0)


if __name__ == "__main__":
    main()
