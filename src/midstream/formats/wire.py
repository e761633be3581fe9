"""Tensors in JSON, as vllm-lens encodes them (docs/formats.md).

`{"data": base64 of one zstd frame, "dtype": NumPy name, "original_dtype": "torch.…", "shape": […],
"compression": "zstd"}`: little-endian, C order, bfloat16 as int16 bits.
"""

from __future__ import annotations

import base64
import binascii
from math import prod
from typing import Annotated, Any, ClassVar, Final, Self

import numpy as np
import torch
import zstandard
from pydantic import Field, model_validator
from torch import Tensor

from midstream.core.errors import SpecError, choices
from midstream.core.wire import Int, Wire

MAX_BYTES: Final = 1 << 30
"""What `decode_tensor` expands to at most, unless the caller says otherwise."""

_STORED_AS: Final[dict[torch.dtype, str]] = {
    torch.float16: "float16",
    torch.bfloat16: "int16",  # NumPy has no bfloat16: its bits travel
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bool: "bool",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
}
_NAMED: Final = {str(dtype): dtype for dtype in _STORED_AS}
_LEVEL: Final = 1  # activations hardly compress; higher levels cost ten times the time for one percent
_MAX_DIMENSIONS: Final = 64  # torch's own limit


class TensorForm(Wire):
    """What the values of one tensor are: its type, its shape, and how its bytes are packed.

    `original_dtype` left out is the type that `dtype` names. `compression` null means plain bytes.
    """

    root: ClassVar[str] = "tensor"

    dtype: str
    original_dtype: str | None = None
    shape: tuple[Annotated[Int, Field(ge=0)], ...]
    compression: str | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.compression not in ("zstd", None):
            raise SpecError("E_BAD_PARAM", "compression", f"no compression {self.compression!r}; there are: zstd, null")
        names = tuple(dict.fromkeys(_STORED_AS.values()))
        if self.dtype not in names:
            raise SpecError("E_BAD_PARAM", "dtype", f"no dtype {self.dtype!r}; there are: {choices(names)}")
        original = self.original_dtype
        if original is not None and original not in _NAMED:
            message = f"no original_dtype {original!r}; there are: {choices(tuple(_NAMED))}"
            raise SpecError("E_BAD_PARAM", "original_dtype", message)
        if _STORED_AS[self.torch_dtype] != self.dtype:
            message = f"{original} travels as {_STORED_AS[self.torch_dtype]}, not as {self.dtype}"
            raise SpecError("E_BAD_PARAM", "original_dtype", message)
        if len(self.shape) > _MAX_DIMENSIONS or prod(max(size, 1) for size in self.shape) >= 1 << 59:
            raise SpecError("E_BAD_PARAM", "shape", f"no tensor has the shape {list(self.shape)!s:.80}")
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of the decoded tensor."""
        return _NAMED[self.original_dtype or f"torch.{self.dtype}"]

    @property
    def size_bytes(self) -> int:
        """Bytes of the decoded tensor."""
        return prod(self.shape) * self.torch_dtype.itemsize


class WireTensor(TensorForm):
    """The JSON object of one tensor, checked as far as that goes without touching the data."""

    data: str


def tensor_form(tensor: Tensor) -> dict[str, Any]:
    """The JSON object of a tensor without its data.

    Raises E_BAD_PARAM for a type that does not travel (complex, 8-bit floats).

    >>> tensor_form(torch.zeros(2, 3, dtype=torch.bfloat16))
    {'dtype': 'int16', 'original_dtype': 'torch.bfloat16', 'shape': [2, 3], 'compression': 'zstd'}
    """
    if tensor.dtype not in _STORED_AS:
        message = f"{tensor.dtype} does not travel; there are: {choices(tuple(_NAMED))}"
        raise SpecError("E_BAD_PARAM", "tensor.dtype", message)
    stored = _STORED_AS[tensor.dtype]
    return {
        "dtype": stored, "original_dtype": str(tensor.dtype), "shape": list(tensor.shape), "compression": "zstd",
    }  # fmt: skip


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The values of a tensor that travels, little-endian, C order; its own memory where it lies so."""
    plain = tensor.detach().cpu()
    if plain.dtype == torch.bfloat16:
        plain = plain.view(torch.int16)
    array = np.asarray(plain.numpy(), dtype=np.dtype(_STORED_AS[tensor.dtype]).newbyteorder("<"), order="C")
    return array.reshape(-1).view(np.uint8).data


def tensor_frame(tensor: Tensor) -> bytes:
    """The same as one zstd frame."""
    # one shot, so that the frame's header holds the content size: streamed frames break real clients
    return zstandard.ZstdCompressor(level=_LEVEL).compress(tensor_bytes(tensor))


def encode_tensor(tensor: Tensor) -> dict[str, Any]:
    """A tensor of any shape and strides, on any device, as its JSON object; every bit is kept.

    Raises E_BAD_PARAM for a type that does not travel (complex, 8-bit floats).

    >>> sorted(encode_tensor(torch.zeros(2, 3, dtype=torch.bfloat16)))
    ['compression', 'data', 'dtype', 'original_dtype', 'shape']
    """
    form = tensor_form(tensor)
    return {"data": base64.b64encode(tensor_frame(tensor)).decode("ascii"), **form}


def decode_tensor(obj: Any, path: str = "tensor", *, max_bytes: int = MAX_BYTES) -> Tensor:
    """The tensor of a JSON object (or WireTensor), in ordinary memory of its own.

    Raises `SpecError` E_BAD_PARAM (E_UNKNOWN_FIELD) below the JSON path `path`. Nothing is expanded before
    the size that the frame declares is known to be that of `shape`, and to be at most `max_bytes`.

    >>> decode_tensor(encode_tensor(torch.tensor([[1.0, -0.0]])))
    tensor([[1., -0.]])
    """
    wire = WireTensor.of(obj, path)
    if wire.size_bytes > max_bytes:
        raise SpecError("E_BAD_PARAM", f"{path}.shape", f"takes {wire.size_bytes} bytes; at most {max_bytes} are read")
    try:
        raw = base64.b64decode(wire.data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SpecError("E_BAD_PARAM", f"{path}.data", f"is not base64: {error}") from None
    if wire.compression == "zstd":
        raw = _expand(raw, wire.size_bytes, f"{path}.data")
    if len(raw) != wire.size_bytes:
        message = f"holds {len(raw)} bytes, and {wire.torch_dtype} {list(wire.shape)} takes {wire.size_bytes}"
        raise SpecError("E_BAD_PARAM", f"{path}.data", message)
    if wire.torch_dtype == torch.bool and np.frombuffer(raw, np.uint8).max(initial=0) > 1:
        raise SpecError("E_BAD_PARAM", f"{path}.data", "a bool is a byte 0 or 1")
    stored = np.dtype(wire.dtype)
    array = np.frombuffer(raw, stored.newbyteorder("<")).astype(stored)  # a copy: writable, and no one else's
    with torch.inference_mode(False):
        return torch.from_numpy(array).view(wire.torch_dtype).reshape(wire.shape)


def _expand(frame: bytes, nbytes: int, path: str) -> bytes:
    """The content of one zstd frame that declares `nbytes` of it, and is nothing else."""
    try:
        declared = zstandard.frame_content_size(frame)
        if declared == -1:
            raise SpecError("E_BAD_PARAM", path, "its zstd frame does not declare its size: compress it in one shot")
        if declared != nbytes:
            raise SpecError("E_BAD_PARAM", path, f"its zstd frame declares {declared} bytes; the shape takes {nbytes}")
        return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise SpecError("E_BAD_PARAM", path, f"is not one zstd frame: {error}") from None
