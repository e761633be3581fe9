"""Steering-vector files: the same bits back in each format, other programs read them, and what is odd is refused."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import BaseModel
from safetensors import safe_open
from safetensors.torch import save_file

from midstream.core.errors import FileFormatError, SpecError, UnsupportedOperationError
from midstream.formats import vectors as module
from midstream.formats.vectors import VectorFile, read_vectors, write_vectors
from midstream.formats.wire import encode_tensor
from unit.captures import made as made_capture

SUFFIXES = (".safetensors", ".gguf", ".json")
PROVENANCE = {"method": "difference in means", "model": "m", "quality": {"auc": 0.5}, "prompts": ["a", "ü"], "n": None}
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@st.composite
def layered(draw: st.DrawFn) -> dict[int, np.ndarray[Any, Any]]:
    """Any finite float32 numbers, −0 and denormal ones too, of one width, for layers in any order."""
    width = draw(st.integers(1, 5))
    layers = draw(st.lists(st.integers(1, 99_999), min_size=1, max_size=4, unique=True))
    return {layer: draw(arrays(np.float32, width, elements=FINITE)) for layer in layers}


def bits(vectors: Any) -> dict[int, tuple[np.dtype[Any], tuple[int, ...], bytes]]:
    return {layer: (array.dtype, array.shape, array.tobytes()) for layer, array in vectors.items()}


def vectors(layers: tuple[int, ...] = (3, 7), width: int = 4) -> dict[int, np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    return {layer: generator.standard_normal(width).astype(np.float32) for layer in layers}


def unreadable(path: Path, *expected: str, kind: type[Exception] = FileFormatError) -> None:
    with pytest.raises(kind) as caught:
        read_vectors(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))
    for part in (str(path), *expected):
        assert part in message


def unwritable(code: str, *given: Any, **named: Any) -> str:
    with pytest.raises(SpecError) as caught:
        write_vectors(*given, **named)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- round trips


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(deadline=None, max_examples=25)
@given(layered(), st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), JSON, max_size=3))
def test_the_same_bits_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    suffix: str,
    given_vectors: dict[int, np.ndarray[Any, Any]],
    provenance: dict[str, Any],
) -> None:
    path = tmp_path_factory.mktemp("vectors") / f"v{suffix}"
    assert write_vectors(path, given_vectors, provenance) == path
    back = read_vectors(path)
    assert bits(back.vectors) == bits(given_vectors)
    assert back.layers == tuple(back.vectors) == tuple(sorted(given_vectors))
    assert back.provenance == provenance
    assert back.site == "resid_post"
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    first = path.read_bytes()
    write_vectors(path, back.vectors, back.provenance)
    assert path.read_bytes() == first


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_from_format_to_format(tmp_path: Path, suffix: str) -> None:
    start = write_vectors(tmp_path / "a.safetensors", vectors(), PROVENANCE)
    one = read_vectors(start)
    other = read_vectors(write_vectors(tmp_path / f"b{suffix}", one.vectors, one.provenance, site=one.site))
    assert bits(other.vectors) == bits(vectors())
    assert other.provenance == PROVENANCE
    assert other.width == 4
    assert not any(array.flags.writeable for array in other.vectors.values())


def test_the_first_bytes_say_the_format(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        path = write_vectors(tmp_path / f"a{suffix}", vectors(), PROVENANCE)
        assert bits(read_vectors(path.rename(tmp_path / "renamed")).vectors) == bits(vectors())


@pytest.mark.parametrize("site", ["resid_pre", "attn_out", "mlp_out", "head_out"])
def test_other_sites(tmp_path: Path, site: str) -> None:
    assert read_vectors(write_vectors(tmp_path / "a.safetensors", vectors(), site=site)).site == site
    for suffix in (".gguf", ".json"):
        assert ".safetensors" in unwritable("E_SITE", tmp_path / f"a{suffix}", vectors(), site=site)
    with pytest.raises(UnsupportedOperationError, match="resid_post"):
        write_vectors(tmp_path / "a.safetensors", vectors(), site="residual")
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


def test_layer_0(tmp_path: Path) -> None:
    for suffix in (".safetensors", ".json"):
        assert read_vectors(write_vectors(tmp_path / f"a{suffix}", vectors((0,)))).layers == (0,)
    assert "llama.cpp" in unwritable("E_LAYER_RANGE", tmp_path / "a.gguf", vectors((0, 1)))
    assert not (tmp_path / "a.gguf").exists()


def test_what_may_be_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    given_vectors = {np.int64(2): torch.tensor([1, 2], dtype=torch.bfloat16), 1: [3, 4.5]}
    back = read_vectors(write_vectors(path, given_vectors))
    assert {layer: array.tolist() for layer, array in back.vectors.items()} == {1: [3, 4.5], 2: [1, 2]}
    assert back.provenance == {}


def test_what_may_not(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    one = [1.0, 2.0]
    for nothing in ({}, None, [one], "sha256:"):
        assert "at vectors: " in unwritable("E_BAD_PARAM", path, nothing)
    for layer in (-1, True, 1.0, "1", None, 100_000):
        unwritable("E_LAYER_RANGE", path, {layer: one})
    for vector in ([], 1.0, [[1.0]], [float("nan")], [1e39], "no", [[1.0], []], {}):
        assert "at vectors[4]: " in unwritable("E_BAD_PARAM", path, {3: one, 4: vector})
    assert "vectors[3] 2" in unwritable("E_BAD_PARAM", path, {3: one, 4: [1.0]})
    for provenance in ({1: 2}, {"a": float("nan")}, {"a": (1,)}, {"a": np.float32(1)}, [1], "text", {"a": {1}}):
        assert "at provenance: " in unwritable("E_BAD_PARAM", path, {3: one}, provenance)
    for name in ("a", "a.pt", "a.npz", ".gguf"):
        assert ".safetensors, .gguf, .json" in unwritable("E_BAD_PARAM", tmp_path / name, {3: one})
    assert path.read_bytes() == b"old"
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    path = write_vectors(tmp_path / f"a{suffix}", vectors())
    old = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    monkeypatch.setattr("midstream.formats.tensor_file.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_vectors(path, vectors((1,)))
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


# --- as others read them


def test_a_reader_of_safetensors(tmp_path: Path) -> None:
    write_vectors(tmp_path / "a.safetensors", vectors(), PROVENANCE, site="mlp_out")
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        assert bits({int(name[6:]): file.get_tensor(name) for name in file.keys()}) == bits(vectors())  # noqa: SIM118
        about = json.loads(file.metadata()["midstream"])
    assert about == {"format": "vectors", "version": 1, "site": "mlp_out", "provenance": PROVENANCE}


@pytest.mark.parametrize("model_type", ["llama", None, 7, ""])
def test_a_reader_of_gguf(tmp_path: Path, model_type: Any) -> None:
    """As repeng and llama.cpp read it: the architecture, a hint of any text, F32 of one dimension, no layer 0."""
    path = write_vectors(tmp_path / "a.gguf", vectors(), {"model_type": model_type})
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == "controlvector"
    hint = model_type if isinstance(model_type, str) and model_type else "unknown"
    assert reader.fields["controlvector.model_hint"].contents() == hint
    assert reader.fields["controlvector.layer_count"].contents() == 2
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {"F32"}
    assert bits({int(tensor.name.split(".")[1]): np.array(tensor.data) for tensor in reader.tensors}) == bits(vectors())


class SteeringVector(BaseModel):
    """The fields of vllm-lens' class; like it, this one passes over fields that it does not know."""

    activations: dict[str, Any]
    layer_indices: list[int]
    scale: float = 1.0
    norm_match: bool = False
    position_indices: list[int] | None = None


