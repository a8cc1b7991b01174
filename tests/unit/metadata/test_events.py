"""Events are documented where they are listed."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
KIND = re.compile(
    r"(?:kind=|_event\((?:run, )?|say\(state, |_event\()\s*\"([a-z]+(?:_[a-z]+)+)\"", re.DOTALL
)


def test_every_kind_of_event_is_in_the_reference():
    page = (ROOT / "docs/reference/events.md").read_text()
    sources = [*(ROOT / "services").rglob("*.py"), *(ROOT / "sdk/holdfast").rglob("*.py")]
    found = {kind for path in sources for kind in KIND.findall(path.read_text())}

    assert {"checkpoint_expired", "checkpoint_bad", "save_abandoned", "bad_source"} <= found
    assert [] == sorted(kind for kind in found if f"`{kind}`" not in page)
