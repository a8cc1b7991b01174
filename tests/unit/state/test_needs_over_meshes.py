"""What a rank names of a checkpoint over a mesh is enough, and loads what all of it would."""

import pytest
from tests.unit.state import worlds
from tests.unit.state.test_meshes import stage

from holdfast.core.needs import Head, Needs
from holdfast.errors import InvalidRequestError, NotReadyError
from holdfast.format.segment import header_length
from holdfast.reading.files import open_files
from holdfast.state.capture import Capture
from holdfast.training.restore_needs import of_boxes


class Saved:
    """A checkpoint that each rank of a world has saved, and what a rank may name of it."""

    def __init__(self, folder, world, make, world_size):
        self.world_size = world_size
        self._located = []
        for rank in range(world_size):
            world(rank, world_size)
            capture = Capture(make(rank), rank=rank, world_size=world_size)
            self._located.append(worlds.Saver(folder).save(capture))

    def heads(self, _, ranks):
        found = []
        for path, shard in self._located:
            data = path.read_bytes()
            if shard.id.rank in ranks:
                head = data[: header_length(data)]
                found.append(Head(rank=shard.id.rank, length_bytes=len(data), data=head))
        return found

    def needs(self, capture, only=None):
        return of_boxes(
            Needs(checkpoint=self._located[0][1].id.checkpoint), capture.rank % self.world_size,
            capture.boxes, only, self.heads, saved=self.world_size, world_size=capture.world_size,
        )  # fmt: skip

    def segments(self, ranks, held=None):
        return open_files([self._located[rank] for rank in ranks], held)

    def load(self, capture, needs, only=None):
        """Load from what was named alone, to the byte; it has to be a part."""
        assert not needs.whole
        held = {self._located[need.rank][1].id: need.ranges for need in needs.shards}
        with self.segments([need.rank for need in needs.shards], held) as segments:
            capture.load(segments, step=1, only=only, streams=only is None)


def test_a_stage_is_not_given_what_another_one_saved_since_it_sees_no_third(world, tmp_path):
    """Defect of an attack: of two stages it had fetched one, and that is not its own."""
    saved = Saved(tmp_path, world, lambda rank: stage(rank, [rank]), 2)
    world(2, 3)
    capture = Capture(stage(2, [2]), rank=2, world_size=3)

    assert saved.needs(capture).whole

    found = {1: NotReadyError, 2: InvalidRequestError}
    for segments_count, refusal in found.items():
        with saved.segments(range(segments_count)) as segments, pytest.raises(refusal):
            capture.load(segments, step=1)
