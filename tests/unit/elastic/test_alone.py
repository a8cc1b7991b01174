"""One rank trains under DDP's hook: what is measured, and what the updates are (F83, F84)."""

import contextlib
import itertools
import math

import pytest
import torch
from tests.unit.elastic import models
from torch import nn

from holdfast.elastic import running
from holdfast.elastic.noise_scale import NoiseScale, Norms
from holdfast.elastic.parallel import AdaptiveDataParallel
from holdfast.elastic.scaling_rules import AdamScale, LinearScale, ScalingRule
from holdfast.errors import InvalidRequestError

pytestmark = pytest.mark.usefixtures("alone")


def sqr(vector):
    return float(vector @ vector)


def train(model, optimizer, loader, *, updates=None):
    for inputs, targets in loader:
        optimizer.zero_grad()
        models.loss_of(model, inputs, targets).backward()
        optimizer.step()
        if updates is not None and model.updates == updates:
            break


def test_without_a_loader_it_is_ddp_and_consecutive_gradients_are_compared():
    """The differenced estimator, number by number."""
    model, optimizer = models.adaptive()
    expected, before = NoiseScale(1), None
    dataset = models.data()
    for begin in range(0, 60, 12):
        inputs, targets = dataset[begin : begin + 12]
        now = models.gradient(model.module, inputs, targets)
        if before is not None:
            pair = Norms(
                local=((sqr(before) + sqr(now)) / 2,), total=(sqr((before + now) / 2),),
                count=2, scale=2.0, biased=True,
            )  # fmt: skip
            expected.update(pair)
        before = now
        optimizer.zero_grad()
        models.loss_of(model, inputs, targets).backward()
        optimizer.step()
    model.adaptation.settle()

    assert model.adaptation.noise.biased
    assert model.adaptation.noise.sqr == pytest.approx(expected.sqr, rel=1e-2)
    assert model.adaptation.noise.var == pytest.approx(expected.var, rel=1e-2)
    assert (model.updates, model.progress) == (5, 5.0)


def test_micro_batches_of_one_update_are_compared_and_their_mean_is_the_whole_batch():
    """Known answer 1, one replica with accumulation, number by number."""
    model, optimizer = models.adaptive()
    loader = models.loader(12, micro_batches=3)
    plain = torch.optim.SGD((reference := models.net()).parameters(), lr=0.05)
    expected, gradients, batch = NoiseScale(1), [], []
    for inputs, targets in loader:
        gradients.append(models.gradient(model.module, inputs, targets))
        batch.append((inputs, targets))
        optimizer.zero_grad()
        models.loss_of(model, inputs, targets).backward()
        optimizer.step()
        if len(gradients) == 3:
            expected.update(Norms(
                local=(sum(map(sqr, gradients)) / 3,), total=(sqr(sum(gradients) / 3),),
                count=3, scale=1.0,
            ))  # fmt: skip
            whole = [torch.cat(part) for part in zip(*batch, strict=True)]
            plain.zero_grad()
            models.loss_of(reference, *whole).backward()
            plain.step()
            gradients, batch = [], []
    model.adaptation.settle()

    assert not model.adaptation.noise.biased
    assert model.adaptation.noise.sqr == pytest.approx(expected.sqr, rel=1e-4)
    assert model.adaptation.noise.var == pytest.approx(expected.var, rel=1e-4)
    assert model.updates == 8
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_micro_batches_that_are_not_equally_large_count_by_their_samples():
    """Eleven samples in three, and what is left over; the mean is that over samples."""
    model, optimizer = models.adaptive()
    reference = models.net()
    plain = torch.optim.SGD(reference.parameters(), lr=0.05)
    dataset = models.data(40)
    sizes = []
    for inputs, targets in models.loader(11, micro_batches=3, samples=40):
        micro = running.current().micro
        sizes.append(len(inputs))
        optimizer.zero_grad()
        models.loss_of(model, inputs, targets).backward()
        optimizer.step()
        if micro.last:
            plain.zero_grad()
            models.loss_of(reference, *dataset[micro.of.start : micro.of.stop]).backward()
            plain.step()

    assert sizes == [4, 4, 3] * 3 + [4, 3]
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_batch_of_one_sample_is_a_batch():
    model, optimizer = models.adaptive()
    train(model, optimizer, models.loader(1, samples=9))
    model.adaptation.settle()

    assert (model.updates, model.progress) == (9, 9.0)
    assert model.adaptation.noise.biased


def test_gradients_that_a_script_accumulates_itself_are_left_to_it():
    model, optimizer = models.adaptive()
    for number in range(6):
        with model.no_sync() if number % 3 < 2 else contextlib.nullcontext():
            models.loss_of(model, *models.data()[:8]).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    assert model.updates == 2
    assert all(p.grad is None for p in model.parameters())


