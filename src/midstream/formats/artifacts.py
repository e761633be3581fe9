"""The registry: artifacts on disk, each in a file that is named by the hash of its bytes (core/artifacts.py).

The directory is the registry's own. `<64 hex digits>.safetensors` is an artifact; `.lock` is held by whoever
changes something, one at a time, so that the limit holds; readers need no lock, for files appear whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from os import PathLike
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, Final

import numpy as np
from safetensors import SafetensorError, deserialize

from midstream.core.artifacts import TENSOR_NAME, Artifact, Floats, artifact_bytes, as_artifact_id, finite_array
from midstream.core.cache import cache_dir
from midstream.core.errors import SpecError, spec_error
from midstream.core.narrow import is_int

from .atomic import replacing

MAX_BYTES: Final = 4 << 30
"""What a registry holds at most, unless its maker says otherwise."""

_FILE_NAME: Final = re.compile(r"[0-9a-f]{64}\.safetensors")
_HEADER_LIMIT: Final = 1 << 16  # bytes read for a listing: the header of one tensor has about a hundred
_LEFTOVER_AGE: Final = 3600.0  # seconds: where a network disk knows no locks, another host may still be writing
_FORM: Final = f"an artifact is a safetensors file with one float32 tensor named {TENSOR_NAME!r} and no metadata"


@dataclass(frozen=True)
class ArtifactEntry:
    """One artifact in a listing. bytes: its file's size. shape: None where the file's header is damaged."""

    id: str
    bytes: int
    shape: tuple[int, ...] | None


class ArtifactRegistry:
    """Artifacts in one directory (made by the first `put`), of at most `max_bytes` together.

    Every method takes an id only as `sha256:` and 64 hex digits; `path` is where the caller's own text names
    the artifact, for the error. Threads and processes may use one directory at the same time.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as directory:
    ...     registry = ArtifactRegistry(directory)
    ...     held = registry.put([0.0, 1.0])
    ...     held in registry, registry.get(held).array.tolist(), registry.entries()[0].shape
    (True, [0.0, 1.0], (2,))
    """

    def __init__(self, directory: str | PathLike[str], max_bytes: int = MAX_BYTES) -> None:
        if not is_int(max_bytes) or max_bytes < 1:
            raise spec_error("E_BAD_PARAM", "max_bytes", f"must be a number of bytes, 1 or more, got {max_bytes!r:.60}")
        self.directory: Final = Path(directory).absolute()  # the working directory may change
        self.max_bytes: Final = int(max_bytes)

    def __repr__(self) -> str:
        return f"ArtifactRegistry({str(self.directory)!r}, max_bytes={self.max_bytes})"

    # --- writing

    def put(self, value: Any, path: str = "") -> str:
        """Keep an artifact, or an array, a tensor or nested lists as one, and give its id; twice is once.

        An id, or an artifact without its array, must be held already (E_ARTIFACT_MISSING). Raises E_BAD_PARAM
        for what cannot be an artifact, E_ARTIFACT_HASH for an artifact that has another id than its array,
        E_SPEC_TOO_LARGE when the registry is full, and OSError when the disk refuses.
        """
        given = Artifact(as_artifact_id(value, path)) if isinstance(value, str) else value
        given_id, array = (given.given_id, given.array) if isinstance(given, Artifact) else (None, given)
        if array is None and given_id is not None:
            return self._held(given_id, path).id
        data = artifact_bytes(finite_array(array, path))
        artifact_id = _hash(data)
        if given_id is None or given_id == artifact_id:
            self._store(artifact_id, data, path)
            return artifact_id
        # one tensor has several files, hence ids, where another program writes a header in another way
        held = self._held(given_id, path).array
        if held is None or artifact_bytes(held) != data:
            raise spec_error("E_ARTIFACT_HASH", path, f"{given_id} is the id of another array: put the array alone")
        return given_id

    def put_bytes(self, artifact_id: str, data: bytes, path: str = "") -> str:
        """Keep the file of an artifact under the id that it came with, and give the id.

        Raises E_ARTIFACT_HASH when the bytes are not those of the id, and E_BAD_PARAM when they are no
        artifact: anything but a safetensors file with one finite float32 tensor named `tensor`, no metadata.
        """
        as_artifact_id(artifact_id, path)
        if (found := _hash(data)) != artifact_id:
            message = f"the {len(data)} bytes for {artifact_id} have the id {found}: send them again, whole"
            raise spec_error("E_ARTIFACT_HASH", path, message)
        _parse(data, path)
        self._store(artifact_id, data, path)
        return artifact_id

    def receiving(self, artifact_id: str, path: str = "") -> Upload:
        """What takes the file of an artifact piece by piece, counted against the limit as they come."""
        as_artifact_id(artifact_id, path)
        with self._writing():
            used = sum(_size(other) for other in self._files() if other != self._file(artifact_id, path))
        return Upload(self, artifact_id, path, self.max_bytes - used)

    def delete(self, artifact_id: str, path: str = "") -> None:
        """Remove an artifact, whole or damaged; E_ARTIFACT_MISSING when it is not held."""
        file = self._file(artifact_id, path)
        if not file.is_file():  # and make no directory for its sake
            raise _missing(artifact_id, path)
        with self._writing():
            try:
                file.unlink()
            except FileNotFoundError:
                raise _missing(artifact_id, path) from None

    def _store(self, artifact_id: str, data: bytes, path: str) -> None:
        file = self._file(artifact_id, path)
        with self._writing():
            if file.is_file() and _hash(file.read_bytes()) == artifact_id:
                return
            used = sum(_size(other) for other in self._files() if other != file)  # a damaged file is replaced
            if used + len(data) > self.max_bytes:
                message = (
                    f"{artifact_id} needs {len(data)} bytes, and {used} of the registry's {self.max_bytes} are used: "
                    "free some with delete(id), entries() lists them, or give a larger max_bytes"
                )
                raise spec_error("E_SPEC_TOO_LARGE", path, message)
            with replacing(file) as temporary:
                temporary.write_bytes(data)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """The directory, made if missing, for one writer at a time; what killed ones left there is removed."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = (self.directory / ".lock").open("ab")
        except (FileExistsError, NotADirectoryError):
            message = f"{self.directory} is not a directory: choose another for the artifacts"
            raise NotADirectoryError(message) from None
        except PermissionError:
            message = f"no right to write into {self.directory}: choose another directory for the artifacts"
            raise PermissionError(message) from None
        with lock:  # closing it lets go of it
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in self.directory.glob(".midstream-*.tmp"):
                with suppress(FileNotFoundError):
                    if time.time() - leftover.stat().st_mtime > _LEFTOVER_AGE:
                        leftover.unlink()
            yield

    # --- reading

    def get(self, artifact_id: str, path: str = "") -> Artifact:
        """The artifact with its array, read-only; hash and form are checked at every read.

        Raises E_ARTIFACT_MISSING when it is not held, E_ARTIFACT_HASH when its file was altered, and
        E_BAD_PARAM when what was put there by other means is no artifact.
        """
        return self._held(as_artifact_id(artifact_id, path), path)

    def get_bytes(self, artifact_id: str, path: str = "") -> bytes:
        """The artifact's file, whose hash is checked; raises what `get` raises."""
        try:
            data = self._file(artifact_id, path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise _missing(artifact_id, path) from None
        if (found := _hash(data)) != artifact_id:
            message = f"the file of {artifact_id} was altered, it is {found} now: put the artifact again, or delete it"
            raise spec_error("E_ARTIFACT_HASH", path, message)
        return data

    def __contains__(self, artifact: object) -> bool:
        """Whether there is a file for an id or an artifact; `get` says whether it is whole."""
        try:
            return self._file(artifact.id if isinstance(artifact, Artifact) else artifact).is_file()
        except SpecError:
            return False

    def ids(self) -> tuple[str, ...]:
        """The ids of what is held, sorted."""
        return tuple(f"sha256:{file.stem}" for file in self._files())

    def entries(self) -> tuple[ArtifactEntry, ...]:
        """What is held, sorted by id, from the files' names and headers: `get` says whether one is whole."""
        found: list[ArtifactEntry] = []
        for file in self._files():
            with suppress(FileNotFoundError), file.open("rb") as stream:  # another may just have deleted it
                found.append(ArtifactEntry(f"sha256:{file.stem}", os.fstat(stream.fileno()).st_size, _shape(stream)))
        return tuple(found)

    def file_of(self, artifact: Artifact) -> bytes:
        """The file of an artifact: made of its array, or that which came under its id."""
        data = b"" if artifact.array is None else artifact_bytes(artifact.array)
        return data if _hash(data) == artifact.id else self.get_bytes(artifact.id)

    def used_bytes(self) -> int:
        """What `max_bytes` bounds: the bytes of all artifacts together."""
        return sum(_size(file) for file in self._files())

    def _held(self, artifact_id: str, path: str) -> Artifact:
        return Artifact(artifact_id, _parse(self.get_bytes(artifact_id, path), path))

    def _file(self, artifact_id: Any, path: str = "") -> Path:
        """The only way from an id to a path: nothing but hex digits comes through."""
        return self.directory / f"{as_artifact_id(artifact_id, path).removeprefix('sha256:')}.safetensors"

    def _files(self) -> list[Path]:
        try:
            named = [file for file in self.directory.iterdir() if _FILE_NAME.fullmatch(file.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(file for file in named if file.is_file())


class Upload:
    """The file of an artifact as it arrives, under no name until it is kept; a context manager that leaves nothing."""

    def __init__(self, registry: ArtifactRegistry, artifact_id: str, path: str, room: int) -> None:
        self._registry, self._id, self._path, self._room = registry, artifact_id, path, room
        self._received = 0
        self._file = NamedTemporaryFile(dir=registry.directory, prefix=".midstream-", suffix=".tmp")  # noqa: SIM115

    def take(self, piece: bytes) -> None:
        """More of it; E_SPEC_TOO_LARGE where there is no room."""
        self._received += len(piece)
        if self._received > self._room:
            message = f"{self._id} has more than {self._room} bytes, which are left: delete others"
            raise spec_error("E_SPEC_TOO_LARGE", self._path, message)
        self._file.write(piece)

    def keep(self) -> None:
        """It is whole: keep it, as `put_bytes` does."""
        self._file.flush()
        self._registry.put_bytes(self._id, Path(self._file.name).read_bytes(), self._path)

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def default_registry() -> ArtifactRegistry:
    """The registry in the user's cache of midstream."""
    return ArtifactRegistry(cache_dir() / "artifacts")


def _hash(data: bytes) -> str:
    return f"sha256:{sha256(data).hexdigest()}"


def _missing(artifact_id: str, path: str) -> SpecError:
    message = f"no artifact {artifact_id} here: put its array first, or give the tensor itself in place of the id"
    return spec_error("E_ARTIFACT_MISSING", path, message)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # deleted since it was listed
        return 0


def _parse(data: bytes, path: str) -> Floats:
    """The array in an artifact's file, or E_BAD_PARAM."""
    try:
        tensors = deserialize(data)
    except SafetensorError as error:
        message = f"{_FORM}; these bytes are none: {' '.join(str(error).split())}"
        raise spec_error("E_BAD_PARAM", path, message) from None
    # deserialize passes over metadata; it has checked that the header is an object of JSON
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    if list(header) != [TENSOR_NAME]:
        raise spec_error("E_BAD_PARAM", path, f"{_FORM}; this one has {', '.join(map(repr, header)) or 'none'!s:.120}")
    one: dict[str, Any] = tensors[0][1]
    if one["dtype"] != "F32":
        raise spec_error("E_BAD_PARAM", path, f"{_FORM}; this one's is of type {one['dtype']}")
    try:
        array = np.frombuffer(one["data"], dtype="<f4").reshape(one["shape"])
    except ValueError:  # NumPy knows 64 dimensions
        raise spec_error("E_BAD_PARAM", path, f"no array has the shape {one['shape']!s:.80}") from None
    return finite_array(array, path)


def _shape(stream: BinaryIO) -> tuple[int, ...] | None:
    """The shape that an artifact's header names, or None; the data is not read."""
    length = int.from_bytes(stream.read(8), "little")
    try:
        header = json.loads(stream.read(min(length, _HEADER_LIMIT)))
        return tuple(int(size) for size in header[TENSOR_NAME]["shape"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
