"""The catalogue dies at every statement and every commit: all of a call is there, or none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.e2e.stack import ROOT, environment

pytestmark = pytest.mark.timeout(300)
OPERATIONS_MIN = 10


@pytest.mark.parametrize("call", ["commit", "durable", "new generation", "confirm"])
def test_a_call_cut_short_is_there_whole_or_not_at_all_and_can_be_repeated(tmp_path, call):
    """P1, P2, P5: rows before or rows after, never between; the repeat ends where one call does.

    SIGKILL before and after each statement and each commit of the Report that commits a
    checkpoint and begins its drain, of the Durable that ends it and begins what it kept waiting,
    of the RegisterRank that makes a generation, of the Report that confirms a restore.
    """
    paths = f"{ROOT / 'sdk'}:{ROOT / 'services'}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.catalogue", str(tmp_path), call],
        env=environment(PYTHONPATH=paths), cwd=tmp_path, capture_output=True, text=True,
        check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)

    assert len(found) >= 2 * OPERATIONS_MIN
    assert [] == [one["point"] for one in found if not one["killed"]], "it did not die there"
    torn = [one for one in found if one["left"] not in ("nothing", "everything")]
    assert [] == torn
    assert {"nothing", "everything"} == {one["left"] for one in found}
    assert [] == [one for one in found if not one["repeated"]]
    assert [] == [one for one in found if one["after_repeat"] != "everything"]
    lived = [one["generations"] for one in found]
    assert lived == sorted(lived), "a generation went back"
