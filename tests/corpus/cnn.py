"""A small CNN with batch norm and dropout, SGD with momentum, a schedule by epoch, validation."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
images, labels = torch.randn(96, 1, 8, 8), torch.randint(0, 4, (96,))
train = DataLoader(TensorDataset(images[:72], labels[:72]), batch_size=9, shuffle=True)
valid = DataLoader(TensorDataset(images[72:], labels[72:]), batch_size=12)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3),
    nn.BatchNorm2d(4),
    nn.ReLU(),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(144, 4),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
criterion = nn.CrossEntropyLoss()

for epoch in range(4):
    model.train()
    total = 0.0
    for x, y in train:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    scheduler.step()
    model.eval()
    correct = seen = 0
    with torch.no_grad():
        for x, y in valid:
            correct += int((model(x).argmax(1) == y).sum())
            seen += len(y)
    print(f"epoch {epoch}: loss {total / len(train):.4f} accuracy {correct / seen:.3f}")

torch.save(model.state_dict(), sys.argv[1])
