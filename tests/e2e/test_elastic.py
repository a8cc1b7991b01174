"""An elastic job is killed inside accumulations, and goes on on other numbers of ranks.

F81, F82, F106. Real processes, a real stack, SIGKILL.
"""

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from tests.e2e.elastic_rank import BATCH, SIZE
from tests.e2e.stack import running_stack, until

SCRIPT = Path(__file__).with_name("elastic_rank.py")
EPOCHS, NEVER = 2, 1000
END_S_MAX = 180.0


@pytest.fixture(scope="module")
def stack():
    with running_stack(nodes=1) as running:
        yield running


def test_each_sample_is_used_once_in_an_epoch_and_counted_once(stack, tmp_path):
    """Two ranks with two micro-batches, one with four, three with two; both kills are inside."""
    began, outputs = [], []
    for name, ranks, kill in (("one", 2, 5), ("two", 1, 12), ("three", 3, NEVER)):
        launch = stack.ranks(
            str(tmp_path), "elastic", str(EPOCHS), str(kill),
            world_size=ranks, script=SCRIPT, LAUNCH=name, HOLDFAST_LAUNCH="elastic",
        )  # fmt: skip
        codes = launch.wait(END_S_MAX)
        assert (set(codes) == {0}) is (kill == NEVER), launch.outputs
        outputs = launch.outputs
        assert "goes on" in outputs[0], outputs[0]
        began.append(int(re.search(r"goes on after step (\d+)", outputs[0])[1]))
    used = Counter()
    for (name, ranks), (first, end) in zip(
        (("one", 2), ("two", 1), ("three", 3)), pairwise([*began, NEVER]), strict=True
    ):
        for rank in range(ranks):
            for line in (tmp_path / f"{name}.{rank}").read_text().splitlines():
                update, *samples = map(int, line.split())
                if first <= update < end:
                    used.update(samples)

    assert began[0] == 0
    assert 0 < began[1] <= 5
    assert began[1] < began[2] <= 12
    assert used == dict.fromkeys(range(SIZE), EPOCHS)
    assert [f"seen {SIZE * EPOCHS}.0"] * 3 == [out.splitlines()[-1] for out in outputs]
    hints = until(lambda: stack.rest("jobs/elastic")["hints"], "hints of the job")
    assert (hints["initial_batch"], hints["batch_max"], hints["refused"]) == (BATCH, BATCH, "")
