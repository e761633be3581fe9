"""Steering-vector files: ours, GGUF control vectors, and the JSON of vllm-lens (docs/formats.md).

ours       safetensors: `layer.<n>` `[hidden]` float32, of any site
GGUF       architecture `controlvector`: `direction.<n>` `[hidden]`, added to `resid_post` of block n; llama.cpp
           reads no layer 0
vllm-lens  a SteeringVector as JSON, or a list of them: `activations` `[layers, hidden]` (formats/wire.py) and
           `layer_indices`, added to `resid_post`

One JSON text, `midstream`, holds format, version, site and provenance in all three; other readers pass over it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
import torch
from pydantic import Field

from midstream.core.artifacts import Floats, finite_array
from midstream.core.errors import FileFormatError, SpecError, choices, spec_error
from midstream.core.narrow import is_int, is_mapping
from midstream.core.sites import Site, as_site
from midstream.core.wire import Int, Wire

from .atomic import replacing
from .tensor_file import opened, owned, read_json, write
from .wire import decode_tensor, encode_tensor

VERSION: Final = 1
KEY: Final = "midstream"
_WHAT: Final = "a steering-vector file"
_ARCH: Final = "controlvector"
_LAYERS: Final = 100_000  # more than a model has: what is above is a damaged number
_NAME: Final = re.compile(r"(layer\.|direction\.|)(0|[1-9][0-9]{0,4})")
_GETS: Final = 100_000  # a few for each field and tensor of a GGUF file; a model's vocabulary has many more
_DAMAGED: Final = (ValueError, KeyError, IndexError, OverflowError, FloatingPointError, RecursionError)
"""What the gguf package raises, as it comes, for a file that is not as it should be."""

_Layer = Annotated[Int, Field(ge=0, lt=_LAYERS)]
_Named = Iterable[tuple[int, str, Any]]


@dataclass(frozen=True, eq=False)
class VectorFile:
    """Vectors as a file holds them.

    vectors: layer → `[hidden]`, float32, read-only; layers ascending, one width. provenance: how they were
    made, from what, with which measured quality; what its writer put there. site: where they belong.
    """

    vectors: Mapping[int, Floats]
    provenance: Mapping[str, Any]
    site: Site = "resid_post"

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have a vector, ascending."""
        return tuple(self.vectors)

    @property
    def width(self) -> int:
        """The length of each vector."""
        return len(next(iter(self.vectors.values())))


class _About(Wire):
    """Our JSON text in a file."""

    root: ClassVar[str] = KEY

    format: Literal["vectors"] = "vectors"
    version: Int = VERSION
    site: Site = "resid_post"
    provenance: dict[str, Any] = Field(default_factory=dict)


class _Lens(Wire):
    """vllm-lens' SteeringVector, and our text in it."""

    activations: dict[str, Any]
    layer_indices: tuple[_Layer, ...]
    scale: float = 1.0
    norm_match: bool = False
    position_indices: tuple[Int, ...] | None = None
    midstream: dict[str, Any] | None = None


# --- writing


