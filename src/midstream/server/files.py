"""Files that keys send: under names of our own in one folder, counted as they arrive, and kept whole or not at all."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

from .errors import ApiError, StorageFullError

_NAME: Final = re.compile(r"file-[0-9a-f]{8,64}")


class Files:
    """The contents, by ids of ours."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in directory.glob(".arriving-*"):  # of a server that was killed
            left.unlink(missing_ok=True)

    def path(self, file_id: str) -> Path:
        """Where a file is: the only way from an id to a path."""
        if _NAME.fullmatch(file_id) is None:
            raise ApiError(404, f"no file {file_id!r:.60}")
        return self.directory / file_id

    @contextmanager
    def arriving(self, room: int) -> Iterator[Arriving]:
        """A file of at most `room` bytes that is written; nothing is left of it unless it is kept."""
        with full_disk(), NamedTemporaryFile(dir=self.directory, prefix=".arriving-") as file:
            yield Arriving(self, Path(file.name), file, room)

    def delete(self, file_id: str) -> None:
        """Remove a content."""
        self.path(file_id).unlink(missing_ok=True)


class Arriving:
    """One file while it is written."""

    def __init__(self, files: Files, path: Path, stream: object, room: int) -> None:
        self._files, self._path, self._stream, self._room = files, path, stream, room
        self._hash = sha256()
        self.bytes = 0

    def take(self, piece: bytes) -> None:
        """More of it; 413 past its room."""
        self.bytes += len(piece)
        if self.bytes > self._room:
            raise ApiError(413, f"the file has more than {self._room:,} bytes, which may be kept: delete others")
        with full_disk():
            self._stream.write(piece)  # pyright: ignore[reportAttributeAccessIssue]
        self._hash.update(piece)

    @property
    def sha256(self) -> str:
        """Of what has come."""
        return self._hash.hexdigest()

    def keep(self, file_id: str) -> None:
        """It is whole: on the disk, under its name."""
        with full_disk():
            self._stream.flush()  # pyright: ignore[reportAttributeAccessIssue]
            os.fsync(self._stream.fileno())  # pyright: ignore[reportAttributeAccessIssue]
            os.link(self._path, self._files.path(file_id))


@contextmanager
def full_disk() -> Iterator[None]:
    """A disk without room, said as such."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFullError from error
        raise
