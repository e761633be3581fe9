"""Where a harvest lies: a directory or an object store; who may write there, and what of it is whole."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from os import PathLike
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from midstream.core.errors import BusyError, MidstreamError

from .manifest import MANIFEST, FileEntry

LOCK: Final = ".lock"
SHARDS: Final = "shards"
SAMPLES: Final = "samples.parquet"
_HASHERS: Final = 4


class Place(Protocol):
    """Files by name below one root. Each appears whole or not at all."""

    def __str__(self) -> str: ...

    def locked(self) -> AbstractContextManager[None]:
        """The place for this run alone, made if need be.

        BusyError while another harvest runs there, FileExistsError where it holds files that are no harvest's.
        """
        ...

    def put(self, name: str, write: Callable[[Path], object]) -> FileEntry:
        """A file, which `write` writes atomically where it is told; and what a manifest says of it."""
        ...

    def fetch(self, name: str) -> Path:
        """A file of this machine with its bytes; FileNotFoundError."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        ...

    def hashed(self, name: str) -> str:
        """`sha256:` and the hash of a file's bytes."""
        ...

    def names(self) -> list[str]:
        """Every file below the root."""
        ...

    def remove(self, name: str) -> None:
        """Take a file away."""
        ...


def place_of(where: str | PathLike[str]) -> Place:
    """The place that a path names, or a URL that fsspec knows (`s3://bucket/acts`)."""
    if isinstance(where, str) and "://" in where and not where.startswith("file://"):
        from .object_place import ObjectPlace

        return ObjectPlace.of(where)
    return LocalPlace(Path(where.removeprefix("file://") if isinstance(where, str) else where))


@dataclass(frozen=True)
class LocalPlace:
    """A directory. Its lock is the kernel's, and ends with the process, however that ends."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    @contextmanager
    def locked(self) -> Generator[None]:
        """See Place; OSError where the directory cannot be written."""
        if self.root.exists() and not self.root.is_dir():
            raise NotADirectoryError(f"{self.root} is a file: name a directory")
        if self.root.exists() and not (self.root / MANIFEST).exists():
            check_ours(self, (one.name for one in self.root.iterdir()))
        self.root.mkdir(parents=False, exist_ok=True)
        descriptor = os.open(self.root / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise busy(self) from None
            (self.root / SHARDS).mkdir(exist_ok=True)
            yield
        finally:
            os.close(descriptor)

    def put(self, name: str, write: Callable[[Path], object]) -> FileEntry:
        """See Place."""
        write(self.root / name)
        return entry_of(self.root / name, name)

    def fetch(self, name: str) -> Path:
        """See Place."""
        path = self.root / name
        if path.is_symlink():
            raise MidstreamError(f"{path} is a link: a harvest's files are its own")
        return path

    def size(self, name: str) -> int | None:
        """See Place."""
        try:
            return self.fetch(name).stat().st_size
        except FileNotFoundError:
            return None

    def hashed(self, name: str) -> str:
        """See Place."""
        with self.fetch(name).open("rb") as file:
            return hash_of(file)

    def names(self) -> list[str]:
        """See Place."""
        found = [*self.root.iterdir(), *(self.root / SHARDS).iterdir()]
        return [str(path.relative_to(self.root)) for path in found if not path.is_dir()]

    def remove(self, name: str) -> None:
        """See Place."""
        (self.root / name).unlink()


def busy(place: Place) -> BusyError:
    """The error for a place where another harvest runs."""
    return BusyError(f"another harvest runs in {place}: wait for it, or name another directory")


def check_ours(place: Place, names: Iterable[str]) -> None:
    """FileExistsError where files lie that no harvest has left which died before its first manifest."""
    strange = sorted(one for one in names if one not in (LOCK, SHARDS) and not _temporary(one))
    if strange:
        raise FileExistsError(f"{place} holds {strange[0]} and no harvest: name a new directory, or an empty one")


def _temporary(name: str) -> bool:
    """Whether a writer that died has left a file (see formats.atomic)."""
    return name.rpartition("/")[2].startswith((".midstream-", ".tmp"))


def shard_file(index: int) -> str:
    """The name of a shard's file.

    >>> shard_file(7)
    'shards/000007.safetensors'
    """
    return f"{SHARDS}/{index:06d}.safetensors"


def part_file(index: int) -> str:
    """The name of a shard's part of the sample table, which is there until the harvest is complete."""
    return f"{SHARDS}/{index:06d}.parquet"


def hash_of(file: BinaryIO) -> str:
    """`sha256:` and the hash of what is left of an open file."""
    return f"sha256:{file_digest(file, 'sha256').hexdigest()}"  # pyright: ignore[reportArgumentType]


def entry_of(path: Path, name: str) -> FileEntry:
    """What a manifest says of a file that stands under `path`."""
    with path.open("rb") as file:
        return FileEntry(file=name, bytes=path.stat().st_size, sha256=hash_of(file))


def damaged(place: Place, files: Sequence[FileEntry], *, trust: bool) -> set[str]:
    """The names of files that are missing, of another size or, unless `trust`, of other bytes."""

    def whole(one: FileEntry) -> bool:
        return place.size(one.file) == one.bytes and (trust or place.hashed(one.file) == one.sha256)

    with ThreadPoolExecutor(_HASHERS, "midstream-hash") as pool:
        return {one.file for one, good in zip(files, pool.map(whole, files), strict=True) if not good}


def sweep(place: Place, keep: Callable[[str], bool]) -> None:
    """Take away what died writers left: temporary files, and the shards' files that `keep` does not name."""
    for name in place.names():
        if _temporary(name) or (name.startswith(f"{SHARDS}/") and not keep(name)):
            place.remove(name)
