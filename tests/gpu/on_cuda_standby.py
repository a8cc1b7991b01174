"""``--warm-cuda`` on a real GPU: the context is there, and the script sees no other difference."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.unit.launcher.test_rank_process import WAIT_S_MAX, Rank, plain, script

SEES = """
    import json, torch
    warm = torch.cuda.is_initialized()
    torch.cuda.init()
    torch.manual_seed(5)  # else each process has a seed of its own
    print(json.dumps({
        "warm": warm, "device": torch.cuda.current_device(),
        "allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(),
        "random": torch.cuda.get_rng_state().tolist(),
        "drawn": torch.rand(4, device="cuda").tolist(),
    }))
"""


def test_a_warm_standby_has_its_context_and_nothing_else(tmp_path):
    name = script(tmp_path, SEES)
    rank = Rank(tmp_path, name, preload=("torch",), warm_cuda=True)
    tasks = Path(f"/proc/{rank.process.pid}/task")
    ends_s = time.monotonic() + WAIT_S_MAX
    while len(list(tasks.iterdir())) < 2:  # CUDA has threads of its own
        assert time.monotonic() < ends_s, "no context"
        time.sleep(0.05)
    code, out, err = rank.go()
    assert code == 0, err
    _, cold, _ = plain(tmp_path, name)

    seen, expected = json.loads(out), json.loads(cold)
    assert (seen.pop("warm"), expected.pop("warm")) == (True, False)
    assert seen == expected
