"""Scripts with a Trainer of Lightning under ``--auto``: killed all along, each ends alike.

They are run in this process, over a checkpointer of which every step is safe (``memory``).
"""

from __future__ import annotations

import pytest
from tests.unit.auto.memory import Runs, same
from torch import nn

from holdfast.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's libraries
EVERY = 6

BEGIN = """
import sys, tempfile, warnings, torch
import lightning.pytorch as pl
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
warnings.simplefilter("ignore")

class Root(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 1))

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.root = Root()
    def loss(self, batch):
        return nn.functional.mse_loss(self.root(batch[0]), batch[1])
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]

pl.seed_everything(5, verbose=False)
data = TensorDataset(torch.randn(26, 4), torch.randn(26, 1))
train = DataLoader(data, batch_size=4, shuffle=True)
valid = DataLoader(data, batch_size=9, shuffle=True)
net = Net()
def trainer_of(**kwargs):
    given = dict(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
    )
    return pl.Trainer(**{**given, **kwargs})
def end(trainer):
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return [trainer.lightning_module.state_dict(), logged, torch.rand(2)]
"""


@pytest.fixture
def runs(tmp_path, monkeypatch, caplog):
    return Runs(tmp_path / "script.py", monkeypatch, caplog)


SAME = {
    "a plain one": """
trainer = trainer_of()
trainer.fit(net, train)
result = end(trainer)
""",
    "accumulation, validation inside epochs, clipping": """
trainer = trainer_of(accumulate_grad_batches=3, val_check_interval=2, gradient_clip_val=0.5)
trainer.fit(net, train, valid)
result = end(trainer)
""",
    "a plateau by a validation of every other epoch": """
class Plateau(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule,
            "monitor": "val_loss", "strict": False}}
trainer = trainer_of(check_val_every_n_epoch=2, max_epochs=3)
trainer.fit(Plateau(), train, valid)
result = end(trainer)
""",
    "a number of steps, a part of the batches, early stopping": """
stop = pl.callbacks.EarlyStopping("val_loss", patience=2)
best = pl.callbacks.ModelCheckpoint(tempfile.mkdtemp(), monitor="val_loss", save_top_k=2)
trainer = trainer_of(max_steps=13, max_epochs=-1, limit_train_batches=5, callbacks=[stop, best],
    enable_checkpointing=True)
trainer.fit(net, train, valid)
scores = sorted(best.best_k_models.values())
result = [end(trainer), stop.wait_count, stop.best_score, scores, best.kth_value]
""",
    "two workers, draws in the dataset": """
class Noisy(Dataset):
    def __len__(self):
        return 26
    def __getitem__(self, i):
        x, y = data[i]
        return x + torch.randn(4), y
trainer = trainer_of(max_epochs=2)
trainer.fit(net, DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2))
result = end(trainer)
""",
    "two optimizers by hand": """
class Pair(Net):
    automatic_optimization = False
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        for optimizer, part in zip(self.optimizers(), (self.root, self.other)):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(part(batch[0]), batch[1]))
            optimizer.step()
    def configure_optimizers(self):
        other = torch.optim.SGD(self.other.parameters(), 0.1)
        return [torch.optim.Adam(self.root.parameters()), other]
trainer = trainer_of()
trainer.fit(Pair(), train)
result = end(trainer)
""",
    "what an epoch sets, a data module": """
class Course(Net):
    def on_train_epoch_start(self):
        self.rate = 1 / (1 + self.current_epoch)
    def loss(self, batch):
        return self.rate * super().loss(batch)
class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(data, batch_size=4, shuffle=True)
trainer = trainer_of()
trainer.fit(Course(), datamodule=Data())
result = end(trainer)
""",
    "an average of weights": """
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
trainer = trainer_of(callbacks=[pl.callbacks.EMAWeightAveraging(decay=0.9)])
trainer.validate(Net(), valid)
trainer.fit(net, train, valid)
result = end(trainer)
""",
    "two fits": """
trainer = trainer_of(max_epochs=1)
trainer.fit(net, train)
first = end(trainer)
trainer = trainer_of(max_epochs=2)
trainer.fit(Net(), train, valid)
result = [first, end(trainer)]
""",
    "a rate that was looked for": """
from lightning.pytorch.tuner import Tuner
class Rate(Net):
    lr = 0.05
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
net = Rate()
Tuner(trainer_of()).lr_find(net, train, num_training=10)
trainer = trainer_of()
trainer.fit(net, train)
result = [end(trainer), net.lr]
""",
    "the older name of the package, a compiled module": """
import pytorch_lightning
class Older(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.root = torch.compile(Root(), backend="eager")
    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.root(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)
trainer = pytorch_lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False,
    enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False)
trainer.fit(Older(), train)
result = end(trainer)
""",
}
OURS = {
    "workers that stay, which are started anew for each epoch": """
trainer = trainer_of()
trainer.fit(net, DataLoader(data, batch_size=4, num_workers=1, persistent_workers=True))
result = end(trainer)
""",
    "two loaders, the shorter one over and over": """
class Both(Net):
    def training_step(self, batch, batch_idx):
        return self.loss(batch["one"]) + self.loss(batch["two"])
two = DataLoader(TensorDataset(*data[:10]), batch_size=4, shuffle=True)
trainer = trainer_of()
trainer.fit(Both(), {"one": train, "two": two})
result = end(trainer)
""",
    "a stream of no known length that draws": """
class Stream(IterableDataset):
    def __iter__(self):
        for i in torch.randperm(26).tolist():
            yield data[i]
trainer = trainer_of(accumulate_grad_batches=2)
trainer.fit(net, DataLoader(Stream(), batch_size=4))
result = end(trainer)
""",
}
"""These draw from a stream apart under ``--auto``, as all captured loaders do."""


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_it_ends_with_the_same_bits_as_without_us(runs, text):
    runs.write(text, BEGIN)
    assert same(runs.run(), runs.plain())
    assert runs.kept
    assert runs.differing(EVERY) == []


