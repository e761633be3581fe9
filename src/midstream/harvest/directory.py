"""The directory of a harvest: who may write to it, what of it is whole, and how files come into it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final

from midstream.core.errors import BusyError, MidstreamError

from .manifest import MANIFEST, FileEntry

LOCK: Final = ".lock"
SHARDS: Final = "shards"
SAMPLES: Final = "samples.parquet"
_HASHERS: Final = 4


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """The directory for this process alone, made if need be; the lock ends with the process, however that ends.

    BusyError while another harvest runs in it; FileExistsError where it holds files that are no harvest's; OSError
    where it cannot be written.
    """
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file: name a directory")
    _check_ours(directory)
    directory.mkdir(parents=False, exist_ok=True)
    descriptor = os.open(directory / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"another harvest runs in {directory}: wait for it, or name another directory") from None
        (directory / SHARDS).mkdir(exist_ok=True)
        yield
    finally:
        os.close(descriptor)


def _check_ours(directory: Path) -> None:
    if directory.exists() and not (directory / MANIFEST).exists():
        strange = sorted(one.name for one in directory.iterdir() if not _may_be_ours(one))
        if strange:
            raise FileExistsError(
                f"{directory} holds {strange[0]} and no harvest: name a new directory, or an empty one"
            )


def _may_be_ours(path: Path) -> bool:
    """Whether a harvest that died before its first manifest may have left it."""
    return path.name in (LOCK, SHARDS) or path.name.startswith(".midstream-")


def shard_file(index: int) -> str:
    """The name of a shard's file in the directory.

    >>> shard_file(7)
    'shards/000007.safetensors'
    """
    return f"{SHARDS}/{index:06d}.safetensors"


def part_file(index: int) -> str:
    """The name of a shard's part of the sample table, which is there until the harvest is complete."""
    return f"{SHARDS}/{index:06d}.parquet"


def hashed(path: Path) -> str:
    """`sha256:` and the hash of a file's bytes."""
    digest = sha256()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(1 << 20)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return f"sha256:{digest.hexdigest()}"


def entry(directory: Path, name: str) -> FileEntry:
    """What a manifest says of a file that was just written."""
    path = directory / name
    return FileEntry(file=name, bytes=path.stat().st_size, sha256=hashed(path))


def whole(directory: Path, one: FileEntry, *, trust: bool) -> bool:
    """Whether a file is there, has its size and, unless `trust`, its hash."""
    path = directory / one.file
    if path.is_symlink():
        raise MidstreamError(f"{path} is a link: a harvest's files are its own")
    try:
        return path.stat().st_size == one.bytes and (trust or hashed(path) == one.sha256)
    except FileNotFoundError:
        return False


def damaged(directory: Path, files: Sequence[FileEntry], *, trust: bool) -> set[str]:
    """The names of files that are missing, of another size or, unless `trust`, of other bytes."""
    with ThreadPoolExecutor(_HASHERS, "midstream-hash") as pool:
        good = pool.map(lambda one: whole(directory, one, trust=trust), files)
        return {one.file for one, is_whole in zip(files, good, strict=True) if not is_whole}


def sweep(directory: Path, keep: Callable[[str], bool]) -> None:
    """Take away what died writers left: temporary files, and the shards' files that `keep` does not name."""
    for path in [*directory.iterdir(), *(directory / SHARDS).iterdir()]:
        name = str(path.relative_to(directory))
        left = path.name.startswith((".midstream-", ".tmp"))
        if left or (path.parent.name == SHARDS and not keep(name)):
            path.unlink()
