"""Scripts with a Trainer of transformers under ``--auto``: killed all along, each ends alike.

They are run in this process, over a checkpointer of which every step is safe (``memory``).
"""

from __future__ import annotations

import shutil

import pytest
from tests.unit.auto.memory import Runs, same
from torch import nn

from holdfast.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's libraries
EVERY = 6

BEGIN = """
import sys, tempfile, torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 1))
    def forward(self, x, labels):
        out = self.layers(x)
        return {"loss": nn.functional.mse_loss(out, labels), "out": out}

class Rows(Dataset):
    noise = 0.0
    def __init__(self, count, noise=0.0):
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randn(count, 4, generator=generator)
        self.noise = noise
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        x = self.x[i] + self.noise * torch.randn(4) if self.noise else self.x[i]
        return {"x": x, "labels": x.sum()[None]}

set_seed(5)
model = Root()
def arguments(**kwargs):
    given = dict(
        output_dir=tempfile.mkdtemp(), num_train_epochs=2, per_device_train_batch_size=4,
        learning_rate=1e-2, report_to="none", disable_tqdm=True, use_cpu=True, logging_steps=3,
        save_strategy="no", seed=5,
    )
    return TrainingArguments(**{**given, **kwargs})
def end(trainer):
    kept = ("loss", "eval_loss", "train_loss", "grad_norm", "learning_rate", "epoch")
    logs = [{k: e[k] for k in kept if k in e} for e in trainer.state.log_history]
    return [trainer.model.state_dict(), logs, torch.rand(2)]
"""


@pytest.fixture
def runs(tmp_path, monkeypatch, caplog):
    return Runs(tmp_path / "script.py", monkeypatch, caplog)