@pytest.mark.parametrize("text", OURS.values(), ids=OURS)
def test_it_ends_with_the_same_bits_as_undisturbed(runs, text):
    runs.write(text, BEGIN)
    assert runs.differing(EVERY) == []


def test_it_is_killed_in_forwards_of_accumulation_and_validation(runs):
    runs.write(SAME["accumulation, validation inside epochs, clipping"], BEGIN)

    def forwards(count):
        def counts(module, _):
            if type(module).__name__ == "Root":
                count()

        return nn.modules.module.register_module_forward_pre_hook(counts)

    runs.run(counts=forwards)
    count, first = runs.steps, 7  # before that no step is saved
    runs.kept = {}
    expected = runs.run()
    for at in range(first, count, 4):
        runs.kept = {}
        assert runs.run(kill_at=at, counts=forwards) is None
        assert same(runs.run(), expected)


EXCHANGED = {
    "a layer that is thawed and gets a group of its own": """
class Two(Net):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(4, 4)
    def loss(self, batch):
        return nn.functional.mse_loss(self.root(self.backbone(batch[0])), batch[1])
    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)
thaw = pl.callbacks.BackboneFinetuning(1, verbose=False)
trainer = trainer_of(callbacks=[thaw])
trainer.fit(Two(), train)
result = end(trainer)
""",
    "a schedule of averaging in the place of the module's": """
average = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
trainer = trainer_of(max_epochs=3, callbacks=[average])
trainer.fit(net, train)
result = end(trainer)
""",
}


@pytest.mark.parametrize("text", EXCHANGED.values(), ids=EXCHANGED)
def test_once_a_callback_has_exchanged_what_moves_the_weights_nothing_is_saved(runs, text):
    """It goes back to before that: nobody could put it in its place ahead of Lightning's hooks."""
    runs.write(text, BEGIN)
    assert same(runs.run(), runs.plain())
    runs.kept = {}
    runs.run()
    assert "nothing is saved from step 7 on" in runs.told
    assert runs.kept[""]["step"] == 6
    assert runs.differing(EVERY) == []