def test_a_reader_of_vllm_lens(tmp_path: Path) -> None:
    path = write_vectors(tmp_path / "a.json", vectors((7, 3)), PROVENANCE)
    one = SteeringVector.model_validate_json(path.read_text())
    assert (one.layer_indices, one.scale, one.norm_match, one.position_indices) == ([3, 7], 1.0, False, None)
    assert one.activations["shape"] == [2, 4]
    assert one.activations["original_dtype"] == "torch.float32"


# --- safetensors of others


@pytest.mark.parametrize("form", ["layer.{}", "direction.{}", "{}"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_files_of_others(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    path = tmp_path / "a.safetensors"
    save_file({form.format(n): torch.tensor([n, -0.5]).to(dtype) for n in (11, 2)}, path, {"made": "by hand"})
    back = read_vectors(path)
    assert {layer: array.tolist() for layer, array in back.vectors.items()} == {2: [2, -0.5], 11: [11, -0.5]}
    assert {array.dtype for array in back.vectors.values()} == {np.dtype(np.float32)}
    assert (back.provenance, back.site) == ({"made": "by hand"}, "resid_post")


ROW = torch.tensor([1.0, 2.0])
ABOUT = {"format": "vectors", "version": 1, "site": "resid_post", "provenance": {}}
ODD_TENSORS: dict[str, tuple[dict[str, torch.Tensor], Any, tuple[str, ...]]] = {
    "none": ({}, None, ("no tensor", "layer.<n>")),
    "none in ours": ({}, ABOUT, ("no tensor", "layer.<n>")),
    "one without a layer": ({"vector": ROW}, None, ("'vector'", "layer.<n>, direction.<n>, <n>")),
    "an artifact": ({"tensor": ROW}, None, ("'tensor'",)),
    "two forms": ({"direction.1": ROW, "2": ROW.clone()}, None, ("'2', 'direction.1'", "one way")),
    "one that is none": ({"direction.1": ROW, "bias": ROW.clone()}, None, ("has 'bias'",)),
    "a model": ({f"model.{n}.weight": ROW.clone() for n in range(9)}, None, ("and others, 9 in all",)),
    "two spellings": ({"layer.1": ROW, "layer.01": ROW.clone()}, None, ("'layer.01'",)),
    "negative": ({"layer.-1": ROW}, None, ("'layer.-1'",)),
    "too deep": ({f"layer.{'9' * 6}": ROW}, None, ("'layer.999999'",)),
    "digits of others": ({"layer.٣": ROW}, None, ("'layer.٣'",)),
    "another form in ours": ({"direction.1": ROW}, ABOUT, ("'direction.1'", "layer.<n>")),
    "not finite": ({"layer.1": ROW, "layer.2": torch.tensor([1.0, torch.nan])}, ABOUT, ("layer.2", "finite")),
    "infinite": ({"5": torch.tensor([torch.inf])}, None, (": 5: ", "finite")),
    "too large": ({"5": torch.tensor([1e300], dtype=torch.float64)}, None, (": 5: ", "finite")),
    "empty": ({"layer.1": torch.empty(0)}, ABOUT, ("layer.1", "empty")),
    "a matrix": ({"layer.1": torch.ones(1, 2)}, ABOUT, ("layer.1", "[1, 2]", "[hidden]")),
    "a number": ({"layer.1": torch.tensor(1.0)}, ABOUT, ("layer.1", "[]", "[hidden]")),
    "mixed widths": ({"layer.1": ROW, "layer.3": torch.ones(3)}, ABOUT, ("layer.3", "3 wide", "layer.1 2")),
    "halves in ours": ({"layer.1": ROW.half()}, ABOUT, ("layer.1", "F16", "F32")),
    "integers": ({"layer.1": ROW.long()}, None, ("layer.1", "I64", "BF16")),
    "a newer version": ({"layer.1": ROW}, {**ABOUT, "version": 2}, ("version 2", "install a newer midstream")),
    "no version": ({"layer.1": ROW}, {"format": "vectors"}, ("version None",)),
    "another format": ({"layer.1": ROW}, {**ABOUT, "format": "probe"}, ("not a steering-vector file",)),
    "no site": ({"layer.1": ROW}, {**ABOUT, "site": "nowhere"}, ("midstream.site",)),
    "an unknown field": ({"layer.1": ROW}, {**ABOUT, "x": 1}, ("midstream.x",)),
    "a provenance that is none": ({"layer.1": ROW}, {**ABOUT, "provenance": [1]}, ("midstream.provenance",)),
    "a list": ({"layer.1": ROW}, [1], ("not an object",)),
}


@pytest.mark.parametrize("what", ODD_TENSORS)
def test_odd_safetensors(tmp_path: Path, what: str) -> None:
    tensors, about, expected = ODD_TENSORS[what]
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, None if about is None else {"midstream": json.dumps(about)})
    unreadable(path, *expected)


def test_a_capture_file(tmp_path: Path) -> None:
    made_capture().save(tmp_path / "cap.safetensors")
    unreadable(tmp_path / "cap.safetensors", "it is a capture file, read it with ms.CaptureResult.load")


def test_files_that_are_none(tmp_path: Path) -> None:
    unreadable(tmp_path / "missing", kind=FileNotFoundError)
    unreadable(tmp_path, kind=IsADirectoryError)
    unreadable(Path("/dev/null"), "a device or a pipe")
    for content in (b"", b"x", b"PK\x03\x04" + b"x" * 50, b"\x80\x04N.", b"{", b"[1, 2", b"GGUF", b'{"a": ' * 50_000):
        (tmp_path / "odd").write_bytes(content)
        unreadable(tmp_path / "odd")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damaged_files(tmp_path: Path, suffix: str) -> None:
    """Cut anywhere, or with any byte of its first ones another: refused in one line, or vectors that are whole."""
    path = write_vectors(tmp_path / f"a{suffix}", vectors(), PROVENANCE)
    data = path.read_bytes()
    ends = (0, 1, 3, 4, 7, 8, 9, 20, 24, 40, len(data) // 2, len(data) - 33, len(data) - 5, len(data) - 1)
    cut = [data[:end] for end in ends]
    flipped = [data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :] for at in range(120) for flip in (1, 0x80, 0xFF)]
    for number, damaged in enumerate([*cut, *flipped]):
        path.write_bytes(damaged)
        try:
            back = read_vectors(path)
        except FileFormatError as error:
            assert "\n" not in str(error)  # noqa: PT017
            assert str(error).startswith(str(path))  # noqa: PT017
        else:
            assert number >= len(cut) or damaged[-1:] in (b"\0", b"}")  # GGUF ends with blanks
            assert all(np.isfinite(array).all() for array in back.vectors.values())


# --- GGUF of others


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray[Any, Any]],
    arch: str = "controlvector",
    add: Callable[[Any], object] = lambda _: None,
    **named: Any,
) -> Path:
    """A file as repeng writes it."""
    writer = gguf.GGUFWriter(path, arch, **named)
    writer.add_string("controlvector.model_hint", "mistral")
    writer.add_uint32("controlvector.layer_count", len(tensors))
    add(writer)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ARRAY = np.array([1, -0.5], dtype=np.float32)


