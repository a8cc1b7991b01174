"""Two small trainings: a classifier by SGD, and a transformer by AdamW, on data with much noise."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from holdfast import elastic
from holdfast.elastic.updates import Batching

CLASSES, PIXELS = 5, 16
WORDS, LENGTH, WIDTH = 12, 12, 24


def pictures(count: int, seed: int) -> TensorDataset:
    """Return points around one centre for each class, that overlap."""
    drawn = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, PIXELS, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (count,), generator=drawn)
    points = centres[labels] + 1.6 * torch.randn(count, PIXELS, generator=drawn)
    return TensorDataset(points, labels)


def sentences(count: int, seed: int) -> TensorDataset:
    """Return walks over words, each of which is followed by three others with some chance."""
    drawn = torch.Generator().manual_seed(seed)
    likely = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(0)).mul(2).softmax(1)
    words = [torch.randint(WORDS, (count,), generator=drawn)]
    for _ in range(LENGTH):
        words.append(torch.multinomial(likely[words[-1]], 1, generator=drawn)[:, 0])
    held = torch.stack(words, 1)
    return TensorDataset(held[:, :-1], held[:, 1:])


class Transformer(nn.Module):
    """Predicts the next word of each."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return a number for each word that may follow."""
        body = self.body(self.words(words) + self.places, mask=self.mask, is_causal=True)
        return self.head(body).transpose(1, 2)


class Classifier(nn.Sequential):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(PIXELS, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean over a batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def held_out(model: nn.Module, data: Dataset) -> float:
    """Return the loss on data that nobody has trained with."""
    return float(loss(model, list(data[:])))


KINDS = {
    "classifier": (Classifier, torch.optim.SGD, {"lr": 0.1}, pictures, 1536, 16, 4),
    "transformer": (Transformer, torch.optim.AdamW, {"lr": 3e-3}, sentences, 1024, 16, 4),
}


def trained(kind: str, *, batch: int, local: int, seed: int = 0) -> tuple[float, float, int]:
    """Train to as much progress, whatever ranks there are; return loss, progress and updates.

    ``batch``: samples of an update; ``local``: of a micro-batch. The initial batch is the kind's.
    """
    make, optimizer, options, data, count, initial, epochs = KINDS[kind]
    torch.manual_seed(seed)
    module = make()
    model = elastic.AdaptiveDataParallel(module, optimizer(module.parameters(), **options))
    loader = elastic.AdaptiveDataLoader(data(count, 1), initial, shuffle=True, epoch="progress")
    if batch > initial:
        loader.autoscale_batch_size(batch, (local, local), gradient_accumulation=True)
        loader._batching = Batching(
            size=batch, replicas=loader._batching.replicas,
            micro_batches=batch // (loader._batching.replicas * local),
        )  # fmt: skip
        loader._choose = lambda: None  # type: ignore[method-assign] - the batch is the test's
    (stepped,) = model.adaptation.optimizers
    for _ in elastic.remaining_epochs_until(epochs):
        for inputs in loader:
            stepped.zero_grad()
            loss(model, inputs).backward()
            stepped.step()
    model.eval()
    return held_out(model.module, data(2048, 2)), model.progress, model.updates
