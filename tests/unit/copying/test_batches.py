"""Batches of bounded size, and tensors that are cut to fit."""

from __future__ import annotations

import pytest
import torch

from holdfast.copying.batches import batches, cut


def test_batches_are_bounded_by_count_and_by_bytes():
    pairs = [(torch.empty(3), torch.ones(3))] * 5000

    assert [4096, 904] == [len(batch) for batch in batches(pairs)]
    assert [2, 2, 1] == [len(batch) for batch in batches(pairs[:5], bytes_max=24)]


@pytest.mark.parametrize(
    "source",
    [
        torch.arange(60.0).reshape(3, 20),
        torch.arange(60.0).reshape(3, 20).t(),
        torch.arange(60.0).reshape(1, 1, 60),
        torch.arange(120.0)[::2],
        torch.tensor(7.0),
        torch.empty(0, 4),
        torch.arange(4.0).reshape(2, 2).expand(5, 2, 2),
    ],
    ids=["rows", "turned", "leading ones", "gaps", "scalar", "nothing", "expanded"],
)
@pytest.mark.parametrize("bytes_max", [1, 16, 100, 10_000])
def test_a_tensor_that_is_cut_is_copied_whole(source, bytes_max):
    target = torch.full(source.shape, -1.0)
    parts = list(cut((target, source), bytes_max))
    for into, out_of in parts:
        into.copy_(out_of)

    assert torch.equal(target, source)
    assert all(into.nbytes <= max(bytes_max, 4) for into, _ in parts)
