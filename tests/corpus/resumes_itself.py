"""A script that keeps a file of its own and goes on from it."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(18)
own = Path(sys.argv[1]).with_suffix(".own")
model = nn.Linear(4, 1)
begin = 0
if own.exists():
    saved = torch.load(own, weights_only=True)
    model.load_state_dict(saved["model"])
    begin = saved["epoch"]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(40, 4), torch.randn(40, 1)), batch_size=8)
for epoch in range(begin, 4):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "epoch": epoch + 1}, own)
torch.save(model.state_dict(), sys.argv[1])
