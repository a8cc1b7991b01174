"""Small models with data, and what their gradients are without anything of ours."""

import copy

import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.elastic.loader import AdaptiveDataLoader
from holdfast.elastic.parallel import AdaptiveDataParallel

SAMPLES, FEATURES = 96, 6


def data(samples=SAMPLES, seed=1):
    drawn = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=drawn)
    return TensorDataset(
        inputs, inputs.sum(1, keepdim=True) + torch.randn(samples, 1, generator=drawn)
    )


def net(seed=2):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))


def loss_of(model, inputs, targets):
    return (model(inputs) - targets).square().mean()


def adaptive(optimizer=torch.optim.SGD, lr=0.05, rule=None, seed=2, scaler=None, **kwargs):
    module = net(seed)
    stepped = optimizer(module.parameters(), lr=lr, **kwargs)
    return AdaptiveDataParallel(module, stepped, scaling_rule=rule, mp_scaler=scaler), stepped


def loader(batch_size=12, micro_batches=1, samples=SAMPLES, **options):
    made = AdaptiveDataLoader(data(samples), batch_size, **options)
    if micro_batches > 1:
        local = -(-batch_size // micro_batches)
        made.autoscale_batch_size(batch_size, (1, local), gradient_accumulation=True)
    return made


def gradient(module, inputs, targets):
    """The gradient as one vector."""
    probe = copy.deepcopy(module)
    probe.zero_grad()
    loss_of(probe, inputs, targets).backward()
    return torch.cat([p.grad.reshape(-1) for p in probe.parameters()]).double()


def bits(module):
    return [p.detach().numpy().tobytes() for p in module.parameters()]