ORDERS = {
    "zero, forward, backward, step": ("zero", "forward", "backward", "step"),
    "forward, zero, backward, step": ("forward", "zero", "backward", "step"),
    "forward, backward, step, zero": ("forward", "backward", "step", "zero"),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("whose", ["optimizer", "model"])
def test_the_order_in_which_a_script_zeroes_gradients_does_not_matter(order, whose):
    ends = []
    for micro_batches in (1, 3):
        model, optimizer = models.adaptive()
        zeroes = {"optimizer": optimizer, "model": model}[whose]
        for inputs, targets in models.loader(12, micro_batches):
            for name in order:
                match name:
                    case "zero":
                        zeroes.zero_grad()
                    case "forward":
                        loss = models.loss_of(model, inputs, targets)
                    case "backward":
                        loss.backward()
                    case "step":
                        optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])

    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other)


class Fixed(ScalingRule):
    def factors(self, update):
        return [2.0 + number for number in range(update.groups_count)]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_learning_rates_are_scaled_inside_a_step_alone_by_group(as_tensor):
    module = models.net()
    rates = [torch.tensor(r) if as_tensor else r for r in (0.1, 0.3)]
    groups = [{"params": p.parameters(), "lr": r} for p, r in zip(module[::2], rates, strict=True)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    model = AdaptiveDataParallel(module, optimizer, scaling_rule=Fixed())
    seen = []
    optimizer.register_step_pre_hook(
        lambda o, *_: seen.append([float(group["lr"]) for group in o.param_groups])
    )
    models.loss_of(model, *models.data()[:8]).backward()
    optimizer.step()

    assert seen == [pytest.approx([0.2, 0.9])]
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.3])
    if as_tensor:
        assert optimizer.param_groups[0]["lr"] is rates[0]
    assert len(model.adaptation.noise.sqr_by_group) == 2


def test_a_schedule_counts_updates_and_not_micro_batches():
    module = models.net()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    first = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model = AdaptiveDataParallel(module, optimizer, lr_scheduler=first)
    later = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for inputs, targets in models.loader(48, micro_batches=4):
        models.loss_of(model, inputs, targets).backward()
        optimizer.step()
        first.step()

    assert (model.updates, first.last_epoch, later.last_epoch) == (2, 2, 0)