SAME = {
    "a plain one": """
trainer = Trainer(model, arguments(), train_dataset=Rows(26))
trainer.train()
result = end(trainer)
""",
    "accumulation over the end, the own checkpoints": """
trainer = Trainer(model, arguments(
    gradient_accumulation_steps=3, save_strategy="steps", save_steps=2, save_total_limit=1,
    logging_steps=1, lr_scheduler_type="linear", warmup_steps=2, num_train_epochs=4,
), train_dataset=Rows(29))
trainer.train()
result = end(trainer)
""",
    "a schedule that goes by an evaluation at each epoch's end": """
trainer = Trainer(model, arguments(
    eval_strategy="epoch", lr_scheduler_type="reduce_lr_on_plateau",
    lr_scheduler_kwargs={"patience": 0, "factor": 0.5}, metric_for_best_model="eval_loss",
    eval_on_start=True,
), train_dataset=Rows(26), eval_dataset=Rows(9, 0.1))
trainer.train()
result = end(trainer)
""",
    "two workers, draws in the dataset": """
trainer = Trainer(model, arguments(dataloader_num_workers=2, num_train_epochs=2),
    train_dataset=Rows(26, 0.3))
trainer.train()
result = end(trainer)
""",
    "a stream, passes over and over": """
class Stream(IterableDataset):
    epoch = 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        rows = Rows(26)
        order = torch.randperm(26, generator=torch.Generator().manual_seed(self.epoch))
        for i in order.tolist():
            yield rows[i]
trainer = Trainer(model, arguments(max_steps=12, gradient_accumulation_steps=2),
    train_dataset=Stream())
trainer.train()
result = end(trainer)
""",
    "a part of an epoch, groups by length, the last batch dropped": """
trainer = Trainer(model, arguments(num_train_epochs=1.4, dataloader_drop_last=True),
    train_dataset=Rows(26))
trainer.train()
result = end(trainer)
""",
    "two trainings": """
trainer = Trainer(model, arguments(num_train_epochs=1), train_dataset=Rows(26))
trainer.train()
first = end(trainer)
trainer = Trainer(model, arguments(num_train_epochs=2), train_dataset=Rows(22))
trainer.train()
result = [first, end(trainer)]
""",
    "an average beside the model": """
average = torch.optim.swa_utils.AveragedModel(model)
class Average(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        average.update_parameters(model)
trainer = Trainer(model, arguments(), train_dataset=Rows(26), callbacks=[Average()])
trainer.train()
result = [end(trainer), average.state_dict()]
""",
    "a callback that ends epochs and the training": """
class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 3
        control.should_training_stop = state.global_step == 9
trainer = Trainer(model, arguments(), train_dataset=Rows(26), callbacks=[Stop()])
trainer.train()
result = end(trainer)
""",
    "a compiled model": """
trainer = Trainer(model, arguments(torch_compile=True, torch_compile_backend="eager",
    num_train_epochs=2), train_dataset=Rows(24))
trainer.train()
result = [trainer.model.state_dict(), torch.rand(2)]
""",
    "a model that the Trainer makes, an optimizer of the script's own": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
trainer = Trainer(model, arguments(), train_dataset=Rows(26), optimizers=(optimizer, schedule))
trainer.evaluate(Rows(9))
trainer.train()
first = end(trainer)
trainer.evaluate(Rows(9))
trainer = Trainer(args=arguments(num_train_epochs=1), train_dataset=Rows(26), model_init=Root)
trainer.train()
result = [first, end(trainer)]
""",
}


SAME["a loop with Accelerate, whose loaders read a batch ahead"] = """
from accelerate import Accelerator
from torch.utils.data import DataLoader
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
loader = DataLoader(Rows(26), batch_size=4, shuffle=True)
valid = DataLoader(Rows(9), batch_size=4, shuffle=True)
model, optimizer, schedule, loader, valid = accelerator.prepare(
    model, optimizer, schedule, loader, valid)
for epoch in range(3):
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    with torch.no_grad():
        found = sum(model(**batch)["loss"].item() for batch in valid)
result = [model.state_dict(), found]
"""
OURS = {
    "workers that stay, which are started anew for each epoch": """
trainer = Trainer(model, arguments(dataloader_num_workers=1, dataloader_persistent_workers=True),
    train_dataset=Rows(26))
trainer.train()
result = end(trainer)
""",
    "draws in the dataset": """
trainer = Trainer(model, arguments(), train_dataset=Rows(26, 0.3))
trainer.train()
result = end(trainer)
""",
    "draws where batches are put together": """
def masked(rows):
    x = torch.stack([row["x"] for row in rows])
    x = torch.where(torch.rand(x.shape) < 0.2, 0.0, x)
    return {"x": x, "labels": torch.stack([row["labels"] for row in rows])}
trainer = Trainer(model, arguments(gradient_accumulation_steps=2), train_dataset=Rows(26),
    data_collator=masked)
trainer.train()
result = end(trainer)
""",
}
"""These draw from a stream apart under ``--auto``, as all captured loaders do."""


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_it_ends_with_the_same_bits_as_without_us(runs, text):
    runs.write(text, BEGIN)
    assert same(runs.run(), runs.plain())
    assert "these change" not in runs.told
    assert runs.differing(EVERY) == []


@pytest.mark.parametrize("text", OURS.values(), ids=OURS)
def test_it_ends_with_the_same_bits_as_undisturbed(runs, text):
    runs.write(text, BEGIN)
    assert runs.differing(EVERY) == []


def test_it_is_killed_in_forwards_of_accumulation_and_evaluation(runs):
    runs.write(
        """
trainer = Trainer(model, arguments(
    gradient_accumulation_steps=3, eval_strategy="steps", eval_steps=2, num_train_epochs=2,
), train_dataset=Rows(29), eval_dataset=Rows(9))
trainer.train()
result = end(trainer)
""",
        BEGIN,
    )

    def forwards(count):
        def counts(module, _):
            if type(module).__name__ == "Root":
                count()

        return nn.modules.module.register_module_forward_pre_hook(counts)

    runs.run()
    assert [kept["step"] for kept in runs.kept.values()] == [5]
    runs.kept = {}
    runs.run(counts=forwards)
    count, first = runs.steps, 8  # before that no step is saved
    runs.kept = {}
    expected = runs.run()
    for at in range(first, count, 3):
        runs.kept = {}
        assert runs.run(kill_at=at, counts=forwards) is None
        assert same(runs.run(), expected)


TOLD = {
    "a count of a trainer's own": (
        "Counting.calls: these change while it trains",
        """
class Counting(Trainer):
    calls = 0
    def compute_loss(self, *args, **kwargs):
        self.calls += 1
        return super().compute_loss(*args, **kwargs)
trainer = Counting(model, arguments(), train_dataset=Rows(26))
""",
    ),
    "a count of a callback": (
        "Count.steps: these change while it trains",
        """
class Count(TrainerCallback):
    steps = 0
    def on_step_end(self, *args, **kwargs):
        self.steps += 1
trainer = Trainer(model, arguments(), train_dataset=Rows(26), callbacks=[Count()])
""",
    ),
    "data that come from no loader": (
        "nothing is saved, the script runs on alone: the training data come from a list",
        """
class Own(Trainer):
    def get_train_dataloader(self):
        batch = next(iter(super().get_train_dataloader()))
        return [batch, batch]
trainer = Own(model, arguments(max_steps=4), train_dataset=Rows(26))
""",
    ),
    "a size of batches that is looked for": (
        "nothing is saved, the script runs on alone: auto_find_batch_size",
        """
trainer = Trainer(model, arguments(auto_find_batch_size=True, num_train_epochs=1),
    train_dataset=Rows(26))
""",
    ),
    "a loop of its own behind it": (
        "what is trained beside a Trainer's own training is not saved",
        """
trainer = Trainer(model, arguments(num_train_epochs=1), train_dataset=Rows(26))
trainer.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(Rows(26)):
    model(**batch)["loss"].backward()
    optimizer.step()
""",
    ),
}


@pytest.mark.parametrize(("told", "text"), TOLD.values(), ids=TOLD)
def test_what_does_not_come_back_is_told_by_name(runs, told, text):
    runs.write(f"{text}\ntrainer.train()\nresult = end(trainer)\n", BEGIN)
    assert same(runs.run(), runs.plain())
    runs.kept = {}
    runs.run()
    assert told in runs.told


def test_what_is_tracked_is_kept_and_not_told(runs):
    runs.write(
        """
import holdfast
class Count(TrainerCallback):
    steps = 0
    def on_step_end(self, args, state, control, optimizer, **kwargs):
        self.steps += 1
        optimizer.param_groups[0]["weight_decay"] = 0.1 / self.steps
count = Count()
count.steps = 0
holdfast.track(count, "steps")
trainer = Trainer(model, arguments(), train_dataset=Rows(26), callbacks=[count])
trainer.train()
result = [end(trainer), count.steps]
""",
        BEGIN,
    )
    assert runs.differing(EVERY) == []
    assert "these change" not in runs.told


REFUSED = {
    "other batches": ("per_device_train_batch_size=4 and has 3 now", "arguments(%s)", "",
                      "per_device_train_batch_size=3"),
    "an end before it": ("the training ended before it asked for a batch", "arguments(%s)", "",
                         "max_steps=3"),
}  # fmt: skip


@pytest.mark.parametrize(("told", "text", "before", "after"), REFUSED.values(), ids=REFUSED)
def test_a_trainer_that_does_not_fit_the_checkpoint_is_refused(runs, told, text, before, after):
    script = f"trainer = Trainer(model, {text}, train_dataset=Rows(26))\ntrainer.train()\n"
    runs.write(script % before + "result = end(trainer)", BEGIN).run(kill_at=9)
    runs.write(script % after + "result = end(trainer)", BEGIN)
    with pytest.raises(CheckpointError, match=told):
        runs.run()


def test_its_own_checkpoint_is_taken_where_there_is_none_of_ours(runs):
    runs.write(
        """
from transformers.trainer_utils import get_last_checkpoint
folder = __file__ + ".out"
given = arguments(save_strategy="steps", save_steps=4, output_dir=folder)
trainer = Trainer(model, given, train_dataset=Rows(26))
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
result = end(trainer)
""",
        BEGIN,
    )
    expected, *_ = runs.run()
    own = runs.path.with_name("script.py.out")
    for kills, begun in ([7], 4), ([7, 5], 8):
        shutil.rmtree(own)
        for at in kills:
            runs.kept = {}
            runs.run(kill_at=at)
        runs.kept = runs.kept if len(kills) > 1 else {}
        weights, *_ = runs.run()
        assert runs.steps == 14 - begun
        assert same(weights, expected)


def test_with_a_callback_alone_it_is_the_same(runs):
    runs.write(
        """
from holdfast.integrations.transformers import HoldfastCallback
average = torch.optim.swa_utils.AveragedModel(model)
class Average(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        average.update_parameters(model)
class Ours(HoldfastCallback):
    pass
ours = Ours("job", also={"average": average})
trainer = Trainer(model, arguments(), train_dataset=Rows(26), callbacks=[Average(), ours])
trainer.train()
result = [end(trainer), average.state_dict()]
""",
        BEGIN,
    )
    assert same(runs.run(auto=False), runs.plain())
    assert "also_average" in runs.kept[""]["values"]
    assert runs.differing(EVERY, auto=False) == []
