"""The rate falls when validation stops getting better; the best weights are kept in a file."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def evaluate(model, loader):
    model.eval()
    with torch.inference_mode():
        losses = [nn.functional.mse_loss(model(x), y).item() for x, y in loader]
    model.train()
    return sum(losses) / len(losses)


def main():
    torch.manual_seed(12)
    x = torch.randn(100, 5)
    data = TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(100, 1))
    train, valid = torch.utils.data.random_split(data, [80, 20])
    train_loader = DataLoader(train, batch_size=8, shuffle=True)
    valid_loader = DataLoader(valid, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Dropout(0.1), nn.Linear(10, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for epoch in range(5):
        for i, (x, y) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            if i % 4 == 3:
                print(f"epoch {epoch}: {evaluate(model, valid_loader):.4f}")
        scheduler.step(evaluate(model, valid_loader))
    torch.save({"model": model.state_dict(), "rate": scheduler.get_last_lr()[0]}, sys.argv[1])


if __name__ == "__main__":
    main()
