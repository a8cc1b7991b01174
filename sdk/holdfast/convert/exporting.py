"""Writes a source as other tools' files; what appears under the final name is whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from holdfast.convert import dcp_files, safetensors_files, torch_files
from holdfast.convert.source import TensorSource
from holdfast.convert.staged import staged

FORMATS = ("safetensors", "hf", "dcp", "torch")


def export(
    source: TensorSource,
    dest: Path,
    form: str,
    *,
    force: bool = False,
    file_bytes_max: int | None = None,
    advance: Callable[[int], None] = lambda _bytes: None,
) -> list[Path]:
    """Write ``source`` to ``dest`` in one of ``FORMATS`` and return what is there now.

    A killed export leaves nothing under the final name.

    Args:
        source: What to write.
        dest: A file for ``safetensors`` and ``torch``, a folder for ``hf`` and ``dcp``.
        form: The format.
        force: Replace what is at ``dest``.
        file_bytes_max: How long a file of ``hf`` may be, unless one tensor is longer; None: 5 GB.
        advance: Called with the bytes of each tensor that has been written.

    Raises:
        AlreadyExistsError: ``dest`` is there and ``force`` is not set.
        ExhaustedError, AccessError, UnavailableError: ``dest`` cannot be written.
        CheckpointError: the source, while it is read.
    """
    if form == "safetensors":
        return _safetensors(source, dest, force, advance)
    with staged(dest, force=force) as path:
        if form == "hf":
            safetensors_files.write_folder(
                source, path, advance, file_bytes_max or safetensors_files.SHARD_BYTES_MAX
            )
        elif form == "dcp":
            dcp_files.write_folder(source, path, advance)
        else:
            torch_files.write_file(source, path, advance)
    return [dest]


def _safetensors(
    source: TensorSource, dest: Path, force: bool, advance: Callable[[int], None]
) -> list[Path]:
    beside = safetensors_files.state_path(dest)
    if not source.state():
        with staged(dest, force=force) as path:
            safetensors_files.write_file(source, path, source.specs(), advance)
        return [dest]
    # The state first: whoever finds the tensors finds it too.
    with ExitStack() as undo:
        with staged(dest, force=force) as path:
            with staged(beside, force=force) as other:
                safetensors_files.write_file(source, path, source.specs(), advance)
                safetensors_files.write_state(source, other)
            if not force:  # alone it would refuse the next export
                undo.callback(beside.unlink)
        undo.pop_all()
    return [dest, beside]
