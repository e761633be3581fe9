"""The tokenizer of a model, the same on every backend, so that a text has the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from midstream.core.errors import ModelLoadError

_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def has_tokenizer(source: str) -> bool:
    """Whether a folder has a tokenizer's files; a hub id is taken to."""
    path = Path(source)
    return not path.is_dir() or any((path / name).exists() for name in _FILES)


def load_tokenizer(source: str, **hub: Any) -> Any:
    """The tokenizer of a folder or hub id; None for a folder that has no tokenizer file. hub: where and how to look."""
    from transformers import AutoTokenizer

    if not has_tokenizer(source):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, **hub)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"cannot load the tokenizer of {source!r}: {str(error).splitlines()[0]:.200}") from error
