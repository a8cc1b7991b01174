"""A loop that draws its batches itself."""

import sys

import torch
from torch import nn

torch.manual_seed(16)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    x = torch.randn(8, 4)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

torch.save(model.state_dict(), sys.argv[1])