def test_gguf_of_others(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        writer.add_float32("controlvector.loss", float("nan"))
        writer.add_array("controlvector.list", [1, 2])
        writer.add_bool("controlvector.normalize", False)

    path = write_gguf(tmp_path / "v.gguf", {"direction.9": ARRAY, "direction.0": ARRAY.astype(np.float16)}, add=more)
    back = read_vectors(path)
    assert {layer: array.tolist() for layer, array in back.vectors.items()} == {0: [1, -0.5], 9: [1, -0.5]}
    assert back.site == "resid_post"
    assert back.provenance == {
        "controlvector.model_hint": "mistral",
        "controlvector.layer_count": 2,
        "controlvector.normalize": False,
    }
    again = read_vectors(write_vectors(tmp_path / "w.safetensors", back.vectors, back.provenance))
    assert again.provenance == back.provenance


def test_gguf_of_a_machine_with_the_other_byte_order(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "v.gguf", {"direction.9": ARRAY}, endianess=gguf.GGUFEndian.BIG)
    assert read_vectors(path).vectors[9].tolist() == [1, -0.5]


ODD_GGUF: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "a model": ({"direction.1": ARRAY}, {"arch": "llama"}, ("'llama'", "'controlvector'")),
    "no tensors": ({}, {}, ("no tensor", "direction.<n>")),
    "another name": ({"direction.1": ARRAY, "scale": ARRAY}, {}, ("'scale'", "direction.<n>")),
    "no number": ({"direction.x": ARRAY}, {}, ("'direction.x'",)),
    "two spellings": ({"direction.1": ARRAY, "direction.01": ARRAY}, {}, ("'direction.01'",)),
    "a matrix": ({"direction.1": np.ones((2, 2), dtype=np.float32)}, {}, ("direction.1", "[2, 2]")),
    "integers": ({"direction.1": np.ones(2, dtype=np.int32)}, {}, ("direction.1", "I32", "F32, F16")),
    "not finite": ({"direction.1": np.array([np.inf], dtype=np.float32)}, {}, ("direction.1", "finite")),
    "mixed widths": ({"direction.1": ARRAY, "direction.2": ARRAY[:1]}, {}, ("direction.2", "direction.1 2")),
    "text that is not JSON": (
        {"direction.1": ARRAY}, {"add": lambda writer: writer.add_string("midstream", "x")}, ("not JSON",),
    ),
    "a number for text": (
        {"direction.1": ARRAY}, {"add": lambda writer: writer.add_uint32("midstream", 1)}, ("not JSON",),
    ),
    "another site": (
        {"direction.1": ARRAY},
        {"add": lambda writer: writer.add_string("midstream", json.dumps({**ABOUT, "site": "mlp_out"}))},
        ("midstream.site is mlp_out",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD_GGUF)
def test_odd_gguf(tmp_path: Path, what: str) -> None:
    tensors, named, expected = ODD_GGUF[what]
    unreadable(write_gguf(tmp_path / "v.gguf", tensors, **named), *expected)


def test_a_damaged_length_costs_nothing(tmp_path: Path) -> None:
    """A list said to have 2**60 items is not counted to its end; nor is a model's vocabulary."""
    assert "_get" in vars(gguf.GGUFReader)  # all reads of the package go through it: ours are bounded there
    path = write_gguf(tmp_path / "v.gguf", {"direction.1": ARRAY}, add=lambda one: one.add_array("a.list", [1, 2]))
    data = path.read_bytes()
    at = data.index(b"a.list") + len(b"a.list") + 4 + 4
    assert data[at : at + 8] == struct.pack("<Q", 2)
    path.write_bytes(data[:at] + struct.pack("<Q", 1 << 60) + data[at + 8 :])
    unreadable(path, "damaged", "it ends early")
    many = [0] * 100_000
    path = write_gguf(tmp_path / "m.gguf", {"direction.1": ARRAY}, add=lambda one: one.add_array("a.list", many))
    unreadable(path, "more than the 100000 values")


def test_gguf_with_a_layer_twice(tmp_path: Path) -> None:
    name = b"direction.1"
    info = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 1, 0, 0)
    arch = b"".join(struct.pack("<Q", len(text)) + text for text in (b"general.architecture",))
    arch += struct.pack("<IQ", 8, len(b"controlvector")) + b"controlvector"
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 1) + arch + info + info
    path = tmp_path / "v.gguf"
    path.write_bytes(head + b"\0" * (-len(head) % 32) + struct.pack("<f", 1) + b"\0" * 28)
    unreadable(path, "direction.1", "damaged")


