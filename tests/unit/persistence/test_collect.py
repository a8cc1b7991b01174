"""Deleting a checkpoint that has expired."""

from __future__ import annotations

import threading

from holdfast.core.ids import CheckpointId
from holdfast.format import keys
from holdfast.objectstore.memory import MemoryStore
from holdfast_services.persistence.collect import collect

JOB, KEY = "gpt", CheckpointId("0123456789ab", 5, 1)


class Late(MemoryStore):
    """A manifest is written again once the folder's other objects have been listed."""

    def delete(self, names):
        super().delete(names)
        if any(name.endswith("shard") for name in names):
            self.put(keys.manifest_key(JOB, KEY), b"{}")


def test_a_manifest_that_is_written_meanwhile_goes_too():
    """P6: its writer had been paused; a folder with nothing but a manifest would stay for ever."""
    store = Late()
    store.put(keys.manifest_key(JOB, KEY), b"{}")
    store.put(keys.folder(JOB, KEY) + "shard", b"bytes")

    collect(store, JOB, KEY, threading.Event())

    assert [] == list(store.list(keys.folder(JOB, KEY)))
