"""Safetensors files as every format here writes and reads them: atomic writes, errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from midstream.core.errors import FileFormatError

from .atomic import replacing

HEADER_LIMIT: Final = 90_000_000
"""Bytes of text in a file: safetensors reads headers of up to 100 MB, with an entry for each tensor too."""

DTYPES: Final[dict[str, torch.dtype]] = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
"""The names that safetensors gives to the types which our formats hold."""


def write(
    path: str | PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], *, durable: bool = True
) -> Path:
    """Write named tensors and JSON texts (key → plain data) as one safetensors file, atomically.

    durable: wait until it is on the disk, as against a power cut.

    A view is written as what it shows, not as what it looks into. With one key, the same input gives the
    same bytes. Raises OSError (a full disk too) with the old file untouched, and FileFormatError when the
    texts are larger than a header may be.
    """
    texts = {key: json.dumps(value, separators=(",", ":"), allow_nan=False) for key, value in metadata.items()}
    size = sum(len(json.dumps(text)) for text in texts.values())
    if size > HEADER_LIMIT:
        raise FileFormatError(
            f"{path}: texts and token ids of {size / 1e6:.0f} MB, where a file holds {HEADER_LIMIT / 1e6:.0f}: "
            "save fewer prompts in one file"
        )
    with replacing(path, durable=durable) as temporary:
        try:
            save_file(_apart(tensors), temporary, texts)
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {_one_line(error)}") from None
    return Path(path)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors contiguous, on the CPU, and no two in one storage, which safetensors refuses."""
    apart: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage().data_ptr()
        apart[name] = plain.clone() if storage in storages else plain
        storages.add(storage)
    return apart


@contextmanager
def opened(path: str | PathLike[str], what: str) -> Iterator[Any]:
    """A safetensors file open for reading (safetensors' own handle); the errors say `what` it should be.

    Raises FileNotFoundError, IsADirectoryError, PermissionError, and FileFormatError for a file that is
    damaged or of another kind.
    """
    place = Path(path)
    if place.is_dir():
        raise IsADirectoryError(f"{path} is a directory: name {what} in it")
    if place.exists() and not place.is_file():
        raise FileFormatError(f"{path} is a device or a pipe, not {what}")
    try:
        # "mmap" opens the path twice, and mixes two files when a writer replaces it in between
        with safe_open(place, framework="pt", backend="pread") as file:
            yield file
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path}") from None
    except PermissionError:
        raise PermissionError(f"no right to read {path}") from None
    except SafetensorError as error:
        raise FileFormatError(f"{path} is not {what}, or is damaged: {_one_line(error)}") from None


def read_json(file: Any, key: str, path: str | PathLike[str]) -> dict[str, Any] | None:
    """The object under `key` in an opened file's metadata; None when the key is not there."""
    text = (file.metadata() or {}).get(key)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}: its {key!r} metadata is not JSON: {_one_line(error)}") from None
    if not isinstance(found, dict):
        raise FileFormatError(f"{path}: its {key!r} metadata is not an object")
    return found


def owned(file: Any, name: str) -> Tensor:
    """One tensor of an opened file, ordinary and in memory of its own: the file may change afterwards."""
    with torch.inference_mode(False):
        return file.get_tensor(name)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
