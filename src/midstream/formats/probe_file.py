"""The probe file: some linear probes as one .safetensors (docs/formats.md).

Tensors `probe.<place>` `[width]`, float32; one JSON text under the metadata key `midstream` holds the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import ClassVar, Final, Literal

import torch

from midstream.core.errors import FileFormatError, SpecError
from midstream.core.probe import Probe
from midstream.core.sites import Site
from midstream.core.wire import Int, Number, Wire

from .tensor_file import opened, owned, read_json, write
from .vectors import KEY, read_vectors

_WHAT: Final = "a file of probes or directions"


class _Probe(Wire):
    """What stands beside a probe's weight."""

    name: str
    layer: Int
    site: Site
    bias: Number


class _About(Wire):
    root: ClassVar[str] = KEY

    format: Literal["probes"] = "probes"
    version: Literal[1] = 1
    probes: tuple[_Probe, ...]


def write_probes(path: str | PathLike[str], probes: Sequence[Probe]) -> Path:
    """Write probes into one file, atomically; `read_probes` gives them back bit for bit."""
    about = _About(
        probes=tuple(_Probe(name=one.title, layer=one.layer, site=one.site, bias=one.bias) for one in probes)
    )
    tensors = {f"probe.{place}": torch.tensor(one.weight) for place, one in enumerate(probes)}
    return write(path, tensors, {KEY: about.model_dump(mode="json")})


def read_probes(path: str | PathLike[str]) -> list[Probe]:
    """The probes of a file; of a vector file, each layer's direction as a probe without a bias.

    FileNotFoundError, and FileFormatError in one line that names the file.
    """
    if Path(path).suffix == ".safetensors":
        with opened(path, _WHAT) as file:
            found = read_json(file, KEY, path)
            if found is not None and found.get("format") == "probes":
                try:
                    about = _About.of(found)
                    return [
                        Probe(one.layer, one.site, owned(file, f"probe.{place}"), one.bias, one.name)
                        for place, one in enumerate(about.probes)
                    ]
                except SpecError as error:
                    raise FileFormatError(f"{path}: it is damaged: {error}") from None
    file = read_vectors(path)
    stem = Path(path).name.partition(".")[0]
    return [Probe(layer, file.site, vector, name=f"{stem}.{layer}") for layer, vector in file.vectors.items()]
