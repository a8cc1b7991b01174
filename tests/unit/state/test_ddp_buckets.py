"""What cannot be put back is said by name, and no rank does what the others do not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.state import ddp_buckets as buckets


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """One group that outlives every wrapper: else a wrapper's end may end the group, and wait with
    the interpreter's lock for a gloo thread that waits for that lock."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def ddp(group):
    return DistributedDataParallel(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), process_group=group
    )


pytestmark = pytest.mark.filterwarnings("ignore:.*barrier.*")


def backward(ddp):
    ddp(torch.ones(1, 2)).sum().backward()


def order_of(ddp):
    return buckets.BucketOrder(ddp, lambda _: "p")


def test_the_order_is_known_after_the_first_backward_and_stays(ddp):
    """G9: also between that backward and the forward in which torch rebuilds its buckets."""
    order = order_of(ddp)
    before = order.known()
    backward(ddp)
    pending = order.known()
    backward(ddp)
    rebuilt = order.known()

    assert before is None
    assert {0, 1, 2, 3} == {i for run in pending["runs"] for i in buckets._unrolled(run, 4)}
    assert pending is rebuilt


def test_an_order_that_was_put_back_is_the_one_that_is_saved_next(ddp):
    saved = {"names": order_of(ddp)._names, "runs": [[1, 2], [0, 0], [3, 3]]}
    order = order_of(ddp)
    assert "" == order.put(saved)
    assert saved == order.known()
    backward(ddp)
    backward(ddp)

    assert ddp._has_rebuilt_buckets
    assert saved == order.known()


def test_a_wrapper_that_has_trained_already_takes_the_order_too(ddp):
    """G9: ``restore()`` may come after a step that warmed up."""
    backward(ddp)
    backward(ddp)
    order = order_of(ddp)
    saved = {"names": order._names, "runs": [[1, 2], [0, 0], [3, 3]]}
    assert "" == order.put(saved)
    assert not ddp._has_rebuilt_buckets, "torch's own hooks ask for it"
    backward(ddp)

    assert [0, 1, 2, 3] == sorted(buckets._rebuilt(ddp))
    assert saved == order.known()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda saved, _: saved.update(names="other"), "other parameters learn here"),
        (lambda saved, _: saved.update(runs=[[0, 9]]), "other parameters learn here"),
        (lambda saved, _: saved.update(runs=[[0, 2], [2, 3]]), "other parameters learn here"),
        (lambda saved, _: saved.update(runs="x"), "other parameters learn here"),
        (lambda _, ddp: ddp.module[0].weight.requires_grad_(requires_grad=False), "were frozen"),
        (
            lambda _, ddp: ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
            "the built-in hook",
        ),
    ],
)
def test_what_cannot_be_put_back_is_left_and_said(ddp, change, reason):
    """Issue 7: where torch does not let us, restore() says so by name."""
    order = order_of(ddp)
    saved = {"names": order._names, "runs": [[3, 0]]}
    reducer = ddp.reducer
    change(saved, ddp)

    assert reason in order.put(saved)
    assert ddp.reducer is reducer


def test_a_torch_without_the_way_is_named(ddp, monkeypatch):
    monkeypatch.setattr(buckets, "_NEEDED", ("_of_another_version",))
    order = order_of(ddp)
    backward(ddp)

    assert order.known() is None
    assert f"torch {torch.__version__} has no _of_another_version" == order.put({"runs": []})


@pytest.mark.parametrize("order", [[], [0], [5, 4, 3, 0, 1, 7], [2, 1, 2], [0, 1, 2, 1, 0]])
def test_runs_are_what_they_stand_for(order):
    runs = buckets._runs(order)

    assert order == [index for run in runs for index in buckets._unrolled(run, 8)]
