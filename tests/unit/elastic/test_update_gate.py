"""Which calls of a script act, in whatever order it makes them."""

from holdfast.elastic.running import Running
from holdfast.elastic.update_gate import UpdateGate
from holdfast.elastic.updates import Batching, micro_batches


def update(number, count=3):
    batching = Batching(size=count, replicas=1, micro_batches=count)
    for micro in micro_batches(range(count), 0, batching):
        yield Running(number=number, micro=micro, batching=batching, initial=count)


def test_a_step_acts_for_the_last_micro_batch_alone():
    gate = UpdateGate()

    assert [gate.steps(now) for now in update(1)] == [False, False, True]
    assert gate.steps(None)


def test_a_forward_is_the_first_of_its_micro_batch_once():
    gate = UpdateGate()
    told = [gate.forward(now) for now in update(1) for _ in range(2)]

    assert told == [True, False] * 3
    assert gate.forward(None)


def test_gradients_of_an_update_are_kept_until_it_is_over_and_then_go():
    gate, zeroed = UpdateGate(), []
    for number in (1, 2):
        for now in update(number):
            zeroed.append(gate.zeroes(now))
            gate.forward(now)
            gate.steps(now)
            zeroed.append(gate.zeroes(now))

    assert zeroed == [True, False, False, False, False, True] * 2


def test_an_update_whose_step_a_scaler_skips_is_over_once_its_gradients_are_averaged():
    gate = UpdateGate()
    for now in update(1):
        gate.forward(now)
        gate.steps(now) if not now.micro.last else gate.reduced(now)

    assert gate.zeroes(now)
    assert gate.zeroes(next(update(2)))


def test_without_a_loader_everything_acts():
    gate = UpdateGate()

    assert gate.zeroes(None)
    assert gate.steps(None)
