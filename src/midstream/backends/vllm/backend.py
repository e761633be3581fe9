"""VllmBackend: one engine in this process, behind the seam."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from midstream.backends.registered import Registered
from midstream.backends.tokenizers import has_tokenizer, load_tokenizer
from midstream.core.backend import BackendCapabilities, BackendSpec, ModelFacts
from midstream.core.errors import BusyError, ModelLoadError, SessionClosedError, choices, spec_error
from midstream.core.generation import CONSTRAINT_KINDS, eos_ids
from midstream.core.sites import SITES, as_site
from midstream.formats.artifacts import ArtifactRegistry
from midstream.taps.pages import PAGES

from .capabilities import engine_capabilities
from .checkpoints import merged_checkpoint
from .engine import Engine, adopted, boot
from .offline import VllmSession
from .requests import EngineSettings
from .reuse import ROWS_KEPT

OPTIONS: Final = (
    "dtype", "device", "engine_kwargs", "tokenizer_name_or_path", "trust_remote_code", "lora", "checkpoint",
    "graph_sites", "graph_rows", "row_bytes", "kept_row_bytes",
)  # fmt: skip
_OURS: Final = ("model", "additional_config", "speculative_config", "kv_transfer_config")
_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM makes room for."""
_NOT_YET: Final = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_prompt_embeds": 0, "enable_dbo": 0}