TOLD = {
    "a count of the module's own": (
        "Net.calls: these change while it trains",
        """
class Counting(Net):
    calls = 0
    def training_step(self, batch, batch_idx):
        self.calls += 1
        return super().training_step(batch, batch_idx)
Counting.__name__ = "Net"
trainer = trainer_of()
trainer.fit(Counting(), train)
""",
    ),
    "a hook for Lightning's own checkpoints": (
        "Keeping.on_save_checkpoint is not called",
        """
class Keeping(Net):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["count"] = 3
trainer = trainer_of()
trainer.fit(Keeping(), train)
""",
    ),
    "a step that draws itself": (
        "nothing is saved, the script runs on alone: training_step draws its batches itself",
        """
class Drawing(Net):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)
trainer = trainer_of(max_epochs=1)
trainer.fit(Drawing(), train)
""",
    ),
    "a finder inside": (
        "nothing is saved, the script runs on alone: LearningRateFinder trains inside fit",
        """
class Rate(Net):
    lr = 0.05
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
trainer = trainer_of(callbacks=[pl.callbacks.LearningRateFinder(num_training_steps=8)])
trainer.fit(Rate(), train)
""",
    ),
    "data that come from no loader": (
        "nothing is saved, the script runs on alone: the training data come from a Rows",
        """
class Rows:
    def __iter__(self):
        return iter([data[:4], data[4:8]])
trainer = trainer_of(max_epochs=1)
trainer.fit(net, Rows())
""",
    ),
}


@pytest.mark.parametrize(("told", "text"), TOLD.values(), ids=TOLD)
def test_what_does_not_come_back_is_told_by_name(runs, told, text):
    runs.write(f"{text}\nresult = end(trainer)\n", BEGIN)
    assert same(runs.run(), runs.plain())
    runs.kept = {}
    runs.run()
    assert told in runs.told


def test_an_end_before_the_checkpoint_is_refused(runs):
    fit = "trainer = trainer_of(max_steps=%d)\ntrainer.fit(net, train)\nresult = end(trainer)\n"
    runs.write(fit % 9, BEGIN).run(kill_at=9)
    runs.write(fit % 3, BEGIN)
    with pytest.raises(CheckpointError, match="ended before it asked for a batch"):
        runs.run()


def test_its_own_checkpoint_is_taken_where_there_is_none_of_ours(runs):
    runs.write(
        """
import os
own = __file__ + ".own"
keep = pl.callbacks.ModelCheckpoint(own, save_last=True, every_n_epochs=1)
trainer = trainer_of(callbacks=[keep], enable_checkpointing=True)
last = os.path.join(own, "last.ckpt")
trainer.fit(net, train, ckpt_path=last if os.path.exists(last) else None, weights_only=False)
result = end(trainer)
""",
        BEGIN,
    )
    runs.run(kill_at=9)
    runs.kept = {}
    runs.run(kill_at=5)
    assert runs.steps == 5
    begun = runs.kept[""]["step"]
    assert begun == 7 + 4
    assert runs.run() is not None
    assert runs.steps == 14 - begun


def test_with_a_callback_alone_it_is_the_same(runs):
    runs.write(
        """
from holdfast.integrations.lightning import HoldfastCallback
average = torch.optim.swa_utils.AveragedModel(net)
class Average(pl.Callback):
    def on_train_batch_end(self, *_):
        average.update_parameters(net)
ours = HoldfastCallback("job", also={"average": average})
trainer = trainer_of(callbacks=[ours, Average()])
trainer.fit(net, train, valid)
result = [end(trainer), average.state_dict()]
""",
        BEGIN,
    )
    assert same(runs.run(auto=False), runs.plain())
    assert "also_average" in runs.kept[""]["values"]
    assert runs.differing(EVERY, auto=False) == []
