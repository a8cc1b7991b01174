"""What is damaged, foreign or hostile is refused by name, and leaves nothing behind."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata

from holdfast.convert import staged as staging
from holdfast.convert.exporting import FORMATS, export
from holdfast.convert.importing import open_source, place_for, write_checkpoint
from holdfast.convert.reading import CheckpointReader
from holdfast.convert.source import Chosen, Selection
from holdfast.errors import (
    AlreadyExistsError,
    DigestMismatchError,
    InvalidRequestError,
    ManifestError,
    NotFoundError,
    PreconditionError,
    UnsupportedFormatError,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*single process:UserWarning")

SDK = Path(__file__).parents[3] / "sdk"


def damage(store_root: Path, at: int) -> None:
    path = next(store_root.rglob("shard-00001-*.v1.safetensors"))
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_stops_the_export_and_names_the_object(folder, tmp_path):
    """P3: what is exported was verified; nothing stands under the final name."""
    damage(tmp_path / "store", -1)
    named = r"part 0 of .*shard-00001-of-00002\.v1"
    with pytest.raises(DigestMismatchError, match=named), CheckpointReader(folder) as reader:
        export(reader, tmp_path / "out", "hf")

    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_there_is_replaced_only_by_force(form, reader, tmp_path):
    dest = tmp_path / "out"
    dest.mkdir()
    (dest / "precious").touch()
    with pytest.raises(AlreadyExistsError, match="--force"):
        export(reader, dest, form)
    assert (dest / "precious").exists()

    if form in ("safetensors", "torch"):
        shutil.rmtree(dest)
        dest.touch()
    export(reader, dest, form, force=True)

    assert open_source(dest if form != "safetensors" else dest.rename(f"{dest}.safetensors"))
    assert not (dest / "precious").exists()
    assert [] == [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


class Killed(BaseException):
    """The process is gone."""


def test_a_folder_is_replaced_without_a_moment_in_which_nothing_is_there(tmp_path, monkeypatch):
    """Defect C10: a kill after any rename, or before what was there is removed."""
    dest = tmp_path / "out"
    dest.mkdir()
    (dest / "old").touch()

    def killed(name):
        plain = getattr(os, name)

        def rename(*args, **options):
            plain(*args, **options)
            raise Killed

        return rename

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, killed(name))
    monkeypatch.setattr(staging, "_remove", killed("fspath"))
    with suppress(Killed), staging.staged(dest, force=True) as fresh:
        fresh.mkdir()
        (fresh / "new").touch()

    assert ["new"] == [path.name for path in dest.iterdir()]


@pytest.mark.parametrize("can", [True, False], ids=["exchange", "two renames"])
def test_a_folder_is_replaced_whatever_the_file_system_can(tmp_path, monkeypatch, can):
    dest = tmp_path / "out"
    dest.mkdir()
    (dest / "old").touch()
    if not can:
        monkeypatch.setattr(staging, "exchange", lambda *_: False)
    with staging.staged(dest, force=True) as fresh:
        fresh.mkdir()
        (fresh / "new").touch()

    assert ["new"] == [path.name for path in dest.iterdir()]
    assert [dest] == list(tmp_path.iterdir())


@pytest.mark.parametrize("form", FORMATS)
def test_an_export_that_is_stopped_half_way_leaves_nothing(form, folder, tmp_path):
    """The read lease is lost after the first parts."""
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) > 4:
            raise PreconditionError("the lease is lost")

    with CheckpointReader(folder, check) as reader, pytest.raises(PreconditionError):
        export(reader, tmp_path / "out", form)

    assert ["store"] == [path.name for path in tmp_path.iterdir()]


KILLED = """
import os, signal, sys
from pathlib import Path
from holdfast.bucket.folder import CheckpointFolder
from holdfast.convert.exporting import FORMATS, export
from holdfast.convert.reading import CheckpointReader
from holdfast.objectstore import open_store

def advance(_):
    os.kill(os.getpid(), signal.SIGKILL)