class VllmBackend(Registered):
    """Boots its engine when the first session is opened, and frees it at `release`."""

    def __init__(self, spec: BackendSpec, tokenizer: Any = None, registry: ArtifactRegistry | None = None) -> None:
        if unknown := set(spec.options) - set(OPTIONS):
            raise spec_error("E_UNKNOWN_FIELD", "options", f"unknown {sorted(unknown)}; there are: {choices(OPTIONS)}")
        super().__init__(registry)
        self.spec = spec
        self._given_tokenizer = tokenizer
        self._engine: Engine | None = None
        self._tokenizer: Any = None
        self._session: VllmSession | None = None
        self._released = False
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._llm: Any = None

    @classmethod
    def adopt(cls, llm: Any, tokenizer: Any = None, registry: ArtifactRegistry | None = None) -> VllmBackend:
        """A `vllm.LLM` that the caller made with `additional_config={"midstream": {}}`; `release` leaves it running."""
        found = cls(BackendSpec("vllm", str(llm.llm_engine.model_config.model)), tokenizer, registry)
        found._llm = llm
        return found

    def capabilities_for_spec(self, spec: BackendSpec) -> BackendCapabilities:
        """What this kind of backend can do with a model that has every site; boots nothing."""
        return engine_capabilities(SITES, {})

    def negotiated_capabilities(self) -> BackendCapabilities:
        """What this engine can do: the sites that its self-test kept, and why it refused the others."""
        facts = self._booted().facts
        constraints = CONSTRAINT_KINDS if self._booted().has_tokenizer else ()
        return engine_capabilities(tuple(facts.layouts), facts.refused, constraints)

    def open_session(self) -> VllmSession:
        """The one session at a time; another is refused until it is closed."""
        if self._session is not None:
            raise BusyError("this backend has an open session: close it first, sessions are exclusive")
        engine = self._booted()
        self._session = VllmSession(
            engine,
            self._facts(engine),
            frozenset(token for token in self._eos if token < engine.vocabulary),
            self._tokenizer,
            self.registry,
            self.negotiated_capabilities,
            self._session_closed,
        )
        return self._session

    def release(self) -> None:
        """Close the session and free the engine; idempotent, also after a failed boot."""
        if self._session is not None:
            self._session.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None
        PAGES.give_up()
        self._released = True

    def _session_closed(self) -> None:
        self._session = None

    # --- the boot

    def _booted(self) -> Engine:
        if self._released:
            raise SessionClosedError("this backend was released: load the model again")
        if self._engine is None and self._llm is not None:
            self._engine = adopted(self._llm)
            config = self._llm.llm_engine.model_config
            self._tokenizer = self._given_tokenizer or (
                self._llm.get_tokenizer() if self._engine.has_tokenizer else None
            )
            self._eos = eos_of(config.model, config.trust_remote_code)
        elif self._engine is None:
            source = self._source()
            arguments, settings = self._arguments(source)
            self._eos = eos_of(source, bool(self.spec.options.get("trust_remote_code")))
            self._engine = boot(source, arguments, settings, int(self.spec.options.get("kept_row_bytes", ROWS_KEPT)))
        return self._engine

    def _source(self) -> str:
        """The folder or hub id that vLLM loads: the model's, with the checkpoint's weights where one is given."""
        from midstream.backends.bundled import SMOLLM2, smollm2_path

        base = str(smollm2_path()) if self.spec.model == SMOLLM2 else self.spec.model
        checkpoint = self.spec.options.get("checkpoint")
        if checkpoint is None:
            return base
        self._scratch = tempfile.TemporaryDirectory(prefix="midstream-checkpoint-")
        return str(merged_checkpoint(base, checkpoint, Path(self._scratch.name) / "merged"))

    def _arguments(self, source: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `vllm.LLM` is given, and what our plugin is."""
        options = dict(self.spec.options)
        given = dict(options.get("engine_kwargs") or {})
        for name in _OURS:
            if name in given:
                raise spec_error("E_BAD_PARAM", f"engine_kwargs.{name}", "is midstream's own: leave it out")
        for name, largest in _NOT_YET.items():
            if (given.get(name) or 0) > largest:
                raise ModelLoadError(
                    f"{name}={given[name]}: midstream is not shown to be right there yet; leave it out"
                )
        if options.get("device", "auto") != "auto":
            message = "vLLM is built for one kind of device, and uses that: leave it at 'auto'"
            raise spec_error("E_BAD_PARAM", "device", message)
        dtype = options.get("dtype", "auto")
        if given.get("dtype", "auto") != "auto":
            inner = str(given["dtype"]).removeprefix("torch.")
            if dtype not in ("auto", inner):
                raise spec_error("E_BAD_PARAM", "dtype", f"{dtype} here and {inner} in engine_kwargs: give one")
            dtype = inner
        remote = bool(options.get("trust_remote_code"))
        name = options.get("tokenizer_name_or_path") or source
        self._tokenizer = self._given_tokenizer or load_tokenizer(name, trust_remote_code=remote)
        made: dict[str, Any] = {"max_logprobs": -1, "disable_log_stats": True} | given
        made |= {"dtype": dtype, "trust_remote_code": remote, "async_scheduling": False}
        if name != source:
            made["tokenizer"] = name
        if not has_tokenizer(made.get("tokenizer", source)):
            made["skip_tokenizer_init"] = True
        structured = made.get("structured_outputs_config")
        if structured is None or isinstance(structured, dict):  # compact JSON unless the caller says otherwise
            made["structured_outputs_config"] = {"disable_any_whitespace": True, "backend": "xgrammar"} | (
                structured or {}
            )
        if (lora := options.get("lora")) is not None:
            made |= _lora(lora, given)
        names = {"graph_sites": "graph", "row_bytes": "row_bytes", "graph_rows": "graph_rows"}
        wanted = {inner: options[name] for name, inner in names.items() if options.get(name) is not None}
        for place, site in enumerate(wanted.get("graph", ())):
            as_site(site, f"graph_sites[{place}]")
        settings = EngineSettings.of({**wanted, "version": version("midstream")}).model_dump(mode="json")
        return made, settings

    def _facts(self, engine: Engine) -> ModelFacts:
        config: Any = engine.llm.llm_engine.model_config
        return ModelFacts.of(
            config.hf_config,
            config.hf_text_config,
            model_ref=self.spec.model,
            model_fingerprint=engine.facts.fingerprint,
            dtype=engine.dtype,
            context_length=config.max_model_len,
        )


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
