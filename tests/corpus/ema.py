"""An average of the weights beside the model, once by hand and once by torch's AveragedModel."""

import copy
import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(9)
loader = DataLoader(
    TensorDataset(torch.randn(60, 4), torch.randn(60, 1)), batch_size=6, shuffle=True
)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
ema = copy.deepcopy(model).requires_grad_(False)
average = AveragedModel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(ema.parameters(), model.parameters()):
                mean.mul_(0.9).add_(now, alpha=0.1)
    average.update_parameters(model)
    print(f"epoch {epoch}: {loss.item():.4f}")

torch.save([one.state_dict() for one in (model, ema, average)], sys.argv[1])
