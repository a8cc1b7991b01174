"""A small GPT in plain PyTorch. Knows nothing of checkpoints.

Shapes: B batch, T tokens of context, C channels, H heads, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY = 256  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How big the model is, and how much it reads at once."""

    layers: int
    channels: int
    heads: int
    context: int
    batch: int


SIZES = {
    "small": Size(layers=6, channels=384, heads=6, context=128, batch=4),  # 10.9 M parameters
    "tiny": Size(layers=2, channels=128, heads=2, context=64, batch=4),  # 0.5 M parameters
}
DROPOUT = 0.1


class Block(nn.Module):
    """One transformer layer: attention, then a feed-forward net, each added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.channels
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.after_attention = nn.Linear(width, width)
        self.dropout = nn.Dropout(DROPOUT)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(DROPOUT),
        )

    def forward(self, x_btc: Tensor) -> Tensor:
        """Return what the layer makes of ``x_btc``; same shape."""
        x_btc = x_btc + self.dropout(self.after_attention(self._attend(x_btc)))
        widened: Tensor = self.feed_forward(x_btc)
        return x_btc + widened

    def _attend(self, x_btc: Tensor) -> Tensor:
        batch, tokens, width = x_btc.shape
        packed = self.query_key_value(self.before_attention(x_btc))
        q_bhtd, k_bhtd, v_bhtd = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in packed.split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, tokens, width)


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.channels)
        self.position = nn.Embedding(size.context, size.channels)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.channels)
        self.head = nn.Linear(size.channels, VOCABULARY, bias=False)

    def forward(self, tokens_bt: Tensor, targets_bt: Tensor) -> Tensor:
        """Return the mean cross entropy of ``targets_bt``, in nats per byte; 0-dim."""
        places_t = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
        x_btc = self.dropout(self.token(tokens_bt) + self.position(places_t))
        logits_btv = self.head(self.norm(self.blocks(x_btc)))
        loss: Tensor = F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())
        return loss
