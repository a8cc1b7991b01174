"""A loader that nobody has any more is let go at once: its workers are told to end.

Left to a collection of garbage they are not: the queues are closed first, and whatever thread
collects, the training one, waits five seconds for each worker before it ends it.
"""

import copy
import gc
import pickle
import weakref

import pytest
from tests.unit.state.attempts import train
from tests.unit.state.test_elastic_lanes import lines
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.state.capture import Capture

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11


@pytest.fixture
def _nothing_is_collected():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_nothing_is_collected")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_no_loader_waits_for_a_collection(tmp_path, kind):
    """Captured, gone on with on as many ranks and on others, and released."""
    known = []

    def make(rank, ranks, batch_size):
        loader = lines(2, kind)(rank, ranks, batch_size)
        known.append(weakref.ref(getattr(loader, "loader", loader)))
        return loader

    _, saved = train(tmp_path / "1", make, None, ranks=2, steps=2)
    _, saved = train(tmp_path / "2", make, saved, ranks=2, steps=1)
    train(tmp_path / "3", make, saved, ranks=3, steps=1)

    assert [loader() for loader in known] == [None] * 7


@pytest.mark.usefixtures("_nothing_is_collected")
def test_a_loader_whose_capture_is_gone_is_as_it_was():
    """Nobody released it; it can be iterated, and captured again."""
    loader = StatefulDataLoader(list(range(6)), batch_size=2)
    capture = Capture({"loader": loader}, rank=0, world_size=1)
    next(iter(loader))
    del capture

    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]

    again = Capture({"loader": loader}, rank=0, world_size=1)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    again.release()
    assert type(loader) is StatefulDataLoader


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_of_a_captured_loader_is_another_one_and_plain(copied):
    """As for evaluation: batches of it are none of the captured one, whose saves go on."""
    loader = StatefulDataLoader(list(range(6)), batch_size=2)
    capture = Capture({"loader": loader}, rank=0, world_size=1)
    survey = capture.survey()
    other = copied(loader)
    epoch = iter(loader)
    next(epoch)

    assert type(other) is StatefulDataLoader
    assert [batch.tolist() for batch in other] == [[0, 1], [2, 3], [4, 5]]
    assert [batch.tolist() for batch in epoch] == [[2, 3], [4, 5]]
    capture.live(survey)
    Capture({"loader": other}, rank=0, world_size=1).survey()
    capture.release()
    assert type(loader) is StatefulDataLoader
