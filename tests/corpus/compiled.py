"""A compiled model."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)
loader = DataLoader(
    TensorDataset(torch.randn(60, 4), torch.randn(60, 1)), batch_size=6, shuffle=True
)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
model = torch.compile(net, backend="eager")
optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)

for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: {loss.item():.4f}")

torch.save(net.state_dict(), sys.argv[1])
