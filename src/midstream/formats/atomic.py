"""The one way in which a file is written: complete under a temporary name, flushed, then put in its place.

Whatever happens, a kill or a power cut too, a reader finds the old file or the new one, never a part. A
killed writer may leave a temporary file behind, named `.midstream-…` (ours) or `.tmp…` (safetensors').
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path


@contextmanager
def replacing(path: str | PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """A path in the directory of `path` to write to; when the block ends well, it takes the place of `path`.

    When the block fails, the temporary file vanishes and `path` is as it was. A link is followed, an existing
    file's permissions are kept. durable: wait for the disk; without, a power cut may take the file. Raises an
    OSError in one line, before the block runs, for a directory that is missing or not writable and for a `path` that
    is no ordinary file.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"{path} is a directory: name a file in it, e.g. {Path(path) / 'capture.safetensors'}")
    if target.exists() and not target.is_file():
        raise OSError(f"{path} is a device or a pipe: name an ordinary file")
    temporary = target.with_name(f".midstream-{secrets.token_hex(8)}.tmp")
    mode = _create(temporary, target)
    try:
        yield temporary
        _flush(temporary, mode, durable)  # the writer may have put a file of its own there, with other permissions
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        _flush(target.parent)  # the name is on the disk only now


def _create(temporary: Path, target: Path) -> int:
    """Make the empty temporary file, and say which permissions the finished one shall have."""
    directory = target.parent
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileNotFoundError:
        raise FileNotFoundError(f"no directory {directory}: make it, e.g. mkdir -p {directory}") from None
    except NotADirectoryError:
        raise NotADirectoryError(f"{directory} is not a directory: choose another path") from None
    except PermissionError:
        raise PermissionError(f"no right to write into {directory}: choose another path") from None
    try:
        known = os.stat(target) if target.exists() else os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return known.st_mode & 0o777


def _flush(path: Path, mode: int | None = None, durable: bool = True) -> None:
    """Wait until a file's bytes (and permissions `mode`), or a directory's names, are on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if mode is not None:
            raise
        return  # a directory that one may write into but not open
    try:
        if mode is not None:
            os.fchmod(descriptor, mode)
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
