"""What a user is told of a rollback."""

from __future__ import annotations

from holdfast.cli.rollback import told


def test_the_way_forward_leads_to_what_the_object_store_has():
    """What only memory had is being freed: a command that names it would be refused."""
    left = [{"step": step, "attempt": 5} for step in (67, 66, 60)]
    done = {"job": "gpt", "step": 10, "attempt": 1, "repeated": False, "left": left}

    some = "\n".join(told(done, {(60, 5), (10, 1)}, None))
    none = "\n".join(told(done, {(10, 1)}, 5))

    assert "left behind, 3 checkpoints: steps 67, 66, 60" in some
    assert "`holdfast rollback gpt@60 --attempt 5` goes forward again" in some
    assert "forward again" not in none
    assert "attempt 5 saves nothing any more" in none
