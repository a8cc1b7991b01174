"""F7: PyTorch's own scenarios of DCP on four ranks, and the page that says where they are from."""

from __future__ import annotations

import re
from pathlib import Path

from tests.integration.dcp import scenarios
from tests.servers.nursery import NURSERY

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "dcp-scenarios.md"
OURS = (
    "integration/dcp/test_worlds.py", "unit/integrations/test_dcp.py", "e2e/test_dcp_jobs.py",
    "unit/integrations/test_dcp_stager.py",
)  # fmt: skip
WAIT_S = 300
NAMES = [scenario.__name__ for scenario in scenarios.SCENARIOS]


def rows():
    """Return file and last column of each row."""
    found = re.findall(r"^\| `(\S+\.py)` \| .+? \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(found) == 68
    return dict(found)


def test_all_scenarios_hold_on_four_ranks(tmp_path):
    environ = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'sdk'}", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin",
    }  # fmt: skip
    size = scenarios.WORLD
    arguments = [[str(tmp_path), str(rank), str(size)] for rank in range(size)]
    script = Path(scenarios.__file__)
    NURSERY.together(script, arguments, env=environ, folder=tmp_path, timeout_s=WAIT_S)
    said = re.findall(r"^ok (\w+)$", (tmp_path / "0.log").read_text(), re.MULTILINE)

    assert NAMES == said


def test_each_file_of_pytorch_has_tests_of_ours_or_a_reason():
    known = set(NAMES)
    for path in OURS:
        text = (ROOT / "tests" / path).read_text()
        known |= set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
    for file, ours in rows().items():
        named = re.findall(r"`(\w+)`", ours)
        strange = [name for name in named if name not in known]

        assert not strange, f"{file}: there is no test {strange}: change {PAGE.name}"
        assert named or ours.startswith("not "), f"{file}: name a test, or say why there is none"


def test_each_scenario_says_where_it_comes_from():
    told = " ".join(rows().values())

    assert [] == [name for name in NAMES if f"`{name}`" not in told]
