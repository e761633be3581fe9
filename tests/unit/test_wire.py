"""Tensors in JSON: bit-exact both ways, and every malformed object is refused before it costs memory."""

from __future__ import annotations

import base64
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from midstream.core.errors import SpecError
from midstream.formats.wire import WireTensor, decode_tensor, encode_tensor
from unit.captures import bits

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits of any type, in any shape, seen through any strides."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = int(np.prod(shape, dtype=int))
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        raw = bytes(byte % 2 for byte in raw)
    tensor = torch.frombuffer(bytearray(raw), dtype=dtype) if count else torch.empty(0, dtype=dtype)
    tensor = tensor.reshape(shape)
    if tensor.ndim and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    if tensor.ndim and draw(st.booleans()):
        tensor = tensor[:: draw(st.integers(1, 3))]
    if tensor.ndim and draw(st.booleans()):
        tensor = tensor[..., :1].expand(*tensor.shape[:-1], 3 if tensor.shape[-1] else 0)
    return tensor


@given(tensors())
def test_round_trip_keeps_every_bit(tensor: Tensor) -> None:
    sent = json.loads(json.dumps(encode_tensor(tensor)))
    back = decode_tensor(sent)
    assert bits(back) == bits(tensor)
    assert back.is_contiguous()
    back.zero_()  # ordinary memory of its own
    assert bits(decode_tensor(sent)) == bits(tensor)


@given(tensors())
def test_the_frame_is_what_the_format_says(tensor: Tensor) -> None:
    """A reader that knows the format alone, with NumPy and zstandard, gets the numbers."""
    sent = encode_tensor(tensor)
    frame = base64.b64decode(sent["data"])
    content = zstandard.ZstdDecompressor().decompress(frame)
    assert zstandard.frame_content_size(frame) == len(content) == tensor.numel() * tensor.dtype.itemsize
    array = np.frombuffer(content, np.dtype(sent["dtype"]).newbyteorder("<")).reshape(sent["shape"])
    assert sent["original_dtype"] == str(tensor.dtype)
    assert sent["dtype"] == ("int16" if tensor.dtype == torch.bfloat16 else sent["original_dtype"][6:])
    assert array.tobytes() == bits(tensor)[2]


def test_special_values_survive() -> None:
    odd = torch.tensor([0x7FC1, -0x8000, -1, 0x7F80], dtype=torch.int16).view(torch.bfloat16)  # NaN, −0, NaN, inf
    assert bits(decode_tensor(encode_tensor(odd))) == bits(odd)


def test_a_tensor_that_wants_a_gradient_travels() -> None:
    back = decode_tensor(encode_tensor(torch.ones(2, requires_grad=True)))
    assert back.tolist() == [1, 1]
    assert not back.requires_grad


def test_decoded_in_inference_mode_is_still_ordinary() -> None:
    sent = encode_tensor(torch.ones(2))
    with torch.inference_mode():
        back = decode_tensor(sent)
    assert not back.is_inference()


def test_uncompressed_and_implied_dtype() -> None:
    raw = base64.b64encode(np.array([1.5, 2.5], np.float32).tobytes()).decode()
    assert decode_tensor({"data": raw, "dtype": "float32", "shape": [2]}).tolist() == [1.5, 2.5]
    assert decode_tensor({"data": raw, "dtype": "float32", "shape": [2], "compression": None}).tolist() == [1.5, 2.5]


def test_a_validated_model_is_taken() -> None:
    wire = WireTensor.of(encode_tensor(torch.arange(3)))
    assert decode_tensor(wire).tolist() == [0, 1, 2]


def frame(content: bytes) -> str:
    return base64.b64encode(zstandard.ZstdCompressor().compress(content)).decode()


def streamed(content: bytes) -> str:
    stream = zstandard.ZstdCompressor().compressobj()
    return base64.b64encode(stream.compress(content) + stream.flush()).decode()


def two_frames(content: bytes) -> str:
    one = zstandard.ZstdCompressor().compress(content)
    return base64.b64encode(one + one).decode()


def cut(content: bytes) -> str:
    return base64.b64encode(zstandard.ZstdCompressor(level=1).compress(content)[:-2]).decode()


