"""Loops as people write them: killed at steps all along, each ends with the same bits or is told.

They are run in this process, over a checkpointer of which every step is safe (``memory``).
"""

from __future__ import annotations

import pytest
import torch
from tests.unit.auto.memory import Runs, same

from holdfast.errors import PreconditionError

EVERY = 7
"""Of the steps at which a script is killed; odd, to come by all places of an epoch in time."""


@pytest.fixture
def runs(tmp_path, monkeypatch, caplog):
    return Runs(tmp_path / "script.py", monkeypatch, caplog)


SAME = {
    "a break after some batches": """
for epoch in range(4):
    for i, (x, y) in enumerate(loader):
        if i >= 4:
            break
        step(x, y)
result = model
""",
    "islice": """
for epoch in range(4):
    for x, y in itertools.islice(loader, 4):
        step(x, y)
result = model
""",
    "a bar of progress inside enumerate": """
from tqdm import tqdm
for epoch in range(3):
    for i, (x, y) in enumerate(tqdm(loader, disable=True), 1):
        if i % 4:
            step(x, y)
result = model
""",
    "the last loss of a pass, for a schedule": """
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
for epoch in range(4):
    for x, y in loader:
        loss = step(x, y)
    schedule.step(loss.item())
result = model
""",
    "tensors of an optimizer that are in no module": """
weight, bias = nn.Parameter(torch.zeros(4, 1)), torch.zeros(1, requires_grad=True)
optimizer = torch.optim.Adam([weight, bias], lr=0.1)
for epoch in range(3):
    for x, y in loader:
        loss = nn.functional.mse_loss(x @ weight + bias, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
result = [weight.detach(), bias.detach()]
""",
    "training in eval mode": """
model.eval()
for epoch in range(3):
    for x, y in loader:
        step(x, y)
result = model
""",
    "errors of a dataset that are caught": """
class Torn(Dataset):
    def __len__(self):
        return 30
    def __getitem__(self, i):
        if i % 9 == 5:
            raise ValueError
        return data[i]
loader = DataLoader(Torn(), batch_size=5, shuffle=True)
for epoch in range(4):
    batches = iter(loader)
    assert len(batches) == 6
    while True:
        try:
            x, y = next(batches)
        except StopIteration:
            break
        except ValueError:
            continue
        step(x, y)
result = model
""",
    "a step for the rest of an accumulation": """
for epoch in range(4):
    for i, (x, y) in enumerate(loader):
        nn.functional.mse_loss(model(x), y).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
result = model
""",
    "a loader of one batch": """
loader = DataLoader(data, batch_size=30, shuffle=True)
for epoch in range(11):
    for x, y in loader:
        step(x, y)
result = model
""",
    "evaluation with gradients, also over the training data": """
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        step(x, y)
        if i % 2:
            model.eval()
            sum(model(x).sum().item() for x, _ in valid)
            model.train()
    model.eval()
    sum(model(x).sum().item() for x, _ in loader)
    model.train()
result = model
""",
    "an evaluation before anything is trained": """
print(evaluate())
for epoch in range(3):
    for x, y in loader:
        step(x, y)
result = model
""",
    "loops in loops, and a first look at a batch": """
x, y = next(iter(loader))
outer = DataLoader(TensorDataset(torch.arange(3.0)), shuffle=True)
for epoch in range(2):
    for (t,) in outer:
        for x, y in loader:
            step(x, y * t)
result = model
""",
    "parameters that join later": """
first = nn.Linear(4, 4)
for epoch in range(4):
    if epoch == 2:
        optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.01})
    for x, y in loader:
        step(first(x), y)
result = [model.state_dict(), first.state_dict()]
""",
    "a stream of no known length": """
class Stream(IterableDataset):
    def __iter__(self):
        for i in torch.randperm(30).tolist():
            yield data[i]
loader = DataLoader(Stream(), batch_size=5)
for epoch in range(3):
    for x, y in loader:
        step(x, y)
result = model
""",
    "files that are moved, buffers": """
import io, os
from torch import save
for epoch in range(3):
    for x, y in loader:
        step(x, y)
    save(model.state_dict(), __file__ + ".part")
    os.replace(__file__ + ".part", f"{__file__}.{epoch}")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    torch.load(buffer)
result = [torch.load(f"{__file__}.{epoch}") for epoch in range(3)]
""",
    "pieces of several batches": """
def pieces(batches):
    while piece := list(itertools.islice(batches, 2)):
        yield piece
for epoch in range(3):
    for piece in pieces(iter(loader)):
        for x, y in piece:
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
result = model
""",
}


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_it_ends_with_the_same_bits_as_without_us(runs, text):
    runs.write(text)
    assert same(runs.run(), runs.plain())
    assert runs.differing(EVERY) == []


