"""LBFGS, whose step calls a closure several times."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(10)
loader = DataLoader(
    TensorDataset(torch.randn(64, 3), torch.randn(64, 1)), batch_size=16, shuffle=True
)
model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4, history_size=5)

for epoch in range(3):
    for x, y in loader:

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    print(f"epoch {epoch}: {loss.item():.4f}")

torch.save(model.state_dict(), sys.argv[1])
