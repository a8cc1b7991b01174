"""Mixed precision on the CPU: autocast and a GradScaler that skips a step now and then."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(6)
loader = DataLoader(
    TensorDataset(torch.randn(80, 8), torch.randn(80, 2)), batch_size=8, shuffle=True
)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=4)

for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    print(f"epoch {epoch}: {loss.item():.4f} scale {scaler.get_scale()}")

torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, sys.argv[1])
