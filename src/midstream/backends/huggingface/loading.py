"""From a name, a path or a loaded model to a model that can be read, with one-line errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from midstream.core.errors import ModelLoadError, choices, spec_error

from .bundled import SMOLLM2, smollm2_path

OPTIONS: Final = ("hf_model_kwargs", "device_map", "tokenizer_name_or_path", "trust_remote_code")
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model, its tokenizer (or None), and the reference that it answers to."""

    model: Any
    tokenizer: Any
    model_ref: str


def load_pretrained(name: str, *, dtype: Any = "auto", device: str = "auto", **options: Any) -> LoadedModel:
    """Load a folder, a hub id or `smollm2`, with its tokenizer if it has one.

    Raises ModelLoadError when there is no such model, SpecError for an unknown option or a dtype given twice.
    """
    if unknown := set(options) - set(OPTIONS):
        raise spec_error("E_UNKNOWN_FIELD", "options", f"unknown {sorted(unknown)}; there are: {choices(OPTIONS)}")
    import transformers

    kwargs = dict(options.get("hf_model_kwargs") or {})
    kwargs["dtype"] = _one_dtype(dtype, kwargs)
    source = str(smollm2_path()) if name == SMOLLM2 else name
    remote = {"trust_remote_code": True} if options.get("trust_remote_code") else {}
    if device_map := options.get("device_map"):
        kwargs["device_map"] = device_map
    place = None if device_map else _device(device)
    _check_folder(name, source)
    try:
        config = transformers.AutoConfig.from_pretrained(source, **remote)
        auto = _auto_class(transformers, config)
        model = auto.from_pretrained(source, config=config, **remote, **kwargs)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelLoadError(f"cannot load {name!r}: {first:.200} (give a folder, a hub id, or {SMOLLM2!r})") from error
    model.eval()
    if place:
        model.to(place)
    tokenizer_source = options.get("tokenizer_name_or_path") or source
    return LoadedModel(model, _load_tokenizer(tokenizer_source, remote), name)


def _check_folder(name: str, source: str) -> None:
    path = Path(source)
    if path.exists() and not (path / "config.json").exists():
        raise ModelLoadError(f"{name!r} holds no config.json: give a model's folder, a hub id, or {SMOLLM2!r}")
    if not path.exists() and (path.is_absolute() or name.startswith((".", "~"))):
        raise ModelLoadError(f"no folder {name!r}: give a model's folder, a hub id, or {SMOLLM2!r}")


def _auto_class(transformers: Any, config: Any) -> Any:
    """The wrapper for models that see images, else the causal language model."""
    if type(config) in transformers.AutoModelForImageTextToText._model_mapping:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def as_torch_dtype(dtype: Any, path: str = "dtype") -> torch.dtype | None:
    """A floating torch dtype by name or itself; None for `auto`."""
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise spec_error("E_BAD_PARAM", path, f"no model dtype {dtype!r}; there are: auto, float32, bfloat16, float16")
    return found


def _one_dtype(dtype: Any, kwargs: dict[str, Any]) -> Any:
    """The dtype asked for here or in `hf_model_kwargs`; `auto` counts as not given."""
    asked = as_torch_dtype(dtype)
    others = [as_torch_dtype(kwargs.pop(key), f"options.hf_model_kwargs.{key}") for key in ("dtype", "torch_dtype")
              if key in kwargs]  # fmt: skip
    for other in others:
        if other is not None and asked is not None and other != asked:
            raise spec_error("E_BAD_PARAM", "dtype", f"{asked} here and {other} in hf_model_kwargs: give one")
        asked = asked or other
    return asked or "auto"


def _device(device: str) -> str:
    """The device by name; E_BAD_PARAM for one that this machine has not."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # a name that torch does not know; a build without CUDA
        have = "cpu, cuda" if torch.cuda.is_available() else "cpu"
        why = str(error).splitlines()[0]
        raise spec_error("E_BAD_PARAM", "device", f"no device {device!r}; there is: {have} ({why:.100})") from None
    return device


def _load_tokenizer(source: str, remote: dict[str, Any]) -> Any:
    """The tokenizer of a folder or hub id; None for a folder that has no tokenizer file."""
    from transformers import AutoTokenizer

    path = Path(source)
    if path.is_dir() and not any((path / name).exists() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, **remote)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"cannot load the tokenizer of {source!r}: {str(error).splitlines()[0]:.200}") from error