EIGHT = np.arange(2, dtype=np.float32).tobytes()


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"data": frame(EIGHT + b"x")}, "ops[0].vector.data", "declares 9 bytes; the shape takes 8"),
        ({"data": frame(EIGHT[:-1])}, "ops[0].vector.data", "declares 7 bytes"),
        ({"data": streamed(EIGHT)}, "ops[0].vector.data", "does not declare its size"),
        ({"data": two_frames(EIGHT)}, "ops[0].vector.data", "not one zstd frame"),
        ({"data": cut(EIGHT)}, "ops[0].vector.data", "not one zstd frame"),
        ({"data": base64.b64encode(EIGHT).decode()}, "ops[0].vector.data", "not one zstd frame"),
        ({"data": ""}, "ops[0].vector.data", "not one zstd frame"),
        ({"data": "?" + frame(EIGHT)}, "ops[0].vector.data", "not base64"),
        ({"data": "é" * 8}, "ops[0].vector.data", "not base64"),
        ({"data": frame(EIGHT)[:-1]}, "ops[0].vector.data", "not base64"),
        ({"data": 7}, "ops[0].vector.data", "string"),
        ({"data": base64.b64encode(EIGHT[1:]).decode(), "compression": None}, "ops[0].vector.data", "holds 7 bytes"),
        ({"compression": "gzip"}, "ops[0].vector.compression", "there are: zstd, null"),
        ({"dtype": "float8_e4m3fn"}, "ops[0].vector.dtype", "there are: float16, int16, float32"),
        ({"dtype": "bfloat16"}, "ops[0].vector.dtype", "no dtype"),
        ({"dtype": "object"}, "ops[0].vector.dtype", "no dtype"),
        ({"original_dtype": "torch.complex64"}, "ops[0].vector.original_dtype", "there are: torch.float16"),
        ({"original_dtype": "torch.bfloat16"}, "ops[0].vector.original_dtype", "travels as int16, not as float32"),
        ({"dtype": "int16"}, "ops[0].vector.original_dtype", "travels as float32"),
        ({"shape": [-2]}, "ops[0].vector.shape[0]", "greater than or equal to 0"),
        ({"shape": [2.0]}, "ops[0].vector.shape[0]", "integer"),
        ({"shape": [True, 2]}, "ops[0].vector.shape[0]", "not bool"),
        ({"shape": [1 << 70]}, "ops[0].vector.shape[0]", "too large"),
        ({"shape": [0, 1 << 62, 1 << 62]}, "ops[0].vector.shape", "no tensor has the shape"),
        ({"shape": [1] * 65}, "ops[0].vector.shape", "no tensor has the shape"),
        ({"shape": [1 << 40]}, "ops[0].vector.shape", "at most"),
        ({"shape": "22"}, "ops[0].vector.shape", "tuple"),
        ({"shape": [3]}, "ops[0].vector.data", "the shape takes 12"),
    ],
)
def test_refused_with_the_path_of_the_caller(change: dict[str, Any], path: str, words: str) -> None:
    good = {"data": frame(EIGHT), "dtype": "float32", "original_dtype": "torch.float32", "shape": [2]}
    with pytest.raises(SpecError) as caught:
        decode_tensor(good | {"compression": "zstd"} | change, "ops[0].vector")
    assert caught.value.code == "E_BAD_PARAM"
    assert caught.value.path == path
    assert words in caught.value.message
    assert "\n" not in str(caught.value)


def test_unknown_and_missing_fields_and_non_objects() -> None:
    good = encode_tensor(torch.ones(1))
    with pytest.raises(SpecError, match=r"E_UNKNOWN_FIELD at v\.handle"):
        decode_tensor(good | {"handle": "x"}, "v")
    with pytest.raises(SpecError, match=r"E_BAD_PARAM at v\.shape"):
        decode_tensor({name: value for name, value in good.items() if name != "shape"}, "v")
    with pytest.raises(SpecError, match="E_BAD_PARAM at v: "):
        decode_tensor("KLUv", "v")


def test_bool_bytes_are_0_or_1() -> None:
    with pytest.raises(SpecError, match="a bool is a byte 0 or 1"):
        decode_tensor({"data": frame(b"\x02"), "dtype": "bool", "shape": [1], "compression": "zstd"})


def test_a_type_that_does_not_travel() -> None:
    with pytest.raises(SpecError, match=r"E_BAD_PARAM at tensor.dtype: torch.complex64 does not travel"):
        encode_tensor(torch.zeros(1, dtype=torch.complex64))


@pytest.mark.parametrize("shape", [[2], [1 << 28]])
def test_a_bomb_does_not_expand(shape: list[int]) -> None:
    """A frame of a few kilobytes that holds a gigabyte: refused by its declared size, or by the bound."""
    size = 1 << 30
    stream = zstandard.ZstdCompressor(level=1).compressobj(size=size)
    block = bytes(1 << 24)
    bomb = b"".join(stream.compress(block) for _ in range(size >> 24)) + stream.flush()
    assert zstandard.frame_content_size(bomb) == size
    wire = {"data": base64.b64encode(bomb).decode(), "dtype": "float32", "shape": shape, "compression": "zstd"}
    tracemalloc.start()
    with pytest.raises(SpecError, match="E_BAD_PARAM"):
        decode_tensor(wire, max_bytes=1 << 24)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_frame_that_lies_about_its_size() -> None:
    """More content than declared: the decompressor stops at the declared size."""
    honest = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(range(200)) * 4))
    declared = zstandard.frame_content_size(bytes(honest))
    at = bytes(honest).index((declared - 256).to_bytes(2, "little"))
    honest[at : at + 2] = (400 - 256).to_bytes(2, "little")
    assert zstandard.frame_content_size(bytes(honest)) == 400
    data = base64.b64encode(bytes(honest)).decode()
    with pytest.raises(SpecError, match="not one zstd frame"):
        decode_tensor({"data": data, "dtype": "uint8", "shape": [400], "compression": "zstd"})
