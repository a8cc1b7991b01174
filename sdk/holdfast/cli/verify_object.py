"""``verify`` of the object tier: reads a checkpoint back part by part, loading nothing (G20).

With a folder or URL it needs no service at all.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.bucket.verify import ShardVerdict, strangers, verify
from holdfast.cli.catalogue import Target
from holdfast.cli.output import Report, Table, byte_progress
from holdfast.cli.where import reading
from holdfast.core.byte_sizes import format_bytes
from holdfast.format.manifest import Manifest


def verify_objects(place: Target | str, environ: Mapping[str, str]) -> Report:
    """Read every shard of the checkpoint back; failed when one does not match.

    Raises:
        NotFoundError: there is no such checkpoint.
        PreconditionError: it is not in the object store, or the read lease was lost.
        CheckpointError: the store, while it is read.
    """
    with reading(place, environ) as found:
        made = found.folder.manifest()
        with byte_progress("verifying", made.length_bytes) as advance:
            verdicts = list(
                verify(found.folder, made, pace=lambda _bytes: found.check(), progress=advance)
            )
        others = strangers(found.folder, made)
    what = place if isinstance(place, str) else f"step {made.checkpoint.step}"
    return judge(made, verdicts, others, what)


def judge(
    made: Manifest, verdicts: list[ShardVerdict], others: tuple[str, ...], what: str
) -> Report:
    """Return the report on ``what``: every shard, and segments that do not belong there."""
    bad = [verdict for verdict in verdicts if not verdict.ok]
    rows = tuple(
        (
            str(v.shard.id.rank),
            str(v.shard.id.volume),
            format_bytes(v.shard.length_bytes),
            "ok" if v.ok else f"{v.state.value.upper()}: {v.detail}",
        )
        for v in verdicts
    )
    text: list[str | Table] = [Table(("rank", "volume", "size", "object"), rows)]
    text += [f"not in the manifest, and other readers would take it in: {key}" for key in others]
    if not bad and not others:
        whole = f"all {len(verdicts)} objects match their digests"
        text.append(f"{what}: {whole if len(verdicts) > 1 else 'its object matches its digest'}")
    data = {
        "job": made.job,
        "step": made.checkpoint.step,
        "attempt": made.checkpoint.generation,
        "ok": not bad and not others,
        "objects": [
            {
                "shard": v.shard.id.key,
                "state": v.state.value,
                "detail": v.detail,
                "bad_parts": list(v.bad_parts),
            }
            for v in verdicts
        ],
        "strangers": list(others),
    }
    return Report(data=data, text=text, failed=bool(bad or others))
