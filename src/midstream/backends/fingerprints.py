"""What tells two models apart without running them: config, weights, tokenizer and chat template, each by its hash."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from midstream.taps.fingerprint import plain_config

_SAMPLED: Final = 4096
"""Bytes of each tensor of a checkpoint, from its middle."""


@dataclass(frozen=True)
class Fingerprints:
    """Of one model; None: there is none, or it cannot be told here."""

    config: str | None = None
    weights: str | None = None
    tokenizer: str | None = None
    template: str | None = None


def fingerprints(config: Any, source: str | None, tokenizer: Any, template: str | None = None) -> Fingerprints:
    """Of a model whose checkpoint may be a folder (`source`). template: what is used in the tokenizer's own's place."""
    own = getattr(tokenizer, "chat_template", None)
    return Fingerprints(
        None if config is None else _hash([json.dumps(plain_config(config), sort_keys=True, default=str).encode()]),
        weights(source),
        None if tokenizer is None else _hash([json.dumps(_tokenizer(tokenizer), sort_keys=True).encode()]),
        None if (used := template or own) is None else _hash([json.dumps(used, sort_keys=True).encode()]),
    )


def weights(source: str | None) -> str | None:
    """Of the safetensors files of a folder: names, types, shapes and a few bytes of each tensor. None: it has none."""
    folder = Path(source or "")
    files = sorted(folder.glob("*.safetensors")) if source and folder.is_dir() else []
    tensors = {name: one for file in files for name, one in _tensors(file).items()}
    return _hash(part for name in sorted(tensors) for part in (name.encode(), *tensors[name])) if tensors else None


def _tensors(file: Path) -> Mapping[str, tuple[bytes, bytes]]:
    """Tensor → what its header says of it, and bytes from its middle."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        found: dict[str, tuple[bytes, bytes]] = {}
        for name, about in header.items():
            if name == "__metadata__":
                continue
            start, stop = about["data_offsets"]
            opened.seek(8 + size + max(start, (start + stop) // 2 - _SAMPLED // 2))
            form = json.dumps([about["dtype"], about["shape"]]).encode()
            found[name] = (form, opened.read(min(_SAMPLED, stop - start)))
    return found


def _tokenizer(tokenizer: Any) -> Any:
    """What decides which ids a text has."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    inner = json.loads(backend.to_str()) if backend is not None else {}
    for name in ("padding", "truncation"):  # settings of the last call
        inner.pop(name, None)
    return {
        "inner": inner,
        "vocabulary": None if inner else sorted(tokenizer.get_vocab().items()),
        "special": {name: str(value) for name, value in sorted(tokenizer.special_tokens_map.items())},
    }


def _hash(parts: Iterable[bytes]) -> str:
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return f"sha256:{digest.hexdigest()}"
