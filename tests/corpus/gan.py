"""A GAN: two models, two optimizers; the discriminator steps twice for each step of the other."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-2, betas=(0.5, 0.999))
data = DataLoader(TensorDataset(torch.randn(120, 2) * 0.3 + 1), batch_size=10, shuffle=True)
criterion = nn.BCEWithLogitsLoss()

for epoch in range(3):
    for (real,) in data:
        for _ in range(2):
            fake = generator(torch.randn(len(real), 4)).detach()
            d_loss = criterion(discriminator(real), torch.ones(len(real), 1)) + criterion(
                discriminator(fake), torch.zeros(len(real), 1)
            )
            d_optimizer.zero_grad()
            d_loss.backward()
            d_optimizer.step()
        g_loss = criterion(
            discriminator(generator(torch.randn(len(real), 4))), torch.ones(len(real), 1)
        )
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
    print(f"epoch {epoch}: {d_loss.item():.4f} {g_loss.item():.4f}")

torch.save({"g": generator.state_dict(), "d": discriminator.state_dict()}, sys.argv[1])