root, prefix, dest = sys.argv[1:]
for form in FORMATS:
    child = os.fork()
    if not child:
        with CheckpointReader(CheckpointFolder(open_store(root), prefix)) as reader:
            export(reader, Path(dest) / form, form, advance=advance)
    print(form, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_killed_export_leaves_nothing_under_the_final_name(folder, tmp_path):
    """In every format, after the first tensor; the next export does not mind what is left."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "store", folder.prefix, tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": str(SDK)},
        capture_output=True,
        text=True,
        check=True,
    )
    left = sorted(path.name for path in (tmp_path / "out").iterdir())

    assert [f"{form} {-signal.SIGKILL}" for form in FORMATS] == done.stdout.splitlines()
    assert all(name.startswith(".") and name.endswith((".part", ".data")) for name in left), left
    with CheckpointReader(folder) as reader:
        for form in FORMATS:
            export(reader, tmp_path / "out" / form, form)
            assert (tmp_path / "out" / form).exists()


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/holdfast-was-fooled",))


def test_dcp_metadata_may_hold_dcps_own_classes_only(reader, tmp_path):
    """P9: a pickle that would run something is refused by the name of what it would run."""
    export(reader, tmp_path / "dcp", "dcp")
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(Evil()))

    with pytest.raises(InvalidRequestError, match=r"posix\.system"):
        open_source(tmp_path / "dcp")


class ByGetattr:
    """Pickled as Python before 3.11.4 pickles a member of an enum."""

    def __init__(self, owner, name):
        self.asked = owner, name

    def __reduce__(self):
        return getattr, self.asked


def test_of_getattr_only_what_enums_need_is_unpickled(tmp_path):
    """P9: some Pythons write members of enums as getattr; it reaches nothing else here."""
    memory_format = dcp_metadata._MEM_FORMAT_ENCODING
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(ByGetattr(memory_format, "TORCH_PRESERVE_FORMAT")))
    with pytest.raises(UnsupportedFormatError, match="FileSystemWriter"):
        open_source(tmp_path)
    for owner, name in (
        (memory_format, "__init__"),
        (memory_format, "mro"),
        (dcp_metadata.Metadata, "__init__"),
        (torch.Size, "numel"),
    ):
        path.write_bytes(pickle.dumps(ByGetattr(owner, name)))
        with pytest.raises(InvalidRequestError, match="not unpickled"):
            open_source(tmp_path)


def test_dcp_values_that_only_pickle_can_make_are_refused(tmp_path):
    dcp.save({"w": torch.zeros(2), "odd": Path("x")}, checkpoint_id=tmp_path / "d", no_dist=True)
    with pytest.raises(InvalidRequestError, match="value 'odd'"):
        open_source(tmp_path / "d")


def test_dcp_files_outside_the_folder_are_not_read(tmp_path):
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "d", no_dist=True)
    path = tmp_path / "d/.metadata"
    path.write_bytes(path.read_bytes().replace(b"__0_0.distcp", b"../0_0.distc"))
    source = open_source(tmp_path / "d")
    with pytest.raises(ManifestError, match=r"names '\.\./0_0"):
        dict(source.tensors(["w"]))


@pytest.mark.parametrize("value", [Evil(), Path("x")])
def test_a_torch_file_that_needs_pickle_is_refused(value, tmp_path):
    torch.save({"w": torch.zeros(2), "odd": value}, tmp_path / "x.pt")
    with pytest.raises(InvalidRequestError, match=r"which is not unpickled: .*(system|Posix)"):
        open_source(tmp_path / "x.pt")


def header(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no header length"),
        ((1 << 60).to_bytes(8, "little"), "exceeds"),
        (header("[]"), "not a JSON object"),
        (header('{"a":1}'), "no description"),
        (header('{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,2]}}', b"ab"), "has 2 bytes"),
        (header('{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}', b"abc"), "hole"),
        (header('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"abc"), "end at byte 2"),
        (header('{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"a"), "end at byte 2"),
        (header('{"a":1,"a":2}'), "stands twice"),
        (
            header(f'{{"a":{{"dtype":"U8","shape":[0,{1 << 62},2],"data_offsets":[0,0]}}}}'),
            "no memory can have",
        ),
    ],
)
def test_a_broken_safetensors_file_is_refused_with_its_rule(content, reason, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(ManifestError, match=reason):
        open_source(tmp_path / "x.safetensors")


def test_a_dtype_of_the_future_is_named(tmp_path):
    text = '{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    (tmp_path / "x.safetensors").write_bytes(header(text, b"a"))
    with pytest.raises(UnsupportedFormatError, match="'a' is F4"):
        open_source(tmp_path / "x.safetensors")


def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"w": "../../secret.safetensors"}}'
    )
    with pytest.raises(ManifestError, match="no file beside it"):
        open_source(tmp_path)


def test_an_import_never_mixes_with_what_was_trained_here(folder, store, tensors, tmp_path):
    """Its generation is 0: a restore of the job's own would have passed it by."""
    with pytest.raises(PreconditionError, match="another --job"):
        place_for(store, "team/gpt", 99)
    torch.save(tensors, tmp_path / "x.pt")
    first = place_for(store, "new", 1)
    write_checkpoint(store, open_source(tmp_path / "x.pt"), job="new", checkpoint=first)
    with pytest.raises(AlreadyExistsError, match="another --step"):
        place_for(store, "new", 1)

    assert first.run == place_for(store, "new", 2).run


def test_a_selection_of_nothing_is_refused(reader):
    with pytest.raises(NotFoundError, match="'mod'"):
        Chosen(reader, Selection(only=("mod",)))
