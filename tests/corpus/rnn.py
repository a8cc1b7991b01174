"""An RNN whose hidden state goes on from batch to batch."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(15)
loader = DataLoader(TensorDataset(torch.randn(40, 2, 3), torch.randn(40, 2, 5)), batch_size=4)
model = nn.GRU(3, 5, batch_first=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
hidden = torch.zeros(1, 4, 5)
step = 0

for epoch in range(3):
    for x, y in loader:
        output, hidden = model(x, hidden.detach())
        loss = nn.functional.mse_loss(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    print(f"epoch {epoch} step {step}: {loss.item():.4f}")

torch.save(model.state_dict(), sys.argv[1])
