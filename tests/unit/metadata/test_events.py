"""Events are documented where they are listed."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
MAKERS = {"Event", "_event", "_news", "say", "tell"}
KIND = re.compile(r"[a-z]+(_[a-z]+)*")


def kinds(path):
    """Yield the first word among the arguments of each call that makes an event."""
    for call in ast.walk(ast.parse(path.read_text())):
        if not isinstance(call, ast.Call):
            continue
        if getattr(call.func, "id", getattr(call.func, "attr", "")) not in MAKERS:
            continue
        named = [keyword.value for keyword in call.keywords if keyword.arg == "kind"]
        words = [a.value for a in (*named, *call.args) if isinstance(a, ast.Constant)]
        yield from [w for w in words if isinstance(w, str) and KIND.fullmatch(w)][:1]


def test_every_kind_of_event_is_in_the_reference():
    page = (ROOT / "docs/reference/events.md").read_text()
    sources = [*(ROOT / "services").rglob("*.py"), *(ROOT / "sdk/holdfast").rglob("*.py")]
    found = {kind for path in sources for kind in kinds(path)}

    assert {"checkpoint_expired", "checkpoint_bad", "save_abandoned", "bad_source"} <= found
    assert {"quarantined", "persisted", "restore_lost"} <= found, "one word, and by a helper"
    assert [] == sorted(kind for kind in found if f"`{kind}`" not in page)
