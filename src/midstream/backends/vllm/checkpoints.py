"""A model's folder with the weights of another."""

from __future__ import annotations

import shutil
from pathlib import Path

from midstream.core.errors import ModelLoadError


def merged_checkpoint(base: str, checkpoint: str, into: Path) -> Path:
    """`into`, made anew of links: the weights of `checkpoint`, all else of `base`. ModelLoadError: it cannot be."""
    if not Path(checkpoint).is_dir() or not list(Path(checkpoint).glob("*.safetensors")):
        raise ModelLoadError(f"no checkpoint {checkpoint!r}: give a folder with .safetensors files")
    if not Path(base).is_dir():
        raise ModelLoadError(f"a checkpoint replaces the weights of a folder, and {base!r} is none")
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for file in Path(base).iterdir():
        if file.suffix not in (".safetensors", ".bin", ".pt") and not file.name.endswith(".index.json"):
            (into / file.name).symlink_to(file.resolve())
    for file in Path(checkpoint).iterdir():
        if file.suffix == ".safetensors" or file.name.endswith(".safetensors.index.json"):
            (into / file.name).symlink_to(file.resolve())
    return into
