"""One-shot checkpoints in a bucket, against a server (F89): several parts, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import AlreadyExistsError, DigestMismatchError, NotFoundError
from holdfast.objectstore import open_store

ELEMENTS = 5 << 20  # 20 MiB of float32: two parts


@pytest.fixture
def url(moto):
    return moto.url("runs/final")


def state(seed: int) -> dict[str, object]:
    torch.manual_seed(seed)
    return {"model": nn.Linear(ELEMENTS, 1), "extra": {"tokens": seed}}


def test_a_bucket_holds_it_as_a_folder_does(url):
    saved, target = state(1), state(2)
    with pytest.raises(NotFoundError):
        holdfast.load(url, target)
    holdfast.save(url, saved)
    holdfast.load(url, target)

    assert torch.equal(saved["model"].weight, target["model"].weight)
    assert 1 == target["extra"]["tokens"]
    with pytest.raises(AlreadyExistsError, match="overwrite=True"):
        holdfast.save(url, saved)

    store = open_store(url)
    name = "shard-00000-of-00001.safetensors"
    data = bytearray(store.get(name, length_bytes_max=1 << 30))
    data[17 << 20] ^= 1
    store.put(name, bytes(data))
    store.close()
    with pytest.raises(DigestMismatchError, match=f"part 1 of {name}"):
        holdfast.load(url, target)