def test_an_offset_that_wraps_around(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "v.gguf", {"direction.1": ARRAY})
    data = path.read_bytes()
    at = data.index(b"direction.1") + len(b"direction.1") + 4 + 8 + 4
    assert data[at : at + 8] == b"\0" * 8
    path.write_bytes(data[:at] + struct.pack("<Q", (1 << 64) - 32) + data[at + 8 :])
    unreadable(path, "damaged")


def test_without_the_package_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_vectors(tmp_path / "v.gguf", vectors())
    old = path.read_bytes()
    monkeypatch.setitem(sys.modules, "gguf", None)
    unreadable(path, "pip install 'midstream[demo]'")
    with pytest.raises(FileFormatError, match="pip install 'midstream\\[demo\\]'"):
        write_vectors(path, vectors((1,)))
    assert path.read_bytes() == old
    write_vectors(tmp_path / "v.json", vectors())  # the others do without


# --- JSON of vllm-lens


def lens(**changes: Any) -> dict[str, Any]:
    """What `SteeringVector(...).model_dump()` gives."""
    rows = changes.pop("rows", torch.tensor([[1.0, -0.5], [3.0, 4.0]]))
    plain = {"layer_indices": [9, 0], "scale": 1.0, "norm_match": False, "position_indices": None}
    return {"activations": encode_tensor(rows), **plain, **changes}