TOLD = {
    "early stopping, one function up": (
        "bad, best, best_state",
        """
def train():
    for x, y in loader:
        step(x, y)
def main():
    best, bad = 1e9, 0
    for epoch in range(6):
        train()
        found = evaluate()
        if found < best:
            best, best_state = found, copy.deepcopy(model.state_dict())
        else:
            bad += 1
    model.load_state_dict(best_state)
main()
""",
    ),
    "a hidden state": (
        "hidden",
        """
unit = nn.GRU(4, 5, batch_first=True)
hidden = torch.zeros(1, 5)
for epoch in range(2):
    for x, y in loader:
        out, hidden = unit(x, hidden.detach())
        step(x, y)
""",
    ),
    "an attribute that a method counts": (
        "self.count",
        """
class Trainer:
    count = 0
    def step(self, x, y):
        step(x, y)
        self.count += 1
    def run(self):
        for _ in range(2):
            for x, y in loader:
                self.step(x, y)
Trainer().run()
""",
    ),
    "objects that are called, and hooks": (
        "calls, self.count",
        """
class Rate:
    count = 0
    def __call__(self):
        self.count += 1
        return 0.1 / self.count
calls = [0]
def hook(module, given, out):
    calls[0] += 1
    return out / calls[0]
model.register_forward_hook(hook)
rate = Rate()
for epoch in range(2):
    for x, y in loader:
        optimizer.param_groups[0]["lr"] = rate()
        step(x, y)
""",
    ),
    "an average in a dict": (
        "average",
        """
average = {name: value.clone() for name, value in model.state_dict().items()}
def update():
    for name, value in model.state_dict().items():
        average[name].mul_(0.9).add_(value, alpha=0.1)
for epoch in range(2):
    for x, y in loader:
        step(x, y)
        update()
""",
    ),
    "a random stream of its own": (
        "noise",
        """
noise = torch.Generator().manual_seed(5)
for epoch in range(2):
    for x, y in loader:
        step(x + torch.randn(x.shape, generator=noise), y)
""",
    ),
    "a loop that draws by itself": (
        "n",
        """
def endless():
    while True:
        yield from loader
batches = endless()
for n in range(15):
    x, y = next(batches)
    step(x, y)
""",
    ),
    "a count over several passes": (
        "i, x, y",
        """
def endless():
    while True:
        for batch in loader:
            yield batch
for i, (x, y) in enumerate(endless()):
    if i == 15:
        break
    step(x, y)
""",
    ),
    "a count beside the batches": (
        "range_iterator beside the batches in zip",
        """
for epoch in range(3):
    for _, (x, y) in zip(range(5), loader):
        step(x, y)
""",
    ),
    "a batch that is drawn ahead": (
        "before",
        """
def ahead():
    before = None
    for batch in loader:
        if before is not None:
            yield before
        before = batch
    yield before
for epoch in range(3):
    for x, y in ahead():
        step(x, y)
""",
    ),
    "an attribute of a module": (
        "Net.rate",
        """
class Net(nn.Linear):
    rate = 1.0
    def forward(self, x):
        self.rate *= 0.9
        return super().forward(x) * self.rate
model = Net(4, 1)
for epoch in range(2):
    for x, y in loader:
        step(x, y, torch.optim.SGD(model.parameters(), lr=0.1) if False else optimizer)
        model(x)
""",
    ),
    "an iterator of its own": (
        "rates",
        """
rates = itertools.cycle([0.1, 0.2, 0.3])
for epoch in range(2):
    for x, y in loader:
        optimizer.param_groups[0]["lr"] = next(rates)
        step(x, y)
""",
    ),
}


@pytest.mark.parametrize(("names", "text"), TOLD.values(), ids=TOLD)
def test_what_does_not_come_back_is_told_by_name(runs, names, text):
    runs.write(text + "result = model\n").run()
    assert f"holdfast --auto: {names}: the training loop carries these" in runs.told


