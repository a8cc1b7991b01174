"""A killed job goes on bit for bit: model, averages, progress, loader, sums (P2, F82)."""

import pytest
import torch
from tests.unit.elastic import models
from tests.unit.state import worlds

from holdfast.elastic.accumulator import Accumulator
from holdfast.elastic.epochs import remaining_epochs_until
from holdfast.elastic.scaling_rules import AdamScale, AdaScale
from holdfast.state.capture import Capture

pytestmark = pytest.mark.usefixtures("alone")
SETTINGS = {
    "pairs": (torch.optim.SGD, AdaScale, 12, 12, {"momentum": 0.9}),
    "micro-batches": (torch.optim.SGD, AdaScale, 12, 24, {"momentum": 0.9}),
    "Adam, micro-batches": (torch.optim.Adam, AdamScale, 12, 24, {}),
    "Adam, pairs": (torch.optim.AdamW, AdamScale, 12, 12, {}),
}


class Job:
    """All that a script holds; ``run`` trains until so many updates are done."""

    def __init__(self, setting):
        optimizer, rule, batch, size, options = SETTINGS[setting]
        self.model, self.optimizer = models.adaptive(optimizer, rule=rule(), **options)
        self.loader = models.loader(batch, shuffle=True)
        if size != batch:
            self.loader.autoscale_batch_size(size, (1, 6), gradient_accumulation=True)
            self.loader._batching = models.loader(size, size // 6)._batching
            self.loader._choose = lambda: None
        self.epochs = remaining_epochs_until(4)
        self.stats = Accumulator()
        self.state = {
            "model": self.model, "optimizer": self.optimizer, "loader": self.loader,
            "epochs": self.epochs, "stats": self.stats,
        }  # fmt: skip
        self.capture = Capture(self.state, rank=0, world_size=1)
        self.seen = []

    def run(self, updates, each=None, last=None):
        """Train; call ``each`` at the end of each iteration, ``last`` at that of the last one."""
        for epoch in self.epochs:
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                loss = models.loss_of(self.model, inputs + 0.01 * torch.randn(()), targets)
                loss.backward()
                self.optimizer.step()
                self.stats["loss"] += loss * len(inputs)
                self.seen.append((epoch, inputs[:, 0].tolist()))
                if each is not None:
                    each()
                if self.model.updates == updates and self.loader.is_update_end:
                    return last() if last else None
        return None

    def end(self):
        """What must be the same, to the bit."""
        noise = self.model.adaptation.state_dict()
        kept = noise["gradients"].get("gradients")
        with self.stats.synchronized():
            sums = dict(self.stats)
        return (
            models.bits(self.model), noise["noise"], noise["progress"], noise["updates"],
            None if kept is None else kept.view(torch.int16).tolist(), sums, torch.rand(3).tolist(),
        )  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("killed_at", [1, 3, 4, 7])
def test_what_follows_a_restart_is_what_would_have_followed(tmp_path, setting, killed_at):
    """Also where a save fell between two micro-batches: the update is done again."""
    torch.manual_seed(11)
    whole = Job(setting)
    whole.run(11)
    expected = whole.end()
    torch.manual_seed(11)
    killed = Job(setting)
    saved = killed.run(killed_at, last=lambda: worlds.save_all(tmp_path, [killed.capture]))
    with saved as segments:
        resumed = Job(setting)
        resumed.capture.load(segments, step=1)
    resumed.run(11)

    assert killed.seen + resumed.seen == whole.seen
    assert resumed.end() == expected


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_save_changes_nothing_of_what_follows(setting):
    ends = []
    for saves in (False, True):
        torch.manual_seed(11)
        job = Job(setting)
        job.run(8, (lambda j=job: j.capture.live(j.capture.survey())) if saves else None)
        ends.append(job.end())

    assert ends[0] == ends[1]


def test_a_plain_ddp_job_becomes_an_elastic_one(tmp_path):
    """Its checkpoint lacks only the extra state."""
    plain = torch.nn.parallel.DistributedDataParallel(models.net(seed=9))
    with worlds.save_all(tmp_path, [Capture({"m": plain}, rank=0, world_size=1)]) as segments:
        model, _ = models.adaptive()
        found = Capture({"m": model}, rank=0, world_size=1).load(segments, step=1, strict=False)

    assert models.bits(model) == models.bits(plain)
    assert found.missing == ("m.extra_state",)


def test_the_state_dict_of_torch_has_it_too():
    model, optimizer = models.adaptive()
    for inputs, targets in models.loader(12):
        optimizer.zero_grad()
        models.loss_of(model, inputs, targets).backward()
        optimizer.step()
    other, _ = models.adaptive(seed=5)
    other.load_state_dict(model.state_dict())

    assert other.progress == model.progress == 8
    assert other.adaptation.noise.state_dict() == model.adaptation.noise.state_dict()
