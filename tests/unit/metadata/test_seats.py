"""A node is told which ranks are registered from it: after a lost catalogue each comes again."""

from __future__ import annotations


def test_a_node_is_told_its_own_seats(cluster):
    """P6: its mates bring the attempt back, and a rank would train on unheard for ever."""
    cluster.join("a", "b", "c")
    cluster.launch(b"first", "a", "b", "a")

    seats = {name: [run.seats for run in cluster.view(name).runs] for name in "abc"}

    assert seats == {"a": [(0, 2)], "b": [(1,)], "c": []}
