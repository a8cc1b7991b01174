"""The RNN of ``rnn.py``, with the two lines that keep what its loop carries, and a log file."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

torch.manual_seed(15)
loader = DataLoader(TensorDataset(torch.randn(40, 2, 3), torch.randn(40, 2, 5)), batch_size=4)
model = nn.GRU(3, 5, batch_first=True)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
log = Path(f"{sys.argv[1]}.log").open("a")
kept = holdfast.track(hidden=torch.zeros(1, 4, 5), step=0, log=log)

for epoch in range(3):
    for x, y in loader:
        output, kept.hidden = model(x, kept.hidden.detach())
        loss = nn.functional.mse_loss(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.step += 1
        log.write(f"{kept.step}: {loss.item()}\n")

log.close()
losses = [float(line.split()[1]) for line in Path(log.name).read_text().splitlines()]
torch.save([model.state_dict(), kept.hidden.detach(), kept.step, losses], sys.argv[1])
