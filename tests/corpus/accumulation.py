"""Gradient accumulation over three batches, a schedule that steps with the optimizer."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
data = TensorDataset(torch.randn(90, 6), torch.randn(90, 1))
loader = DataLoader(data, batch_size=5, shuffle=True)
model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3), nn.Tanh(), nn.Linear(12, 1))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=18)

for epoch in range(3):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y) / 3
        loss.backward()
        if (i + 1) % 3 == 0:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}: {loss.item():.4f}")

torch.save(model.state_dict(), sys.argv[1])
