"""How an engine of ours is booted: a backend's options as arguments of vLLM, and as what our plugin reads."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from midstream.backends.tokenizers import has_tokenizer, load_tokenizer
from midstream.core.backend import BackendSpec
from midstream.core.errors import ModelLoadError, choices, spec_error
from midstream.core.generation import eos_ids
from midstream.core.sites import as_site

from .checkpoints import merged_checkpoint
from .requests import EngineSettings

OPTIONS: Final = (
    "dtype", "device", "engine_kwargs", "tokenizer_name_or_path", "trust_remote_code", "lora", "checkpoint",
    "graph_sites", "graph_rows", "row_bytes", "kept_row_bytes",
)  # fmt: skip
_OURS: Final = ("model", "additional_config", "speculative_config", "kv_transfer_config")
_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM makes room for."""
_NOT_YET: Final = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_prompt_embeds": 0, "enable_dbo": 0}


@dataclass(frozen=True, eq=False)
class Plan:
    """An engine that is to be booted. source: the folder or hub id that vLLM loads. arguments: of `vllm.LLM`.

    settings: what our plugin reads. eos: every id that ends a text, as the model's folder has them.
    """

    source: str
    arguments: Mapping[str, Any]
    settings: Mapping[str, Any]
    tokenizer: Any
    eos: frozenset[int]


def check_options(spec: BackendSpec) -> None:
    """E_UNKNOWN_FIELD for an option that there is not."""
    if unknown := set(spec.options) - set(OPTIONS):
        raise spec_error("E_UNKNOWN_FIELD", "options", f"unknown {sorted(unknown)}; there are: {choices(OPTIONS)}")


def planned(spec: BackendSpec, tokenizer: Any, undo: ExitStack) -> Plan:
    """What a backend's options mean. tokenizer: the caller's own. undo: closed when the engine has gone."""
    source = _source(spec, undo)
    options, arguments = dict(spec.options), dict(spec.options.get("engine_kwargs") or {})
    _check(options, arguments)
    dtype = _dtype(options, arguments)
    remote = bool(options.get("trust_remote_code"))
    name = options.get("tokenizer_name_or_path") or source
    tokenizer = tokenizer or load_tokenizer(name, trust_remote_code=remote)
    made: dict[str, Any] = {"max_logprobs": -1, "disable_log_stats": True} | arguments
    made |= {"dtype": dtype, "trust_remote_code": remote, "async_scheduling": False}
    if name != source:
        made["tokenizer"] = name
    if not has_tokenizer(made.get("tokenizer", source)):
        made["skip_tokenizer_init"] = True
    structured = made.get("structured_outputs_config")
    if structured is None or isinstance(structured, dict):  # compact JSON unless the caller says otherwise
        made["structured_outputs_config"] = {"disable_any_whitespace": True, "backend": "xgrammar"} | (structured or {})
    if (lora := options.get("lora")) is not None:
        made |= _lora(lora, arguments)
    return Plan(source, made, _settings(options), tokenizer, eos_of(source, remote))


def _source(spec: BackendSpec, undo: ExitStack) -> str:
    """The model's folder or hub id, with the checkpoint's weights where one is given."""
    from midstream.backends.bundled import SMOLLM2, smollm2_path

    base = str(smollm2_path()) if spec.model == SMOLLM2 else spec.model
    checkpoint = spec.options.get("checkpoint")
    if checkpoint is None:
        return base
    scratch = undo.enter_context(tempfile.TemporaryDirectory(prefix="midstream-checkpoint-"))
    return str(merged_checkpoint(base, checkpoint, Path(scratch) / "merged"))


def _check(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse what is ours to say, or not right yet."""
    for name in _OURS:
        if name in given:
            raise spec_error("E_BAD_PARAM", f"engine_kwargs.{name}", "is midstream's own: leave it out")
    for name, largest in _NOT_YET.items():
        if (given.get(name) or 0) > largest:
            raise ModelLoadError(f"{name}={given[name]}: midstream is not shown to be right there yet; leave it out")
    if options.get("device", "auto") != "auto":
        message = "vLLM is built for one kind of device, and uses that: leave it at 'auto'"
        raise spec_error("E_BAD_PARAM", "device", message)


def _dtype(options: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    dtype = options.get("dtype", "auto")
    if given.get("dtype", "auto") == "auto":
        return dtype
    inner = str(given["dtype"]).removeprefix("torch.")
    if dtype not in ("auto", inner):
        raise spec_error("E_BAD_PARAM", "dtype", f"{dtype} here and {inner} in engine_kwargs: give one")
    return inner


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    names = {"graph_sites": "graph", "row_bytes": "row_bytes", "graph_rows": "graph_rows"}
    wanted = {inner: options[name] for name, inner in names.items() if options.get(name) is not None}
    for place, site in enumerate(wanted.get("graph", ())):
        as_site(site, f"graph_sites[{place}]")
    return EngineSettings.of({**wanted, "version": version("midstream")}).model_dump(mode="json")


def eos_of(source: str, trust_remote_code: bool) -> frozenset[int]:
    """Every EOS id of the generation_config, else of the config, as in process."""
    from transformers import AutoConfig, GenerationConfig

    try:
        own: Any = GenerationConfig.from_pretrained(source)
    except OSError:
        own = None
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(f"cannot load {source!r}: {said:.200} (give a folder or a hub id)") from error
    return eos_ids(own, config.get_text_config(decoder=True))


def _lora(lora: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """An adapter that every request goes through."""
    from vllm.lora.request import LoRARequest

    path = Path(str(lora))
    try:
        rank = int(json.loads((path / "adapter_config.json").read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"no adapter {str(lora)!r}: give a folder with an adapter_config.json") from error
    fitting = next((size for size in _RANKS if size >= rank), _RANKS[-1])
    made = {"enable_lora": True, "max_loras": 1, "max_lora_rank": fitting} | dict(given)
    return made | {"lora_request": LoRARequest("midstream", 1, str(path))}