def put(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_json_of_others(tmp_path: Path, dtype: torch.dtype) -> None:
    path = put(tmp_path / "v.json", lens(rows=torch.tensor([[1.0, -0.5], [3.0, 4.0]]).to(dtype)))
    back = read_vectors(path)
    assert {layer: array.tolist() for layer, array in back.vectors.items()} == {0: [3, 4], 9: [1, -0.5]}
    assert (back.provenance, back.site) == ({}, "resid_post")


def test_the_old_encoding_and_defaults(tmp_path: Path) -> None:
    """Before zstd, vllm-lens wrote plain bytes; fields with defaults may be left out."""
    activations = {"data": "AACAPwAAAMA=", "dtype": "float32", "shape": [1, 2]}
    back = read_vectors(put(tmp_path / "v.json", {"activations": activations, "layer_indices": [4]}))
    assert back.vectors[4].tolist() == [1, -2]


def test_a_scale_is_multiplied_in_and_noted(tmp_path: Path) -> None:
    back = read_vectors(put(tmp_path / "v.json", lens(scale=-2.5)))
    assert back.vectors[9].tolist() == [-2.5, 1.25]
    assert back.provenance == {"scale": -2.5}
    third = read_vectors(put(tmp_path / "v.json", lens(scale=1 / 3, rows=torch.tensor([[3.0], [1.0]])))).vectors[0]
    assert third.tolist() == [np.float32(1 / 3)]  # rounded once
    unreadable(put(tmp_path / "v.json", lens(scale=1e39)), "activations[0]", "finite")


def test_a_list(tmp_path: Path) -> None:
    """The form in which a request carries them; a layer in two of them would be added twice."""
    items = [lens(), lens(layer_indices=[1, 2])]
    back = read_vectors(put(tmp_path / "v.json", items))
    assert (back.layers, back.provenance) == ((0, 1, 2, 9), {})
    items[1]["scale"] = 2.0
    assert read_vectors(put(tmp_path / "v.json", items)).provenance == {"parts": [{}, {"scale": 2.0}]}
    unreadable(put(tmp_path / "v.json", [lens(), lens()]), "[1].activations[0]", "layer 9 is there twice")
    unreadable(put(tmp_path / "v.json", [lens(), 3]), "[1] is no object")
    unreadable(put(tmp_path / "v.json", [lens(), lens(norm_match=True)]), "[1].norm_match")


ODD_LENS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "norm_match": (lens(norm_match=True), ("norm_match", "norm_match=True")),
    "positions": (lens(position_indices=[4, 5]), ("position_indices", "scope")),
    "rows by position": (lens(rows=torch.ones(2, 3, 4)), ("activations", "[2, 3, 4]", "positions")),
    "one vector": (lens(rows=torch.ones(2)), ("activations", "[2]", "[layers, hidden]")),
    "integers": (lens(rows=torch.ones(2, 3, dtype=torch.int32)), ("activations", "torch.int32")),
    "not finite": (lens(rows=torch.tensor([[1.0], [torch.nan]])), ("activations[1]", "finite")),
    "no width": (lens(rows=torch.ones(2, 0)), ("activations[0]", "empty")),
    "no layer": (lens(rows=torch.ones(0, 2), layer_indices=[]), ("activations", "empty")),
    "fewer layers": (lens(layer_indices=[1]), ("layer_indices", "1 layers for activations of 2")),
    "a layer twice": (lens(layer_indices=[1, 1]), ("activations[1]", "layer 1 is there twice", "activations[0]")),
    "a negative layer": (lens(layer_indices=[1, -1]), ("layer_indices[1]",)),
    "half a layer": (lens(layer_indices=[1, 1.5]), ("layer_indices[1]",)),
    "an unknown field": (lens(decay=0.5), ("decay", "unknown field")),
    "no activations": ({"layer_indices": [1]}, ("activations",)),
    "a list of numbers": (lens(activations=[[1.0]]), ("activations",)),
    "no base64": (lens(activations={**lens()["activations"], "data": "?"}), ("activations.data", "base64")),
    "another shape": (lens(activations={**lens()["activations"], "shape": [2, 3]}), ("activations.data",)),
    "text of another": (lens(midstream={"x": 1}), ("not a steering-vector file",)),
    "another site": (lens(midstream={**ABOUT, "site": "mlp_out"}), ("midstream.site is mlp_out",)),
    "no scale": (lens(scale=None), ("scale",)),
    "an infinite scale": (lens(scale=float("inf")), ("scale",)),
    "an empty list": ([], ("empty list",)),
    "an empty object": ({}, ("activations",)),
}


@pytest.mark.parametrize("what", ODD_LENS)
def test_odd_json(tmp_path: Path, what: str) -> None:
    content, expected = ODD_LENS[what]
    unreadable(put(tmp_path / "v.json", content), *expected)


def test_a_vector_file_says_what_it_holds() -> None:
    file = VectorFile(vectors((2, 5), 3), {})
    assert (file.layers, file.width, file.site) == ((2, 5), 3, "resid_post")
    with pytest.raises(AttributeError):
        file.site = "mlp_out"  # pyright: ignore[reportAttributeAccessIssue]
    assert module.VERSION == 1
