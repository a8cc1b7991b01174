"""The history of logged values as bytes in a tensor: a save copies it and encodes what is new.

A run that logs each step has a history of megabytes, which no save should write as JSON anew.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from holdfast.errors import ManifestError

CAPACITY_BYTES_MIN = 1 << 14


class History:
    """A list of JSON values, of which more are only ever added at its end.

    ``tensor`` holds their texts, a line each, in its first ``length`` bytes; it is replaced by one
    of twice its size when it is full.
    """

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES_MIN) -> None:
        self.tensor = torch.zeros(capacity_bytes, dtype=torch.uint8)
        self.length = 0
        self._count = 0

    def follow(self, values: list[Any]) -> None:
        """Take in what was added to ``values`` since; a shorter list begins anew."""
        if len(values) < self._count:
            self.length = self._count = 0
        if len(values) == self._count:
            return
        text = "".join(f"{json.dumps(value)}\n" for value in values[self._count :]).encode()
        end = self.length + len(text)
        if end > len(self.tensor):
            larger = torch.zeros(max(end, 2 * len(self.tensor)), dtype=torch.uint8)
            larger[: self.length] = self.tensor[: self.length]
            self.tensor = larger
        self.tensor[self.length : end] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length, self._count = end, len(values)

    def values(self, length: int) -> list[Any]:
        """Return what the first ``length`` bytes hold, and go on behind them.

        Raises:
            ManifestError: they are no lines of JSON.
        """
        text = self.tensor[:length].numpy().tobytes()
        try:
            found = [json.loads(line) for line in text.splitlines()]
        except ValueError as cause:
            raise ManifestError("the saved history of logged values is no JSON") from cause
        self.length, self._count = length, len(found)
        return found