def test_what_is_tracked_is_kept_and_not_told(runs):
    runs.write("""
import holdfast
class Trainer:
    count = 0
    def step(self, x, y):
        self.count += 1
        optimizer.param_groups[0]["lr"] = 0.1 / self.count
        step(x, y)
    def run(self):
        for _ in range(2):
            for x, y in loader:
                self.step(x, y)
                kept.sum += self.count
trainer = Trainer()
trainer.count = 0
holdfast.track(trainer, "count")
kept = holdfast.track(sum=0)
trainer.run()
result = [model.state_dict(), kept.sum]
""")
    assert runs.differing(EVERY) == []
    assert "carries" not in runs.told


COUNTED = """
import holdfast
def counted():
    count = 0
    def rate():
        nonlocal count
        count += 1
        return 0.1 / count
    return rate
rate = counted()
{}
for epoch in range(3):
    for x, y in loader:
        optimizer.param_groups[0]["lr"] = rate()
        step(x, y)
result = [model.state_dict(), rate()]
"""


def test_variables_of_a_closure_are_told_or_kept(runs):
    runs.write(COUNTED.format("")).run()
    assert "count: the training loop carries these" in runs.told
    runs.write(COUNTED.format("holdfast.track(rate, 'count')"))
    assert runs.differing(EVERY) == []
    assert "carries" not in runs.told


def test_what_does_not_come_back_is_told_once_to_a_launch(runs, tmp_path, monkeypatch):
    """Its ranks share a folder, through all rounds; what is told of a round is told in each."""
    monkeypatch.setenv("HOLDFAST_SAID", str(tmp_path))
    runs.write(COUNTED.format("")).run()
    first = runs.told
    runs.run()

    assert "the training loop carries these" in first
    assert "the training loop carries these" not in runs.told
    assert "goes on after step" in runs.told


def test_another_number_of_ranks_is_told(runs, monkeypatch):
    runs.write(SAME["training in eval mode"]).run(kill_at=8)
    monkeypatch.setenv("WORLD_SIZE", "2")
    runs.run()
    assert "saved by 1 ranks, and now there are 2" in runs.told


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("loads", [False, True])
def test_torchscript_is_saved_by_the_module_that_it_was_made_of(runs, loads):
    runs.write(f"""
import io
buffer = io.BytesIO()
torch.jit.save(torch.jit.script(model), buffer)
buffer.seek(0)
model = torch.jit.load(buffer) if {loads} else torch.jit.script(model)
for epoch in range(2):
    for x, y in loader:
        step(x, y)
result = [one.detach() for one in model.parameters()]
""")
    assert same(runs.run(), runs.plain())
    assert bool(runs.kept) is not loads
    assert ("is a TorchScript module; train the module" in runs.told) is loads


def test_a_loop_that_carries_nothing_is_told_nothing(runs):
    runs.write(SAME["the last loss of a pass, for a schedule"]).run()
    assert "carries" not in runs.told


def test_a_thread_that_asks_for_the_batches_ends_saving(runs):
    """It would be saved in the middle of a step."""
    runs.write("""
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(1) as pool:
    for epoch in range(2):
        batches = iter(loader)
        x, y = next(batches)
        while x is not None:
            step(x, y)
            x, y = pool.submit(next, batches, (None, None)).result()
result = model
""").run()
    assert "another thread asks for the batches; nothing is saved from now on" in runs.told
    assert runs.kept == {}


@pytest.mark.parametrize("changed", [False, True])
def test_files_that_hold_something_else_are_refused(runs, changed):
    """A script that goes on from its own file by itself begins its passes elsewhere."""
    runs.write("""
torch.load(__file__ + ".own", weights_only=True)
for epoch in range(3):
    for x, y in loader:
        step(x, y)
result = model
""")
    own = runs.path.with_name(runs.path.name + ".own")
    torch.save(torch.zeros(3), own)
    runs.run(kill_at=5)
    torch.save(torch.ones(3) if changed else torch.zeros(3), own)
    if not changed:
        assert runs.run() is not None
        return
    with pytest.raises(PreconditionError, match="hold something else than when it was saved"):
        runs.run()
