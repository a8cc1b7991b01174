"""Loaders continue where they were, and the random stream does not move by making them again."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.unit.state.setups import Stream
from torch.utils.data import DataLoader, DistributedSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.errors import InvalidRequestError
from holdfast.state.capture import Capture
from holdfast.state.dataloaders import ResumableLoader

_SPEC = importlib.util.spec_from_file_location(
    "holdfast_test_worlds", Path(__file__).with_name("worlds.py")
)
worlds = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(worlds)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11

SIZE, BATCH, EPOCHS = 10, 3, 3
BATCHES = 4  # per epoch
DATA = torch.arange(SIZE)


def plain(workers: int, **more: object) -> ResumableLoader:
    return ResumableLoader(
        DataLoader(DATA, batch_size=BATCH, shuffle=True, num_workers=workers, **more)
    )


def stateful(workers: int, **more: object) -> StatefulDataLoader:
    return StatefulDataLoader(DATA, batch_size=BATCH, shuffle=True, num_workers=workers, **more)


def run(state: dict, log: list, *, until: int) -> None:
    """A training loop with dropout-like draws that calls ``pause`` at step ``until``."""
    while state["epoch"] < EPOCHS:
        for batch in state["loader"]:
            log.append((batch.tolist(), torch.rand(2).tolist()))
            state["step"] += 1
            if state["step"] == until:
                state["pause"]()
        state["epoch"] += 1
        log.append(torch.rand(1).item())
        if state["pause_after"] == state["epoch"]:
            state["pause"]()


def interrupted(
    tmp_path: Path, make: object, *, step: int, after_epoch: int = -1
) -> tuple[list, list]:
    """Return the log of an uninterrupted run, and that of one saved, thrown away and resumed."""
    segments = []
    log: list = []
    torch.manual_seed(3)
    state = {"epoch": 0, "step": 0, "loader": make(), "w": torch.zeros(2)}
    captured = {k: state[k] for k in ("loader", "w")} | {"at": {}}
    capture = Capture(captured, rank=0, world_size=1)

    def save() -> None:
        captured["at"].update(epoch=state["epoch"], step=state["step"], logged=len(log))
        segments.append(worlds.save_all(tmp_path, [capture]))

    run(_with(state, save, after_epoch), log, until=step)
    capture.release()

    torch.manual_seed(99)
    torch.rand(5)
    again = {"loader": make(), "w": torch.zeros(2), "at": {}}
    other = Capture(again, rank=0, world_size=1)
    with segments[0] as held:
        other.load(held, step=1)
    resumed = log[: again["at"]["logged"]]
    state = {"epoch": again["at"]["epoch"], "step": again["at"]["step"], "loader": again["loader"]}
    run(_with(state, lambda: None, -1), resumed, until=-1)
    other.release()
    return log, resumed


def _with(state: dict, pause: object, after_epoch: int) -> dict:
    state["pause"] = pause
    state["pause_after"] = after_epoch
    return state


@pytest.mark.parametrize("make", [plain, stateful])
@pytest.mark.parametrize("step", range(1, 2 * BATCHES + 1))
def test_a_run_resumed_at_any_batch_is_the_run_that_was_not_stopped(tmp_path, make, step):
    """G9: data order, draws between batches and epoch boundaries; step 4 and 8 end an epoch."""
    log, resumed = interrupted(tmp_path, lambda: make(0), step=step)

    assert log == resumed


@pytest.mark.parametrize("make", [plain, stateful])
@pytest.mark.parametrize("step", [1, BATCHES, BATCHES + 1])
def test_a_run_with_workers_is_resumed_the_same(tmp_path, make, step):
    """G9."""
    log, resumed = interrupted(tmp_path, lambda: make(2), step=step)

    assert log == resumed


@pytest.mark.parametrize("make", [plain, stateful])
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_checkpoint_between_epochs_is_resumed_the_same(tmp_path, make, epoch):
    """G9: the finished iterator must not be made again; the next draws like the original."""
    log, resumed = interrupted(tmp_path, lambda: make(0), step=-1, after_epoch=epoch)

    assert log == resumed


@pytest.mark.parametrize("step", [2, BATCHES])
def test_a_loader_with_its_own_generator_goes_on_with_it(tmp_path, step):
    log, resumed = interrupted(
        tmp_path, lambda: plain(0, generator=torch.Generator().manual_seed(5)), step=step
    )

    assert log == resumed


@pytest.mark.parametrize("make", [plain, stateful])
def test_wrapping_changes_no_draw_of_a_shuffled_loader(make):
    """ADR 0022: until its first batch is out, a loader draws from the global stream as ever."""
    torch.manual_seed(3)
    captured = make(0)
    capture = Capture({"l": captured}, rank=0, world_size=1)
    seen = [(batch.tolist(), torch.rand(1)) for _ in range(2) for batch in captured]
    capture.release()
    torch.manual_seed(3)
    free = make(0)
    free = free.loader if make is plain else free

    assert seen == [(batch.tolist(), torch.rand(1)) for _ in range(2) for batch in free]


def test_a_generator_that_was_not_seeded_moves_no_other():
    """Two runs that seed torch alone draw the same from torch, whatever NumPy begins with."""
    logs = []
    for unseeded in (1, 2):
        torch.manual_seed(3)
        np.random.seed(unseeded)  # noqa: NPY002 - stands for what the process began with
        loader = DataLoader(DATA, batch_size=2, collate_fn=lambda _: torch.rand(1).item())
        logs.append(list(ResumableLoader(loader)))

    assert logs[0] == logs[1]


def test_a_loop_that_counts_is_noticed_at_its_first_end_and_told(caplog):
    """Defect X12: it never asks for the end, so its last batch ends the epoch."""
    loader = plain(0)
    iterator = iter(loader)
    for _ in range(BATCHES):
        next(iterator)
    assert loader.state_dict()["live"] is True  # a loop over the loader looks the same here
    iterator = iter(loader)
    assert "counted=True" in caplog.text
    for _ in range(BATCHES):
        next(iterator)

    assert loader.state_dict()["live"] is False
    other = plain(0)
    other.load_state_dict(loader.state_dict())
    assert other.state_dict()["counted"] is True


def test_an_epoch_that_is_iterated_to_its_end_is_not_taken_for_counted(caplog):
    loader = plain(0)
    for _ in range(3):
        for _ in loader:
            pass

    assert not caplog.records
    assert loader.state_dict()["counted"] is False


class Late(Sampler):
    """Makes its generator when it is first used, and remembers more than its batches."""

    def __init__(self) -> None:
        self.rng = None
        self.seen: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> object:
        self.rng = self.rng or np.random.default_rng(1)
        order = self.rng.permutation(SIZE).tolist()
        self.seen[f"epoch {len(self.seen)}"] = order[:2]
        yield from order


def late() -> ResumableLoader:
    return ResumableLoader(DataLoader(DATA, batch_size=BATCH, sampler=Late()))


@pytest.mark.parametrize("step", [2, BATCHES + 1])
def test_what_a_sampler_makes_on_its_way_is_kept_too(tmp_path, step):
    """Defect L4: the generator is found after the first batch, and made anew after a restore."""
    log, resumed = interrupted(tmp_path, late, step=step)

    assert log == resumed


def test_a_loader_that_was_used_before_the_restore_is_put_back(tmp_path):
    """What had not changed when it was saved is as it was at first, not as it is now."""
    saved, used = late(), late()
    next(iter(used))
    used.load_state_dict(saved.state_dict())

    assert {} == used.loader.sampler.seen
    assert [b.tolist() for b in used] == [b.tolist() for b in saved]


def test_a_sampler_of_another_kind_is_refused_at_restore():
    saved = late()
    next(iter(saved))

    with pytest.raises(InvalidRequestError, match=r"had 'sampler\.rng' when"):
        ResumableLoader(DataLoader(DATA, sampler=[1, 2])).load_state_dict(saved.state_dict())


def inside_an_epoch(loader: ResumableLoader) -> tuple[dict, list]:
    """Return the state after one batch, and the samples that are left, in order."""
    torch.manual_seed(3)
    iterator = iter(loader)
    next(iterator)
    return loader.state_dict(), [value for batch in iterator for value in batch.tolist()]


def test_workers_may_be_added_inside_an_epoch():
    """The order of a map-style dataset does not depend on them."""
    state, left = inside_an_epoch(plain(0))
    again = plain(2)
    again.load_state_dict(state)

    assert left == [value for batch in again for value in batch.tolist()]


@pytest.mark.parametrize(
    ("saved", "here", "text"),
    [
        (lambda: stateful(0), lambda: stateful(2), "num_workers=0, but has num_workers=2"),
        (lambda: stateful(0), lambda: plain(0).loader, "stateful=True, but has stateful=False"),
        (
            lambda: DataLoader(DATA, 3, sampler=Late()),
            lambda: DataLoader(DATA, 2, sampler=Late()),
            "batch_size=3, but has batch_size=2",
        ),
        (lambda: DataLoader(Stream()), lambda: DataLoader(Stream(), num_workers=2), "num_workers"),
    ],
    ids=["workers of torchdata", "another kind", "another batch", "workers of a stream"],
)
def test_a_loader_of_another_make_is_refused_at_restore(saved, here, text):
    """Inside an epoch it would go on with other samples; between epochs it may change."""
    state, _ = inside_an_epoch(ResumableLoader(saved()))

    with pytest.raises(InvalidRequestError, match=text):
        ResumableLoader(here()).load_state_dict(state)
    ResumableLoader(here()).load_state_dict(ResumableLoader(saved()).state_dict())


def test_persistent_workers_are_started_anew_and_it_is_told(caplog):
    """Defect L1: from the second epoch on they gave other data after a restore."""
    plain(2, persistent_workers=True)
    assert "a data loader has persistent_workers=True" in caplog.text
    loader = stateful(2, persistent_workers=True)
    next(iter(loader))
    Capture({"data": {"train": loader}}, rank=0, world_size=1).release()

    assert "data loader 'data.train' has persistent_workers=True" in caplog.text
    assert loader._iterator is None, "the workers that lived on are let go"


def test_a_loader_left_before_its_end_begins_anew():
    loader = plain(0)
    for _ in loader:
        break

    assert loader.state_dict()["live"] is False


def test_the_epoch_of_a_distributed_sampler_is_kept():
    def make() -> ResumableLoader:
        sampler = DistributedSampler(DATA, num_replicas=2, rank=1, seed=1)
        return ResumableLoader(DataLoader(DATA, batch_size=2, sampler=sampler))

    loader, other = make(), make()
    loader.loader.sampler.set_epoch(7)
    iterator = iter(loader)
    next(iterator)
    other.load_state_dict(loader.state_dict())

    assert [b.tolist() for b in iterator] == [b.tolist() for b in other]
    assert 7 == other.loader.sampler.epoch


def test_capturing_an_unused_torchdata_loader_draws_nothing(tmp_path):
    """torchdata's state_dict() would make an iterator, and so draw from the global stream."""
    loader = stateful(0)
    capture = Capture({"l": loader}, rank=0, world_size=1)
    before = torch.get_rng_state()
    worlds.save_all(tmp_path, [capture]).close()

    assert torch.equal(before, torch.get_rng_state())
    assert type(loader) is not StatefulDataLoader
    capture.release()
    assert type(loader) is StatefulDataLoader


def test_a_loader_whose_iterators_are_drawn_from_in_turn_is_not_saved():
    """G9: evaluation on the training loader inside its epoch would come back as a new epoch."""
    loader = ResumableLoader(DataLoader(range(6)))
    looked_at = iter(loader)
    next(looked_at)
    outer = iter(loader)  # the first is kept, and let be
    next(outer)
    assert loader.state_dict()["live"]
    next(iter(loader))
    next(outer)

    with pytest.raises(InvalidRequestError, match="two iterators of a data loader"):
        loader.state_dict()


@pytest.mark.parametrize("make", [plain, stateful])
def test_a_live_loader_has_the_same_tensors_at_every_batch(make):
    """Else the first save of each epoch, and the second, would be planned anew."""
    capture = Capture({"l": make(0)}, rank=0, world_size=1)
    iterator = iter(capture.state["l"])
    shapes = []
    for _ in range(3):
        live = capture.live(capture.survey())
        shapes.append({name: tensor.shape for name, tensor in live.tensors.items()})
        next(iterator)
    assert shapes[0] == shapes[1] == shapes[2]
