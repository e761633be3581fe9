"""From a name, a path or a loaded model to a model that can be read, with one-line errors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from midstream.backends.bundled import SMOLLM2, smollm2_path
from midstream.backends.tokenizers import load_tokenizer
from midstream.core.errors import ModelLoadError, choices, spec_error
from midstream.taps.locate import caps_scores

OPTIONS: Final = ("hf_model_kwargs", "device_map", "tokenizer_name_or_path", "trust_remote_code")
_HUB: Final = ("revision", "code_revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download")


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model and its tokenizer (or None)."""

    model: Any
    tokenizer: Any


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
    device_map = _one_device_map(device, kwargs, options)
    place = None if device_map else _device(device)
    # what says where on the hub to look holds for config and tokenizer too, not for the weights alone
    hub = {key: kwargs.pop(key) for key in _HUB if key in kwargs}
    if options.get("trust_remote_code"):
        hub["trust_remote_code"] = True
    _check_folder(name, source)
    try:
        config = transformers.AutoConfig.from_pretrained(source, **hub)
        auto = _auto_class(transformers, config)
        if caps_scores(config):  # some versions of transformers choose an attention that leaves the cap out
            kwargs.setdefault("attn_implementation", "eager")
        model, info = auto.from_pretrained(source, config=config, output_loading_info=True, **hub, **kwargs)
        if place is not None:
            model.to(place)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        message = f"cannot load {name!r}: {said[0]:.200} (give a folder, a hub id, or {SMOLLM2!r})"
        raise ModelLoadError(message) from error
    if missing := sorted(info["missing_keys"]):
        raise ModelLoadError(f"{name!r} lacks weights, which would be random: {missing[0]} ({len(missing)} in all)")
    model.eval()
    tokenizer_source = options.get("tokenizer_name_or_path")
    return LoadedModel(model, load_tokenizer(tokenizer_source or source, **({} if tokenizer_source else hub)))


def _one_device_map(device: str, kwargs: dict[str, Any], options: dict[str, Any]) -> Any:
    """The device_map given here or in `hf_model_kwargs`; beside a device, one of the two would be ignored."""
    given = [found for found in (options.get("device_map"), kwargs.pop("device_map", None)) if found is not None]
    if "tp_plan" in kwargs:
        raise spec_error("E_BAD_PARAM", "options.hf_model_kwargs.tp_plan", "each rank would have a part of the heads")
    if len(given) > 1 or (given and device != "auto"):
        raise spec_error("E_BAD_PARAM", "device", "give one of device, device_map, hf_model_kwargs.device_map")
    if given:
        kwargs["device_map"] = given[0]
    return given[0] if given else None


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
    if found not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
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
