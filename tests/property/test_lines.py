"""Rules say of each checkpoint what its parents say: it stands if the newest came from it.

The model is a tree: each attempt came from a checkpoint, and what leads to where the run is now
stands. Nothing else does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.ids import CheckpointId
from holdfast.core.lines import Move, leaves, rules_of, to, with_moves

RUN = "r7"


@dataclass
class Tree:
    """A run on paper: which checkpoints there are, what each attempt came from, where it is."""

    moves: tuple[Move, ...] = ()
    came_from: dict[int, CheckpointId | None] = field(default_factory=dict)
    saved: list[CheckpointId] = field(default_factory=list)
    head: CheckpointId | None = None
    generation: int = 0

    def go_on_from(self, key):
        self.generation += 1
        self.came_from[self.generation] = self.head = key
        # As a rollback does: of equal ones the last was kept until now.
        began = [to(self.came_from[key.generation], key.generation)] if key else []
        self.moves = with_moves(self.moves, *began, to(key, self.generation))

    def save(self, steps):
        for _ in range(steps):
            step = (self.head.step if self.head else 0) + 10
            self.head = CheckpointId(RUN, step, self.generation)
            self.saved.append(self.head)

    def line(self):
        """What leads to where the run is."""
        found, key = set(), self.head
        while key is not None:
            found |= {
                one for one in self.saved
                if one.generation == key.generation and one.step <= key.step
            }  # fmt: skip
            key = self.came_from[key.generation]
        return found

    def standing(self, rules=None):
        rules = rules_of(self.moves) if rules is None else rules
        return {key for key in self.saved if not any(rule.covers(key) for rule in rules)}


def live(choices):
    """A choice: (how many steps an attempt saves, where the next one begins)."""
    tree = Tree()
    tree.go_on_from(None)
    for steps, which in choices:
        tree.save(steps)
        yield tree
        tree.go_on_from(tree.saved[which % len(tree.saved)] if tree.saved else None)
        yield tree


CHOICES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 200)), max_size=12)


@given(CHOICES)
def test_what_stands_is_what_led_to_where_the_run_is(choices):
    """F68, G19: wherever users went back to, on the line or on one that was left."""
    for tree in live(choices):
        assert tree.line() == tree.standing()


@given(CHOICES, st.randoms())
def test_the_order_in_which_moves_become_known_does_not_matter(choices, rng):
    """P6: a bucket is listed by names, and a catalogue from a backup hears of the middle last."""
    *_, tree = [Tree(), *live(choices)]
    shuffled = [to(key, generation) for generation, key in tree.came_from.items()]
    rng.shuffle(shuffled)
    moves = with_moves((), *shuffled[::2])
    moves = with_moves(moves, *shuffled)

    assert tree.line() == tree.standing(rules_of(moves))


@given(CHOICES)
def test_one_more_move_changes_rules_as_all_of_them_would(choices):
    """The short way and the long one agree; the short one says when it does not apply."""
    rules, generation = (), 0
    for tree in live(choices):
        if tree.generation > generation:
            generation = tree.generation
            short = leaves(rules, tree.moves[-1])
            rules = rules_of(tree.moves) if short is None else short
            assert tree.line() == tree.standing(rules)


@given(CHOICES)
def test_by_rising_generations_the_first_rule_that_speaks_of_one_is_the_strictest(choices):
    """What the statement relies on that looks for rows which stand: a CASE takes the first."""
    for tree in live(choices):
        rules = rules_of(tree.moves)
        for generation in range(tree.generation + 1):
            speak = [r for r in rules if r.from_generation <= generation < r.below_generation]
            assert not speak or speak[0].after_step == min(rule.after_step for rule in speak)
