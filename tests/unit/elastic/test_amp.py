"""Mixed precision: a loss that is multiplied changes no average (F84)."""

from functools import partial

import pytest
import torch
from tests.unit.elastic import models

pytestmark = pytest.mark.usefixtures("alone")


def train(scaler, micro_batches, *, scale_at=None, overflow_at=None, optimizer=torch.optim.SGD):
    model, stepped = models.adaptive(optimizer, lr=1e-3, scaler=scaler)
    loader = models.loader(12, micro_batches)
    number = 0
    for inputs, targets in loader:
        stepped.zero_grad()
        loss = models.loss_of(model, inputs, targets)
        if overflow_at == number:
            loss = loss * torch.inf
        if scaler is None:
            loss.backward()
            stepped.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(stepped)
            if loader.is_update_end:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            scaler.step(stepped)
            scaler.update(4.0 if scale_at == number and loader.is_update_end else None)
        number += loader.is_update_end
    model.adaptation.settle()
    return model


def scaler(**options):
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6, **options)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_scaled_loss_measures_what_a_plain_one_does(micro_batches, optimizer):
    """Scales are powers of two: to the last bit, in 16 bits too."""
    plain = train(None, micro_batches, optimizer=optimizer)
    scaled = train(scaler(), micro_batches, optimizer=optimizer)

    assert scaled.adaptation.noise.state_dict() == plain.adaptation.noise.state_dict()
    assert models.bits(scaled) == models.bits(plain)
    assert scaled.updates == 8


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_scale_that_changes_between_two_updates_is_no_noise(micro_batches):
    plain = train(None, micro_batches)
    scaled = train(scaler(), micro_batches, scale_at=4)

    assert scaled.adaptation.noise.state_dict() == plain.adaptation.noise.state_dict()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_an_overflow_is_skipped_and_the_scale_follows(micro_batches):
    used = scaler(backoff_factor=0.5)
    model = train(used, micro_batches, overflow_at=3)

    assert used.get_scale() == 512
    assert model.updates == 7
    assert model.adaptation.noise.known
    assert all(torch.isfinite(p).all() for p in model.parameters())
    weight = model.adaptation.noise.state_dict()["groups"][0][2]
    estimates = {1: 7 - 2, 3: 7}[micro_batches]  # a pair needs the one before, too
    assert weight == pytest.approx(1 - 0.999 ** (estimates * {1: 2, 3: 1}[micro_batches]))


def test_an_optimizer_that_unscales_by_itself_measures_what_others_do():
    """Fused: it is called also where the scaler skips, and gets its scale."""
    fused = partial(torch.optim.Adam, fused=True)
    plain = train(None, 1, optimizer=fused)
    scaled = train(scaler(), 1, optimizer=fused)
    skipped = train(scaler(), 1, optimizer=fused, overflow_at=3)

    assert scaled.adaptation.noise.sqr == pytest.approx(plain.adaptation.noise.sqr, rel=1e-6)
    assert scaled.adaptation.noise.var == pytest.approx(plain.adaptation.noise.var, rel=1e-6)
    assert skipped.adaptation.noise.known
    assert all(torch.isfinite(p).all() for p in skipped.parameters())


def test_a_scaler_that_is_off_scales_nothing():
    plain = train(None, 1)
    off = train(scaler(enabled=False), 1)

    assert off.adaptation.noise.state_dict() == plain.adaptation.noise.state_dict()