def write_vectors(
    path: str | PathLike[str],
    vectors: Mapping[int, Any],
    provenance: Mapping[str, Any] | None = None,
    *,
    site: str = "resid_post",
) -> Path:
    """Write layer → `[hidden]` (arrays, tensors or lists of numbers) atomically; the suffix says the format.

    `.safetensors` is ours, `.gguf` a GGUF control vector, `.json` vllm-lens' SteeringVector; `read_vectors`
    gives the same bits, provenance and site back. Raises E_BAD_PARAM for a suffix, vectors or a provenance
    (plain JSON) that do not fit, E_LAYER_RANGE for what is no layer, and layer 0 in GGUF, E_SITE for a site
    other than resid_post in GGUF and JSON, FileFormatError without the package gguf, and OSError with the
    old file untouched.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _WRITERS:
        message = f"no format of vectors ends in {suffix!r}; there are: {choices(list(_WRITERS))}"
        raise spec_error("E_BAD_PARAM", "path", message)
    about = _About(site=as_site(site), provenance=_plain_json(provenance))
    if not is_mapping(vectors) or not vectors:
        raise spec_error("E_BAD_PARAM", "vectors", f"must be one vector or more, layer → [hidden], got {vectors!r:.60}")
    for layer in vectors:
        if not is_int(layer) or not 0 <= layer < _LAYERS:
            raise spec_error("E_LAYER_RANGE", "vectors", f"a layer is a number, 0 or more, got {layer!r:.60}")
    checked = _checked((int(layer), f"vectors[{layer}]", value) for layer, value in vectors.items())
    if suffix != ".safetensors" and about.site != "resid_post":
        message = f"{suffix} files hold vectors of resid_post; write those of {about.site} as .safetensors"
        raise spec_error("E_SITE", "site", message)
    _WRITERS[suffix](path, checked, about.model_dump())
    return Path(path)


def _plain_json(provenance: Any) -> dict[str, Any]:
    """A provenance, when it comes back from JSON as it is."""
    plain = dict(provenance) if is_mapping(provenance) else provenance or {}
    try:
        same = isinstance(plain, dict) and json.loads(json.dumps(plain, allow_nan=False)) == plain
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        message = "must be plain JSON: texts as names; texts, finite numbers, true, false, null, lists, objects"
        raise spec_error("E_BAD_PARAM", "provenance", f"{message}, got {provenance!r:.60}")
    return plain


def _write_ours(path: str | PathLike[str], vectors: Mapping[int, Floats], about: dict[str, Any]) -> None:
    tensors = {f"layer.{layer}": torch.from_numpy(array.copy()) for layer, array in vectors.items()}
    write(path, tensors, {KEY: about})


def _write_gguf(path: str | PathLike[str], vectors: Mapping[int, Floats], about: dict[str, Any]) -> None:
    if 0 in vectors:
        message = "llama.cpp reads no control vector for layer 0: leave it out, or write .safetensors"
        raise spec_error("E_LAYER_RANGE", "vectors[0]", message)
    gguf = _gguf(path)
    hint = about["provenance"].get("model_type")
    with replacing(path) as temporary, closing(gguf.GGUFWriter(temporary, _ARCH)) as writer:
        # repeng wants a hint, of any text
        writer.add_string(f"{_ARCH}.model_hint", hint if isinstance(hint, str) and hint else "unknown")
        writer.add_uint32(f"{_ARCH}.layer_count", len(vectors))
        writer.add_string(KEY, json.dumps(about, separators=(",", ":"), allow_nan=False))
        for layer, array in vectors.items():
            writer.add_tensor(f"direction.{layer}", array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _write_lens(path: str | PathLike[str], vectors: Mapping[int, Floats], about: dict[str, Any]) -> None:
    one = {
        "activations": encode_tensor(torch.from_numpy(np.stack(list(vectors.values())))),
        "layer_indices": list(vectors),
        "scale": 1.0,
        "norm_match": False,
        "position_indices": None,
        KEY: about,
    }
    text = json.dumps(one, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text)


_WRITERS: Final[dict[str, Callable[[str | PathLike[str], Mapping[int, Floats], dict[str, Any]], None]]] = {
    ".safetensors": _write_ours,
    ".gguf": _write_gguf,
    ".json": _write_lens,
}


# --- reading


def read_vectors(path: str | PathLike[str]) -> VectorFile:
    """The vectors of a file in any of the three formats, told apart by its first bytes.

    A safetensors file of another program is read when its tensors are `[hidden]` and all named `layer.<n>`,
    `direction.<n>` or `<n>`: n is then a layer of ours (the 0-based block), the site resid_post. Half types
    are widened; a `scale` of vllm-lens is multiplied in, and noted in the provenance. Raises FileNotFoundError,
    IsADirectoryError, PermissionError, and FileFormatError, in one line that names the file and the tensor,
    for what is damaged, of another kind, without the package gguf, or what no vector holds (`norm_match`,
    positions).
    """
    head = _first_bytes(path)
    try:
        if head.startswith(b"GGUF"):
            return _read_gguf(path)
        if head.lstrip()[:1] in (b"{", b"[") and b"\0" not in head:  # a length in binary has zeros
            return _read_lens(path)
        return _read_safetensors(path)
    except SpecError as error:
        raise FileFormatError(f"{path}: {error.path}: {error.message}") from None


def _first_bytes(path: str | PathLike[str]) -> bytes:
    """16 bytes; none where `opened` is to say what is wrong."""
    with suppress(FileNotFoundError, PermissionError):
        if Path(path).is_file():
            with open(path, "rb") as file:
                return file.read(16)
    return b""


def _read_safetensors(path: str | PathLike[str]) -> VectorFile:
    with opened(path, _WHAT) as file:
        found = read_json(file, KEY, path)
        about = None if found is None else _about(found, path)
        places = _places(list(file.keys()), ("layer.",) if about else ("layer.", "direction.", ""), path)
        types = ("F32",) if about else ("F32", "F16", "BF16", "F64")
        for _, name in places:
            if (dtype := file.get_slice(name).get_dtype()) not in types:
                raise FileFormatError(f"{path}: {name} is of type {dtype}; here it may be: {choices(types)}")
        vectors = _checked((layer, name, owned(file, name)) for layer, name in places)
        if about is None:
            return VectorFile(vectors, file.metadata() or {})
    return VectorFile(vectors, about.provenance, about.site)


def _places(names: list[str], prefixes: tuple[str, ...], path: str | PathLike[str]) -> list[tuple[int, str]]:
    """(layer, name) of each tensor, when all have names of one form and there are some."""
    matches = [_NAME.fullmatch(name) for name in names]
    used = {match[1] if match else None for match in matches}
    if len(used) != 1 or not used <= set(prefixes):
        strange = [name for name, match in zip(names, matches, strict=True) if not match or match[1] not in prefixes]
        shown = choices([repr(name) for name in (strange or sorted(names))[:3]]) or "no tensor"
        if len(names) > 3:
            shown += f" and others, {len(names)} in all"
        expected = choices([f"{prefix}<n>" for prefix in prefixes])
        message = f"has {shown}; {_WHAT} has a tensor [hidden] for each layer n, all named one way: {expected}"
        raise FileFormatError(f"{path}: {message}")
    return [(int(match[2]), name) for name, match in zip(names, matches, strict=True) if match]


def _read_gguf(path: str | PathLike[str]) -> VectorFile:
    gguf = _gguf(path)
    try:
        with np.errstate(over="raise"):  # an offset that wraps around points to other bytes
            reader = _bounded(gguf.GGUFReader)(path)
        scalars = {name: field.contents() for name, field in reader.fields.items() if len(field.types) == 1}
    except _DAMAGED as error:
        raise FileFormatError(f"{path} is damaged, or no GGUF file: {' '.join(str(error).split())}") from None
    if (arch := scalars.pop("general.architecture", None)) != _ARCH:
        raise FileFormatError(f"{path} has the architecture {arch!r:.60}; a GGUF file of vectors has {_ARCH!r}")
    places = _places([tensor.name for tensor in reader.tensors], ("direction.",), path)
    for tensor in reader.tensors:
        if (kind := tensor.tensor_type.name) not in ("F32", "F16"):
            raise FileFormatError(f"{path}: {tensor.name} is of type {kind}; here it may be: F32, F16")
    layers = zip(places, reader.tensors, strict=True)
    vectors = _checked((layer, name, tensor.data) for (layer, name), tensor in layers)
    if KEY in scalars:
        return VectorFile(vectors, _resid_post(_about(_loads(scalars[KEY], f"{path}: {KEY}"), path), path))
    kept = {name: value for name, value in scalars.items() if not isinstance(value, float) or isfinite(value)}
    return VectorFile(vectors, {name: value for name, value in kept.items() if not name.startswith("GGUF.")})


def _read_lens(path: str | PathLike[str]) -> VectorFile:
    found = _loads(Path(path).read_bytes(), path)
    items = found if isinstance(found, list) else [found]
    named: list[tuple[int, str, Any]] = []
    provenances: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        at = f"[{place}]" if isinstance(found, list) else ""
        if not isinstance(item, dict):
            raise FileFormatError(f"{path}: {at or 'it'} is no object with activations and layer_indices")
        one = _Lens.of(item, at)
        named += _lens_rows(one, f"{at}." if at else "")
        about = _About() if one.midstream is None else _about(one.midstream, path)
        scaled = {} if one.scale == 1 else {"scale": one.scale}
        provenances.append({**_resid_post(about, path), **scaled})
    if not items:
        raise FileFormatError(f"{path} is an empty list: {_WHAT} has a vector or more")
    provenance = provenances[0] if len(provenances) == 1 else {"parts": provenances} if any(provenances) else {}
    return VectorFile(_checked(named), provenance)


def _lens_rows(one: _Lens, at: str) -> _Named:
    """(layer, name, vector) of each row of a SteeringVector whose meaning vectors alone have."""
    if one.norm_match:
        message = "true is a way to add, which a vector does not hold: write false, and add with norm_match=True"
        raise spec_error("E_BAD_PARAM", f"{at}norm_match", message)
    if one.position_indices is not None:
        message = "a vector has no positions: write null, and add with positions=[…] or a scope"
        raise spec_error("E_BAD_PARAM", f"{at}position_indices", message)
    tensor = decode_tensor(one.activations, f"{at}activations")
    if tensor.ndim != 2 or not tensor.is_floating_point():
        message = f"is {tensor.dtype} {list(tensor.shape)}; vectors are floats [layers, hidden]"
        if tensor.ndim == 3:
            message += ", and [layers, positions, hidden] is for positions, which a vector does not have"
        raise spec_error("E_BAD_PARAM", f"{at}activations", message)
    if len(tensor) != len(one.layer_indices):
        message = f"{len(one.layer_indices)} layers for activations of {len(tensor)}"
        raise spec_error("E_BAD_PARAM", f"{at}layer_indices", message)
    if not len(tensor):
        raise spec_error("E_BAD_PARAM", f"{at}activations", f"is empty: {_WHAT} has a vector or more")
    rows = tensor if one.scale == 1 else tensor.double() * one.scale
    return [(layer, f"{at}activations[{row}]", rows[row]) for row, layer in enumerate(one.layer_indices)]


def _checked(named: _Named) -> dict[int, Floats]:
    """layer → vector, layers ascending, from (layer, name, array); E_BAD_PARAM under the name of one that is none."""
    found: dict[int, tuple[str, Floats]] = {}
    for layer, name, value in named:
        array = finite_array(value, name)
        first, other = next(iter(found.values()), (name, array))
        if np.ndim(value) != 1:
            raise spec_error("E_BAD_PARAM", name, f"has the shape {list(np.shape(value))!s:.60}; a vector is [hidden]")
        if layer in found:
            raise spec_error("E_BAD_PARAM", name, f"layer {layer} is there twice: {found[layer][0]} has it too")
        if len(array) != len(other):
            raise spec_error("E_BAD_PARAM", name, f"is {len(array)} wide, and {first} {len(other)}: one width for all")
        found[layer] = name, array
    return {layer: found[layer][1] for layer in sorted(found)}


def _about(found: Any, path: str | PathLike[str]) -> _About:
    """Our JSON text, when it says vectors of a version that is read here."""
    kind, version = (found.get("format"), found.get("version")) if isinstance(found, dict) else (None, None)
    if kind != "vectors":
        hint = ": it is a capture file, read it with ms.CaptureResult.load" if is_int(kind) else ""
        raise FileFormatError(f"{path} is not {_WHAT}{hint}")
    if version != VERSION:
        advice = ": install a newer midstream" if is_int(version) and version > VERSION else ""
        raise FileFormatError(f"{path} has version {version!r:.40} of our vectors; {VERSION} is read here{advice}")
    return _About.of(found)


def _resid_post(about: _About, path: str | PathLike[str]) -> dict[str, Any]:
    """The provenance in a format that has vectors of resid_post alone."""
    if about.site != "resid_post":
        raise FileFormatError(f"{path}: {KEY}.site is {about.site}, and this format holds vectors of resid_post")
    return about.provenance


def _loads(text: Any, where: str | PathLike[str]) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{where} is not JSON, or is damaged: {' '.join(str(error).split())}") from None


def _bounded(base: Any) -> Any:
    """The package's reader, stopped at the file's end: it reads on past it, for as long as a damaged length says."""

    class Reader(base):
        gets = 0

        def _get(self, offset: int, dtype: Any, count: Any = 1, *order: Any, **named: Any) -> Any:
            self.gets += 1
            if self.gets > _GETS:
                raise ValueError(f"it has more than the {_GETS} values that describe vectors")
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("it ends early")
            return super()._get(offset, dtype, count, *order, **named)

    return Reader


def _gguf(path: str | PathLike[str]) -> Any:
    try:
        import gguf
    except ImportError:
        message = f"{path}: GGUF needs the package gguf; type: pip install 'midstream[demo]'"
        raise FileFormatError(message) from None
    return gguf
