"""The ranks that save together, and how they agree: what fails on one fails on all.

What they tell each other is JSON in byte tensors of fixed size: nothing is pickled (P9). The
deadline of each exchange is the process group's own.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from holdfast import errors
from holdfast.errors import CheckpointError, PreconditionError, UnavailableError
from holdfast.format.tree import Json

MESSAGE_BYTES = 2048
TEXT_LENGTH_MAX = 300

_KINDS: dict[str, type[CheckpointError]] = {
    kind.kind: kind for kind in (getattr(errors, name) for name in errors.__all__)
}


@dataclass(frozen=True, slots=True)
class World:
    """This rank among those that call together."""

    rank: int
    size: int

    def exchange(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of every rank, by rank; collective."""
        if self.size == 1:
            return [data]
        assert len(data) <= MESSAGE_BYTES, "a message has a bounded length"
        return [text.rstrip(b" ") for text in self._all(data.ljust(MESSAGE_BYTES))]

    def gather(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of every rank, of any length, by rank; collective."""
        lengths = [int(text) for text in self.exchange(str(len(data)).encode())]
        everybody = self._all(data.ljust(max(lengths)))
        return [text[:length] for text, length in zip(everybody, lengths, strict=True)]

    def _all(self, data: bytes) -> list[bytes]:
        """Return the ``data`` of every rank, which is as long on all of them."""
        if self.size == 1:
            return [data]
        device = "cpu" if "cpu" in dist.get_backend_config() else "cuda"
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        said = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(said, own)
        return [bytes(text.cpu().numpy()) for text in said]


def find_world(*, alone: bool = False) -> World:
    """Return the world of the default process group; a process without one is alone.

    Raises:
        PreconditionError: not ``alone``, and the launcher started several ranks.
    """
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    if not alone and os.environ.get("WORLD_SIZE", "1") != "1":
        raise PreconditionError(
            f"call save() after init_process_group: without it, the "
            f"{os.environ['WORLD_SIZE'][:20]} ranks cannot write one checkpoint together"
        )
    return World(0, 1)


class Agreement:
    """A block that all ranks pass, or none.

    Inside, set ``value`` to what the others are to know; afterwards ``values`` has everybody's.
    At the end all wait for each other. An error of one's own goes on its way; one of another
    rank is raised here, in its own class, naming the rank.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.value: dict[str, Json] = {}
        self.values: list[dict[str, Json]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._world.size == 1:
            self.values = [self.value]
            return
        said = _failure(error) if error is not None else _encoded({"value": self.value})
        answers = [json.loads(text) for text in self._world.exchange(said)]
        if error is not None:
            return
        for rank, answer in enumerate(answers):
            if "value" not in answer:
                failure = _KINDS.get(str(answer["kind"]), UnavailableError)
                raise failure(f"rank {rank} failed: {answer['text']}", rank=rank)
        self.values = [answer["value"] for answer in answers]


def _failure(error: BaseException) -> bytes:
    """Return what the others hear of ``error``: its text is cut until the message fits.

    A rank that failed must take part in the exchange whatever its error says, and one character
    of a text may take twelve bytes of JSON.
    """
    kind = error.kind if isinstance(error, CheckpointError) else ""
    text = f"{type(error).__name__}: {error}"[:TEXT_LENGTH_MAX]
    while len(said := _encoded({"kind": kind, "text": text})) > MESSAGE_BYTES:
        text = text[: len(text) // 2]
    return said


def _encoded(said: Json) -> bytes:
    return json.dumps(said).encode()
