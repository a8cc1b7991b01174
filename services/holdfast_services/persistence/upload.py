"""Puts one shard into the object store: the object, proven, then its sidecar.

The order of effects, and what a death leaves at each, is ``docs/explanation/persistence.md``.
Two workers on one shard are harmless: same name, same bytes. Units: bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from holdfast.bucket.folder import CheckpointFolder
from holdfast.core.persistence_work import ShardWork
from holdfast.core.shard import Shard
from holdfast.errors import (
    CorruptionError,
    DigestMismatchError,
    NotFoundError,
    PreconditionError,
    StoppedError,
    TruncatedShardError,
    UnsupportedFormatError,
)
from holdfast.format import keys
from holdfast.format.digest import PART_BYTES, part_digest
from holdfast.format.sidecar import SIDECAR_BYTES_MAX, Sidecar
from holdfast.format.sidecar import decode as decode_sidecar
from holdfast.format.sidecar import encode as encode_sidecar
from holdfast.objectstore import (
    UPLOAD_PARTS_COUNT_MAX,
    ObjectStore,
    OpenUpload,
    Upload,
    UploadedPart,
)
from holdfast_services.kit.pace import Pace
from holdfast_services.persistence.domain.existing_object import Verdict, judge
from holdfast_services.persistence.domain.upload_plan import (
    Copy,
    Part,
    UploadPlan,
    comparable,
    cut,
    plan_upload,
    to_read_back,
    upload_part_bytes,
)
from holdfast_services.persistence.pool import PartPool
from holdfast_services.persistence.source import ReadableCopies

TRIES_COUNT_MAX = 3
EARLIER_COUNT_MAX = 4

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Moved:
    """How the bytes of a shard got into the store; all 0: they were there already.

    Bytes ``sent`` by us, ``copied`` inside the store, ``kept`` of what somebody else had sent.
    ``total`` is told of all of them, too.
    """

    sent_bytes: int = 0
    copied_bytes: int = 0
    kept_bytes: int = 0
    total: Moved | None = None
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, sent: int = 0, copied: int = 0, kept: int = 0) -> None:
        """Count bytes; from any thread."""
        with self._guard:
            self.sent_bytes += sent
            self.copied_bytes += copied
            self.kept_bytes += kept
        if self.total is not None:
            self.total.add(sent=sent, copied=copied, kept=kept)


class ShardUpload:
    """One shard on its way into the store.

    Args:
        store: Where to.
        pool: Moves the parts.
        pace: How fast bytes may be sent, and read back.
        plan: What metadata asked for; the shard with its sources.
        stop: Ends it between two parts; what was begun stays for whoever goes on.
        sources: The shard's copies; closed at the end.
        drained: Where what is moved is counted together with other shards'.
    """

    def __init__(
        self, store: ObjectStore, pool: PartPool, pace: Pace, plan: ShardWork,
        stop: threading.Event, sources: ReadableCopies, drained: Moved | None = None,
    ) -> None:  # fmt: skip
        self._store = store
        self._pool = pool
        self._pace = pace
        self._plan = plan
        self._stop = stop
        self._shard: Shard = plan.shard
        self._folder = CheckpointFolder(store, keys.folder(plan.job, plan.checkpoint))
        self._key = self._folder.segment_key(self._shard)
        self._part_bytes = upload_part_bytes(self._shard.length_bytes, UPLOAD_PARTS_COUNT_MAX)
        self._sources = sources
        self.moved = Moved(total=drained)

    def run(self) -> None:
        """Return when object and sidecar are stored and verified.

        Raises:
            UnavailableError: the store, or all sources; try again later.
            StoppedError: ``stop`` was set.
            CorruptionError: what the store gives back is not what was sent, again and again.
            PreconditionError: the folder is another checkpoint's, which is durable.
            CheckpointError: as the store refuses.
        """
        try:
            verdict = self._judge()
            if verdict is Verdict.DONE:
                return
            sidecar = Sidecar(shard=self._shard, digests=self._sources.digests())
            parts = cut(self._shard.length_bytes, sidecar.digests, self._part_bytes)
            suspect = self._plan.repair
            if verdict is Verdict.PROVE:
                suspect = not self._proven(parts)
            if verdict is Verdict.WRITE or suspect:
                self._check_ours()
                self._write(parts, fresh=suspect)
            self._abort_others()
            self._store.put(self._folder.sidecar_key(self._shard), encode_sidecar(sidecar))
        finally:
            self._sources.close()

    def _judge(self) -> Verdict:
        try:
            length_bytes = self._store.head(self._key).length_bytes
        except NotFoundError:
            return Verdict.WRITE
        sidecar = self._sidecar(self._shard)
        found = sidecar.shard if sidecar else None
        return judge(self._shard, length_bytes, found, repair=self._plan.repair)

    def _check_ours(self) -> None:
        """Raise if the folder has the manifest of another checkpoint, which is durable (P2).

        It may be that of another catalogue, or of what this one has forgotten by a backup.
        """
        try:
            manifest = self._folder.manifest()
        except (NotFoundError, CorruptionError):
            return
        if self._shard not in manifest.shards:
            raise PreconditionError(
                f"{self._folder.prefix} is the folder of another checkpoint, which is durable",
                shard=self._shard.id.key,
            )

    def _sidecar(self, shard: Shard) -> Sidecar | None:
        try:
            return self._folder.sidecar(shard)
        except (NotFoundError, CorruptionError, UnsupportedFormatError):
            return None

    # -- writing ---------------------------------------------------------------------------

    def _write(self, parts: Sequence[Part], *, fresh: bool) -> None:
        """Upload and prove; begin again when the upload is taken away or is not what was sent.

        ``fresh``: what lies in the store is under suspicion, and so is all it was made of.
        """
        for tries_left in reversed(range(TRIES_COUNT_MAX)):
            try:
                plan = self._upload(parts, fresh=fresh)
                self._prove(to_read_back(
                    plan, self._shard.root_digest, checked=self._store.checks_parts
                ))  # fmt: skip
            except (NotFoundError, PreconditionError):
                # Another worker ended the upload or sent a part again; or the bucket is gone.
                if not self._plan.repair and self._proven(parts):
                    return
                if not tries_left:
                    raise
            except CorruptionError as error:
                log.warning("%s is written again: %s", self._key, error)
                fresh = True
                if not tries_left:
                    raise
            else:
                return

    def _upload(self, parts: Sequence[Part], *, fresh: bool) -> UploadPlan:
        """Upload once; ``fresh`` keeps and copies nothing: the good bytes are in memory."""
        upload, present = self._begin(fresh=fresh)
        sizes = {number: part.length_bytes for number, part in present.items()}
        plan = plan_upload(parts, sizes, () if fresh else self._earlier())
        self.moved.add(kept=sum(part.length_bytes for part in plan.kept))
        done = [present[part.number] for part in plan.kept]
        work: Iterable[Copy | Part] = chain(plan.copies, plan.sends)
        done += self._pool.each(lambda job: self._move(upload, job), work)
        self._store.finish(upload, sorted(done, key=lambda part: part.number))
        return plan

    def _begin(self, *, fresh: bool) -> tuple[Upload, dict[int, UploadedPart]]:
        """Go on with the newest open upload of this shard and its parts, or begin one."""
        length_bytes = self._shard.length_bytes
        if not fresh:
            found = sorted(self._open_uploads(), key=lambda u: u.started_s, reverse=True)
            for opened in found:
                try:
                    upload = self._store.resume(opened, length_bytes, self._part_bytes)
                    return upload, dict(self._store.parts(upload))
                except (NotFoundError, PreconditionError):
                    continue  # it has ended meanwhile, or was begun with parts of another size
        return self._store.begin(self._key, length_bytes, self._part_bytes), {}

    def _open_uploads(self) -> list[OpenUpload]:
        return [u for u in self._store.open_uploads(self._key) if u.key == self._key]

    def _abort_others(self) -> None:
        """Abort the uploads of dead workers, which are useless once the object is stored.

        A worker that lives notices, and finds the object. Before the sidecar: that says done.
        """
        for opened in self._open_uploads():
            self._store.abort(opened)

    def _move(self, upload: Upload, job: Part | Copy) -> UploadedPart:
        if self._stop.is_set():
            raise StoppedError(f"persisting {self._shard.id.key} was interrupted")
        if isinstance(job, Part):
            return self._send(upload, job)
        try:
            done = self._store.copy_part(upload, job.part.number, job.source, job.part.begin)
        except (NotFoundError, PreconditionError) as error:
            log.debug("part %d of %s is sent: %s", job.part.number, self._key, error)
            return self._send(upload, job.part)
        self.moved.add(copied=job.part.length_bytes)
        return done

    def _send(self, upload: Upload, part: Part) -> UploadedPart:
        """Send a part that was hashed just before, from a slot that is still the shard's after."""
        while True:
            with self._sources.part(part, self._stop) as lent:
                self._pace.take(part.length_bytes, self._stop)
                done = self._store.put_part(upload, part.number, lent.view)
                if lent.still():
                    break
        self.moved.add(sent=part.length_bytes)
        return done

    # -- parts that an earlier checkpoint has ------------------------------------------------

    def _earlier(self) -> list[tuple[str, Sidecar]]:
        """Return objects of earlier checkpoints that may share parts, with their sidecars."""
        found = []
        for checkpoint in self._plan.earlier[:EARLIER_COUNT_MAX]:
            mine = self._shard.id
            theirs = replace(
                mine, run=checkpoint.run, step=checkpoint.step, generation=checkpoint.generation
            )
            place = (self._plan.job, theirs, self._shard.world_size)
            try:
                data = self._store.get(keys.sidecar_key(*place), length_bytes_max=SIDECAR_BYTES_MAX)
                sidecar = decode_sidecar(data)
            except (NotFoundError, CorruptionError, UnsupportedFormatError) as error:
                log.debug("nothing is copied from %s: %s", theirs.key, error)
                continue
            if sidecar.shard.id == theirs and comparable(self._shard, sidecar.shard):
                found.append((keys.segment_key(*place), sidecar))
        return found

    # -- proof -------------------------------------------------------------------------------

    def _proven(self, parts: Sequence[Part]) -> bool:
        """Tell whether another worker's finished object is the shard, by reading all of it."""
        try:
            self._prove(parts)
        except (NotFoundError, CorruptionError) as error:
            log.info("%s is not what it should be: %s", self._key, error)
            return False
        self.moved.add(kept=self._shard.length_bytes)
        return True

    def _prove(self, parts: Sequence[Part]) -> None:
        """Check the object's length, and read ``parts`` of it back.

        Raises:
            NotFoundError: there is none.
            CorruptionError: it is not the shard.
        """
        length_bytes = self._store.head(self._key).length_bytes
        if length_bytes != self._shard.length_bytes:
            raise TruncatedShardError(f"{self._key} has {length_bytes} bytes")
        self._pool.each(self._read_back, parts)

    def _read_back(self, part: Part) -> None:
        for index, digest in enumerate(part.digests):
            begin = part.begin + index * PART_BYTES
            if self._stop.is_set():
                raise StoppedError(f"reading {self._key} back was interrupted")
            with self._pool.buffer(min(PART_BYTES, part.end - begin)) as view:
                self._pace.take(len(view), self._stop)
                self._store.read_into(self._key, begin, view)
                if part_digest(view) != digest:
                    raise DigestMismatchError(
                        f"{self._key} does not match at byte {begin}", shard=self._shard.id.key
                    )
