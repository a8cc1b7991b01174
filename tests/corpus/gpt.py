"""A tiny language model: AdamW with two groups, warm-up by step, clipping, workers that load."""

import math
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CONTEXT, WORDS, WIDTH = 12, 40, 16


class Text(Dataset):
    def __init__(self):
        self.tokens = torch.randint(0, WORDS, (600,), generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return 64

    def __getitem__(self, index):
        piece = self.tokens[index * 8 : index * 8 + CONTEXT + 1]
        return piece[:-1], piece[1:]


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embed(tokens), mask=mask, is_causal=True))


def main():
    torch.manual_seed(2)
    model = GPT()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 5) * (0.5 + 0.5 * math.cos(step / 10))
    )
    loader = DataLoader(Text(), batch_size=8, shuffle=True, num_workers=1, drop_last=True)
    for _ in range(3):
        for tokens, targets in loader:
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        print(f"loss {loss.item():.4f}")
    torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
