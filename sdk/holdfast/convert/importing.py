"""Writes a source into a store as a Holdfast checkpoint: world size 1, one segment.

Order of effects: segment, sidecar, index, and last of all the manifest. Until that is there,
nobody sees a checkpoint, and a killed import leaves what the store's orphan collection removes.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import holdfast
from holdfast.bucket.folder import CheckpointFolder
from holdfast.bucket.listing import places
from holdfast.bucket.publish import publish, put_sidecar
from holdfast.bucket.writing import SegmentStream
from holdfast.convert.dcp_files import METADATA, DcpSource
from holdfast.convert.safetensors_files import (
    SUFFIX,
    SafetensorsSource,
    is_safetensors,
    open_folder,
    state_path,
)
from holdfast.convert.source import TensorSource, raw
from holdfast.convert.torch_files import TorchSource
from holdfast.core.ids import (
    CheckpointId,
    Generation,
    Rank,
    RunId,
    ShardId,
    Step,
    job_name,
    run_id,
)
from holdfast.core.shard import Shard
from holdfast.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from holdfast.format import blob, keys
from holdfast.format.digest import part_digest, root_digest
from holdfast.format.header import parse_header
from holdfast.format.manifest import Manifest, decode
from holdfast.format.names import RESERVED, blob_name
from holdfast.format.segment import (
    HeaderTemplate,
    SegmentIdentity,
    TensorSpec,
    blob_spec,
    header_template,
)
from holdfast.format.sidecar import Sidecar
from holdfast.format.tree import Json
from holdfast.objectstore import ObjectStore

STATE_ALIGN_BYTES = 4096

Advance = Callable[[int], None]


def open_source(path: Path) -> TensorSource:
    """Return the source of a safetensors or torch file, or a Hugging Face or DCP folder.

    Raises:
        NotFoundError: nothing is there, or nothing that is one of these.
        CheckpointError: what the format's reader refuses.
    """
    if path.is_dir():
        return DcpSource(path) if (path / METADATA).is_file() else open_folder(path)
    if not path.is_file():
        raise NotFoundError(f"no file or folder is at {path}")
    if path.name.endswith(SUFFIX) or is_safetensors(path):
        return SafetensorsSource([path], state_path(path))
    return TorchSource(path)


def place_for(store: ObjectStore, job: str, step: int) -> CheckpointId:
    """Return under which id an imported checkpoint goes: generation 0 of the job's run.

    Raises:
        AlreadyExistsError: the job has this step.
        PreconditionError: the job was trained here: its own restores would pass the import by.
    """
    name = job_name(job)
    found = [place.checkpoint for place in places(store, name)]
    if any(checkpoint.generation for checkpoint in found):
        raise PreconditionError(
            f"job {name} was trained here and would restore its own steps: import under "
            f"another --job"
        )
    if any(checkpoint.step == step for checkpoint in found):
        raise AlreadyExistsError(f"job {name} has step {step} already: choose another --step")
    run = max(found).run if found else run_id(secrets.token_hex(8))
    return CheckpointId(RunId(run), Step(step), Generation(0))


def write_checkpoint(
    store: ObjectStore,
    source: TensorSource,
    *,
    job: str,
    checkpoint: CheckpointId,
    advance: Advance = lambda _bytes: None,
) -> Manifest:
    """Write ``source`` as ``checkpoint`` of ``job`` and return its manifest.

    Raises:
        InvalidRequestError: a name or a number of tensors that the format does not take.
        CheckpointError: the source or the store; nothing is a checkpoint then.
    """
    texts = _texts(source)
    specs = list(source.specs())
    shard_id = ShardId(checkpoint.run, checkpoint.step, checkpoint.generation, Rank(0))
    identity = SegmentIdentity(
        id=shard_id, job=job_name(job), world_size=1, plan_hash=_plan_hash([*specs, *texts])
    )
    template = header_template(identity, [*specs, *texts])
    folder = CheckpointFolder(store, keys.folder(identity.job, checkpoint))
    key = keys.segment_key(identity.job, shard_id, 1)
    with SegmentStream(store, key, template.length_bytes) as stream:
        _send(stream, template, checkpoint, source, texts, advance)
        digests = stream.finish()
    shard = Shard(
        id=shard_id,
        job=identity.job,
        world_size=1,
        plan_hash=identity.plan_hash,
        length_bytes=template.length_bytes,
        root_digest=root_digest(template.length_bytes, digests),
    )
    put_sidecar(folder, Sidecar(shard=shard, digests=digests))
    made = Manifest(
        checkpoint=checkpoint,
        job=identity.job,
        world_size=1,
        shards=(shard,),
        write_id=secrets.token_hex(16),
        created_at_s=time.time(),
        mesh={"dp": 1},
        software=f"holdfast {holdfast.__version__}",
    )
    header = parse_header(template.data, template.length_bytes)
    return decode(publish(folder, made, headers=lambda: [header]))


def _send(
    stream: SegmentStream,
    template: HeaderTemplate,
    checkpoint: CheckpointId,
    source: TensorSource,
    texts: dict[TensorSpec, bytes],
    advance: Advance,
) -> None:
    """Send header, tensors and blobs in the order of the template."""
    header = template.fill(step=checkpoint.step, generation=checkpoint.generation, parent=None)
    stream.write(header)
    by_name = {spec.fqn: text for spec, text in texts.items()}
    ordered = [entry.spec.fqn for entry in template.entries]
    tensors = source.tensors([name for name in ordered if name not in by_name])
    for name in ordered:
        if name in by_name:
            stream.write(by_name[name])
            continue
        _, tensor = next(tensors)
        stream.write(raw(tensor))
        advance(tensor.nbytes)


def _texts(source: TensorSource) -> dict[TensorSpec, bytes]:
    """Return the state of each rank as text of a length that is its blob's capacity."""
    state = {
        rank: json.dumps(value, separators=(",", ":")).encode()
        for rank, value in source.state().items()
    }
    found = {}
    for rank, text in (state or {0: _state(source)}).items():
        padded = text.ljust(len(text) + -len(text) % STATE_ALIGN_BYTES)
        found[blob_spec(blob_name(rank), len(padded))] = padded
    return found


def _state(source: TensorSource) -> bytes:
    """Return the text of a rank that had one module per first part of the tensors' names.

    So ``Checkpointer(job, {"model": model})`` restores what was imported with ``--as model``.
    """
    modules = dict.fromkeys(
        spec.fqn.partition(".")[0] for spec in source.specs() if "." in spec.fqn
    )
    values = source.values()
    clash = next((name for name in values if name in modules), None)
    tree: dict[str, Json] = {name: {"$ref": name} for name in modules}
    tree |= {name: value for name, value in values.items() if "." not in name and name != clash}
    for name in tree:
        if name in RESERVED:
            raise InvalidRequestError(f"a tensor's name begins with {name!r}: use --as or --strip")
    static = blob.Static(
        objects={name: blob.SavedModule() for name in modules}, aliases={}, world_size=1
    )
    return blob.join(static.encode(), blob.Live(tree=tree).encode(), dict(values))


def _plan_hash(specs: Sequence[TensorSpec]) -> str:
    table = [
        (spec.fqn, spec.dtype, spec.shape, spec.box.offsets, spec.box.lengths) for spec in specs
    ]
    return part_digest(json.dumps(table, separators=(",", ":")).encode()).hex()
