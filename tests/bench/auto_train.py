"""What ``auto/`` measures: an ordinary script that knows nothing of Holdfast, ``SIZE STEPS``."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, ROWS = (256, 64) if sys.argv[1] == "tiny" else (1024, 1600)
STEPS = int(sys.argv[2])

torch.manual_seed(0)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(STEPS * ROWS, 32), torch.randn(STEPS * ROWS, 1))
loader = DataLoader(data, batch_size=ROWS, shuffle=True)
layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)]
model = nn.Sequential(nn.Linear(32, WIDTH), *layers, nn.Linear(WIDTH, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