def test_groups_have_norms_of_their_own():
    """Gradients of one group are all alike, those of the other all noise."""
    weight, bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(70_000))
    module = nn.Module()
    module.weight, module.bias = weight, bias
    module.forward = lambda noise: module.weight.sum() + (module.bias * noise).sum()
    optimizer = torch.optim.SGD([{"params": [weight]}, {"params": [bias]}], lr=0.0)
    model = AdaptiveDataParallel(module, optimizer)
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.randn(70_000)).backward()
        optimizer.step()
    model.adaptation.settle()
    noise = model.adaptation.noise

    assert noise.sqr_by_group[0] == pytest.approx(4, rel=1e-4)
    assert noise.var_by_group[0] == 1e-6
    assert noise.sqr_by_group[1] == pytest.approx(0, abs=2000)
    assert noise.var_by_group[1] == pytest.approx(70_000, rel=0.05)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_that_are_no_numbers_change_no_average_and_what_follows_is_measured(
    bad, micro_batches
):
    """F84; what becomes of the parameters is the script's own care."""
    model, optimizer = models.adaptive()
    loader = models.loader(12, micro_batches)
    states = []
    for number, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        loss = models.loss_of(model, inputs, targets)
        (loss * bad if number // micro_batches == 3 else loss).backward()
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
        if loader.is_update_end:
            states.append(model.adaptation.state_dict()["noise"])

    assert states[2] == states[3]
    assert states[-1] != states[3]
    assert math.isfinite(model.gain)


def test_gradients_of_zero_divide_nothing_by_zero():
    model, optimizer = models.adaptive(rule=LinearScale())
    for _ in range(5):
        optimizer.zero_grad()
        (models.loss_of(model, *models.data()[:8]) * 0).backward()
        optimizer.step()
    model.adaptation.settle()

    assert (model.adaptation.noise.sqr, model.adaptation.noise.var) == (0.0, 1e-6)
    assert model.gain == 1


def test_frozen_and_unused_parameters_are_nobodys_noise():
    module = nn.ModuleDict(
        {"used": models.net(), "unused": nn.Linear(3, 3), "frozen": nn.Linear(6, 6)}
    )
    module["frozen"].requires_grad_(requires_grad=False)
    module.forward = lambda x: module["used"](module["frozen"](x))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    model = AdaptiveDataParallel(module, optimizer, find_unused_parameters=True)
    train(model, optimizer, models.loader(12))
    model.adaptation.settle()

    assert model.adaptation.noise.known
    assert math.isfinite(model.adaptation.noise.sqr)
    assert model.updates == 8


def test_several_optimizers_make_one_update():
    module = models.net()
    several = [
        torch.optim.SGD(module[0].parameters(), lr=0.1),
        torch.optim.Adam(module[2].parameters(), lr=0.1),
    ]
    model = AdaptiveDataParallel(module, several, scaling_rule=Fixed())
    seen = []
    for one in several:
        one.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    for inputs, targets in models.loader(48, micro_batches=2):
        for one in several:
            one.zero_grad()
        models.loss_of(model, inputs, targets).backward()
        for one in several:
            one.step()

    assert (model.updates, len(seen)) == (2, 4)
    assert seen[:2] == pytest.approx([0.2, 0.3])
    assert len(model.adaptation.noise.sqr_by_group) == 2


def test_two_models_in_one_loop_each_count_their_own():
    """A GAN: the second is stepped every other time."""
    (one, first), (two, second) = models.adaptive(), models.adaptive(seed=3)
    for number, (inputs, targets) in enumerate(models.loader(12)):
        for model, optimizer, every in ((one, first, 1), (two, second, 2)):
            if number % every == 0:
                optimizer.zero_grad()
                models.loss_of(model, inputs, targets).backward()
                optimizer.step()

    assert (one.updates, two.updates) == (8, 4)


def test_a_group_that_is_added_is_measured_from_then_on():
    model, optimizer = models.adaptive()
    extra = nn.Parameter(torch.zeros(3))
    train(model, optimizer, models.loader(12), updates=3)
    optimizer.add_param_group({"params": [extra], "lr": 0.1})
    train(model, optimizer, models.loader(12), updates=7)
    model.adaptation.settle()

    assert len(model.adaptation.noise.sqr_by_group) == 2


def test_adams_noise_is_that_of_what_its_steps_divide_gradients_by():
    """The preconditioned estimator, number by number, from the fifth step on."""
    model, optimizer = models.adaptive(torch.optim.Adam, lr=1e-3, eps=1e-3)
    assert isinstance(model.adaptation.scaling_rule, AdamScale)
    expected, gradients = NoiseScale(1), []
    for inputs, targets in itertools.chain(*[models.loader(12, micro_batches=3)] * 2):
        now = running.current().micro
        gradients.append(models.gradient(model.module, inputs, targets))
        if now.last:
            steps = model.updates
            divisor = torch.ones(())
            if steps >= 5:
                moments = [optimizer.state[p]["exp_avg_sq"] for p in model.parameters()]
                flat = torch.cat([m.reshape(-1) for m in moments]).double()
                divisor = (flat / (1 - 0.999**steps)).sqrt() + 1e-3
            scaled = [g / divisor for g in gradients]
            expected.update(Norms(
                local=(sum(map(sqr, scaled)) / 3,), total=(sqr(sum(scaled) / 3),),
                count=3, scale=1.0,
            ))  # fmt: skip
            gradients = []
        optimizer.zero_grad()
        models.loss_of(model, inputs, targets).backward()
        optimizer.step()
    model.adaptation.settle()

    assert model.updates == 16
    assert model.adaptation.noise.sqr == pytest.approx(expected.sqr, rel=1e-3)
    assert model.adaptation.noise.var == pytest.approx(expected.var, rel=1e-3)


@pytest.mark.parametrize("reset", [False, True])
def test_adam_forgets_its_moments_when_the_batch_changes_only_if_it_is_asked_to(reset):
    model, optimizer = models.adaptive(torch.optim.Adam, rule=AdamScale(reset_moments=reset))
    small, large = models.loader(12), models.loader(12)
    large._batching = models.loader(48)._batching
    large._choose = lambda: None
    train(model, optimizer, small)
    train(model, optimizer, large)
    steps = [int(optimizer.state[p]["step"]) for p in model.parameters()]

    assert steps == [2 if reset else 10] * 4
    assert model.adaptation.scale == 4


def test_what_is_no_optimizer_or_somebody_elses_is_refused():
    held = models.adaptive()
    with pytest.raises(InvalidRequestError, match="belongs to another adaptive model"):
        AdaptiveDataParallel(models.net(), held[1])
    with pytest.raises(InvalidRequestError, match="got a Linear"):
        AdaptiveDataParallel(models.net(), [nn.Linear(1, 1)])
    with pytest.raises(InvalidRequestError, match="got nothing"):
        AdaptiveDataParallel(models.net(), [])


def test_a_closure_cannot_have_a_batch_in_parts():
    model, optimizer = models.adaptive(torch.optim.LBFGS, lr=0.1)

    def closure(inputs, targets):
        optimizer.zero_grad()
        loss = models.loss_of(model, inputs, targets)
        loss.backward()
        return loss

    for batch in models.loader(48):
        optimizer.step(lambda batch=batch: closure(*batch))
    assert model.updates == 2
    for batch in models.loader(48, micro_batches=2):
        with pytest.raises(InvalidRequestError, match="closure sees one of them"):
            optimizer.step(lambda batch=batch: closure(*batch))


def test_evaluation_inside_a_loop_leaves_the_update_alone():
    """Another loader of ours is read between two micro-batches."""
    model, optimizer = models.adaptive()
    reference, plain = models.adaptive()
    train(reference, plain, models.loader(48, micro_batches=2))
    for inputs, targets in models.loader(48, micro_batches=2):
        optimizer.zero_grad()
        models.loss_of(model, inputs, targets).backward()
        with torch.no_grad():
            for batch in models.loader(32):
                models.loss_of(model, *batch)
        optimizer.step()

    assert model.updates == 2
    assert models.bits(model) == models.bits(reference)
