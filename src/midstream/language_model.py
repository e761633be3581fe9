"""`ms.load` and LanguageModel: the face of midstream, thin over the seam of core/backend.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .async_language_model import AsyncLanguageModel
from .core.backend import EVERYTHING, Backend, BackendCapabilities, BackendSpec, ModelFacts, Progress, Session
from .core.capture import CaptureSpec, as_storage_dtype
from .core.errors import ModelLoadError, PartialBatchError, choices, spec_error
from .core.generation import Completion, GenerationParams
from .core.interventions import InterventionSpec
from .core.items import GenerationItem, InterventionEntry, ScoringItem, steered_items
from .core.narrow import is_mapping
from .core.prompts import PreparedPrompt, prepare, prompt_list, reference_ids
from .core.result import CaptureResult
from .core.select import SelectSpec
from .core.sites import layer_ids
from .core.stream import Chunk

if TYPE_CHECKING:
    from torch import Tensor


def load(
    model: Any,
    *,
    backend: str = "huggingface",
    dtype: Any = "auto",
    device: str = "auto",
    tokenizer: Any = None,
    steering: Any = None,
    **options: Any,
) -> LanguageModel:
    """A model to read and steer: a folder, a hub id, `smollm2` (bundled), or a loaded one.

    A loaded one is a transformers model, or with backend="vllm" a `vllm.LLM` that was made with
    `additional_config={"midstream": {}}`; it stays the caller's own.

    backend: `huggingface`, the model in this process; `vllm`, an engine in this process; or `vllm-serve`, a `vllm
    serve` with our plugin, whose model may be left out (None) where it serves one. dtype, device: of a model loaded
    here; `auto` takes the checkpoint's own, and a GPU where there is one. steering: a spec for every call that gives
    none of its own. options: with huggingface hf_model_kwargs, device_map, tokenizer_name_or_path, trust_remote_code;
    with vllm engine_kwargs (arguments of `vllm.LLM`), lora, checkpoint, graph_sites, row_bytes,
    tokenizer_name_or_path, trust_remote_code; with vllm-serve base_url (one or a list), api_key, request_timeout,
    max_concurrency, max_retries, retry_backoff, artifact_dir, lora, checkpoint, tokenizer_name_or_path,
    trust_remote_code. Raises ModelLoadError when the model cannot be found or fails its self-test.
    """
    if backend == "vllm-serve":
        return _on_servers(model, dtype, device, tokenizer, steering, options)
    if backend == "vllm":
        return _on_vllm(model, dtype, device, tokenizer, steering, options)
    if backend != "huggingface":
        raise spec_error("E_UNKNOWN_KIND", "backend", f"no backend {backend!r}; there are: {choices(list(EVERYTHING))}")
    from .backends.huggingface.backend import HuggingFaceBackend

    if not isinstance(model, str) and not hasattr(model, "__fspath__"):
        _refuse_changes({"dtype": dtype, "device": device, **options})
        if not hasattr(model, "config"):
            message = f"a {type(model).__name__} is no transformers model: give a folder, a hub id, or a model"
            raise ModelLoadError(message)
        reference = getattr(model.config, "_name_or_path", "") or type(model).__name__
        spec = BackendSpec("huggingface", reference)
        return LanguageModel(HuggingFaceBackend.adopt(spec, lambda: model, lambda: tokenizer), steering)
    given = {"dtype": str(dtype).removeprefix("torch."), "device": device, **options}
    spec = BackendSpec("huggingface", str(model), given)
    return LanguageModel(HuggingFaceBackend(spec, tokenizer), steering)


def _refuse_changes(given: dict[str, Any]) -> None:
    """Refuse options of loading for a model that is loaded."""
    if clash := [name for name, value in given.items() if value != "auto"]:
        message = f"the model is loaded already: {', '.join(clash)} would change nothing"
        raise spec_error("E_BAD_PARAM", clash[0], message)


def _on_vllm(
    model: Any, dtype: Any, device: str, tokenizer: Any, steering: Any, options: dict[str, Any]
) -> LanguageModel:
    """A model on an engine that is booted here."""
    from .backends.vllm.backend import VllmBackend

    if not isinstance(model, str) and not hasattr(model, "__fspath__"):
        if not hasattr(model, "llm_engine"):
            message = (
                f"a {type(model).__name__} cannot be served: vLLM loads the model itself, from a folder or a hub id"
            )
            raise ModelLoadError(message)
        _refuse_changes({"dtype": dtype, "device": device, **options})
        return LanguageModel(VllmBackend.adopt(model, tokenizer), steering)
    given = {"dtype": str(dtype).removeprefix("torch."), "device": device, **options}
    return LanguageModel(VllmBackend(BackendSpec("vllm", str(model), given), tokenizer), steering)


def _on_servers(
    model: Any, dtype: Any, device: str, tokenizer: Any, steering: Any, options: dict[str, Any]
) -> LanguageModel:
    """A model that is served elsewhere."""
    from .backends.vllm.serve.backend import ServedBackend

    for name, value in (("dtype", dtype), ("device", device)):
        if value != "auto":
            raise spec_error("E_BAD_PARAM", name, "is the server's own: leave it out")
    if model is not None and not isinstance(model, str) and not hasattr(model, "__fspath__"):
        message = f"a {type(model).__name__} is not what a server serves: give its name, a folder, or None"
        raise ModelLoadError(message)
    spec = BackendSpec("vllm-serve", "" if model is None else str(model), options)
    return LanguageModel(ServedBackend(spec, tokenizer), steering)


def _one_of(site: str | None, sites: Sequence[str] | None) -> Sequence[str]:
    """The sites of a capture, given by one parameter or the other."""
    if site is not None and sites is not None:
        raise spec_error("E_SITE", "site", f"site {site!r} and sites {sites!r}: give one of them")
    return sites if sites is not None else [site or "resid_post"]


def _entries(spec: InterventionSpec | None) -> tuple[InterventionEntry, ...]:
    return () if spec is None else (InterventionEntry(spec),)


def _shown(progress: bool | Progress, what: str = "capturing") -> AbstractContextManager[Progress | None]:
    """A callback for `progress`: a bar on stderr for True, none for False, else the caller's own."""
    if progress is True:
        from .progress import token_progress

        return token_progress(what)
    return nullcontext(progress or None)


class LanguageModel:
    """A loaded model with one open session; a context manager that closes it.

    >>> import midstream as ms
    >>> with ms.load("smollm2") as lm:                                        # doctest: +SKIP
    ...     cap = lm.capture(["What is steering?"], layers=[10, 20], rows="prompt[-1]")
    ...     cap.rows(10).shape
    torch.Size([1, 576])
    """

    def __init__(self, backend: Backend, steering: Any = None) -> None:
        self._backend = backend
        self._default = None if steering is None or steering is False else InterventionSpec.read(steering)
        self._session: Session = backend.open_session()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer given to `load`, else the model's own, or None."""
        return self._session.tokenizer

    @property
    def facts(self) -> ModelFacts:
        """Layers, widths, dtype, context and fingerprint of the model."""
        return self._session.layout

    @property
    def capabilities(self) -> BackendCapabilities:
        """What can be captured from this model, and why the rest is refused."""
        return self._backend.negotiated_capabilities()

    def default_steering(self) -> InterventionSpec | None:
        """What acts on every call that gives no steering of its own; `steering=False` switches it off."""
        return self._default

    @property
    def session(self) -> Session:
        """The open session behind this face."""
        return self._session

    @property
    def aio(self) -> AsyncLanguageModel:
        """The same calls, awaited, several at a time; UnsupportedOperationError where the model takes one at a time."""
        if self._backend.spec.kind != "vllm-serve":
            message = f"{self._backend.spec.kind} takes one call at a time: backend='vllm-serve' has it"
            raise spec_error("E_UNKNOWN_KIND", "aio", message)
        return AsyncLanguageModel(self)

    def capture(
        self,
        prompts: Any,
        *,
        layers: Any = None,
        site: str | None = None,
        sites: Sequence[str] | None = None,
        rows: SelectSpec | str | dict[str, Any] | None = None,
        per_prompt_rows: Sequence[SelectSpec | str | dict[str, Any] | None] | None = None,
        max_tokens: int = 1,
        dtype: Any = None,
        steering: Any = None,
        progress: bool | Progress = False,
        add_special_tokens: bool = True,
        **generation: Any,
    ) -> CaptureResult:
        """Labelled activations of `prompts`, and with max_tokens > 1 of what the model generates after them.

        prompts: one or a list of text, token ids, chat messages, or dicts with prompt_token_ids, multi_modal_data,
        cache_salt. layers: ids of blocks, None for all. site or sites: what to read ("resid_post" unless given). rows:
        which rows, in the row grammar, None for all. dtype: the storage type, None for the model's bits. steering: what
        is done to the rows, as in `generate`; captured are the steered ones. generation: any field of GenerationParams.
        With max_tokens=1 only the prompts run and no token is sampled.
        """
        spec = self._capture_spec(layers, site, sites, rows, dtype)
        params = GenerationParams(max_tokens=max_tokens, **generation)
        each = None
        if per_prompt_rows is not None:
            each = [SelectSpec.read(one, f"per_prompt_rows[{place}]") for place, one in enumerate(per_prompt_rows)]
        prepared = self.prepare(prompts, add_special_tokens=add_special_tokens)
        with _shown(progress) as callback:
            # each call counts from 0, so that the same call with the same seed gives the same text
            return self._session.capture(
                prepared,
                spec,
                per_prompt_select=each,
                steering=self._each_steering(steering, len(prepared)),
                params=params,
                call=0,
                progress=callback,
            )

    def _capture_spec(
        self, layers: Any, site: str | None, sites: Sequence[str] | None, rows: Any, dtype: Any
    ) -> CaptureSpec:
        if layers is not None:
            layers = layer_ids(layers, "layers", f"the model has layers 0 to {self._session.num_layers - 1}")
        return CaptureSpec(
            sites=_one_of(site, sites),  # pyright: ignore[reportArgumentType]
            layers=layers,
            select=SelectSpec.read(rows, "rows"),
            dtype=as_storage_dtype(dtype),
        )

    def generate(
        self,
        prompts: Any,
        *,
        max_tokens: int,
        steering: Any = None,
        progress: bool | Progress = False,
        add_special_tokens: bool = True,
        **generation: Any,
    ) -> list[Completion]:
        """What the model says after each of `prompts`, in order, each steered in its own way.

        steering: a spec for all, or a list with one (or None, or False) per prompt; None takes the model's default, a
        spec replaces it, False switches it off. generation: any field of GenerationParams; greedy unless temperature,
        top_p, top_k or seed is given. Raises PartialBatchError, which has the others, when some items failed.
        """
        params = GenerationParams(max_tokens=max_tokens, **generation)
        items = self._items(prompts, steering, add_special_tokens)
        with _shown(progress, "generating") as callback:
            found = self._session.generate(items, params, call=0, progress=callback)
        if failures := {index: one.error for index, one in enumerate(found) if one.error is not None}:
            raise PartialBatchError({i: one for i, one in enumerate(found) if i not in failures}, failures)
        return found

    def stream(
        self,
        prompt: Any,
        *,
        max_tokens: int,
        steering: Any = None,
        layers: Any = None,
        site: str | None = None,
        sites: Sequence[str] | None = None,
        rows: SelectSpec | str | dict[str, Any] | None = None,
        dtype: Any = None,
        add_special_tokens: bool = True,
        **generation: Any,
    ) -> Iterator[Chunk]:
        """One prompt's completion, a chunk for each token; the last has the whole `completion`.

        With layers, site, sites or rows it also has the activations, `capture`. Everything is checked at once; the
        model runs as the iterator is read, and is free again when that is exhausted or closed.
        """
        items = self._items(prompt, steering, add_special_tokens)
        if len(items) != 1:
            raise spec_error("E_BAD_PARAM", "prompt", f"a stream takes one prompt, got {len(items)}: use generate")
        asked = any(one is not None for one in (layers, site, sites, rows))
        spec = self._capture_spec(layers, site, sites, rows, dtype) if asked else None
        params = GenerationParams(max_tokens=max_tokens, **generation)
        return self._session.stream(items[0], params, spec, call=0)

    def score(
        self,
        prompts: Any,
        references: Any,
        *,
        steering: Any = None,
        progress: bool | Progress = False,
        add_special_tokens: bool = True,
        extra: dict[str, Any] | None = None,
    ) -> Tensor:
        """Log-probabilities of each reference after its prompt, `[prompts, reference length]`, float32.

        references: one per prompt (or one for all), as token ids or texts, all of one length in tokens. steering: as in
        `generate`; rows from the prompt's length on are generation. extra: arguments of the model's forward.
        """
        prepared = self.prepare(prompts, add_special_tokens=add_special_tokens)
        ids = reference_ids(references, len(prepared), self.tokenizer)
        specs = self._each_steering(steering, len(prepared))
        items = [
            ScoringItem(prompt, reference, _entries(spec))
            for prompt, reference, spec in zip(prepared, ids, specs, strict=True)
        ]
        with _shown(progress, "scoring") as callback:
            return self._session.score(items, GenerationParams(extra=extra or {}), progress=callback)

    def _items(self, prompts: Any, steering: Any, add_special_tokens: bool) -> list[GenerationItem]:
        prepared = self.prepare(prompts, add_special_tokens=add_special_tokens)
        specs = self._each_steering(steering, len(prepared))
        return steered_items(prepared, specs)

    def _each_steering(self, steering: Any, count: int) -> list[InterventionSpec | None]:
        """One spec per prompt of what a caller gave for all of them, or for each."""
        if isinstance(steering, list | tuple) and not any(is_mapping(one) and "kind" in one for one in steering):
            if len(steering) != count:
                raise spec_error("E_BAD_PARAM", "steering", f"{len(steering)} specs for {count} prompts")
            return [self._one_steering(one, f"steering[{place}]") for place, one in enumerate(steering)]
        return [self._one_steering(steering, "steering")] * count

    def _one_steering(self, steering: Any, path: str) -> InterventionSpec | None:
        if steering is None:
            return self._default
        if steering is False:
            return None
        spec = InterventionSpec.read(steering, path)
        self.capabilities.require_spec(spec, path)
        return spec

    def prepare(self, prompts: Any, *, add_special_tokens: bool = True) -> list[PreparedPrompt]:
        """Prompts of any form as PreparedPrompts: the ids that the model will consume."""
        tokenizer = self.tokenizer
        return [
            prepare(prompt, tokenizer, index=index, add_special_tokens=add_special_tokens)
            for index, prompt in enumerate(prompt_list(prompts))
        ]

    def close(self) -> None:
        """Close the session and release the engine; idempotent."""
        self._session.close()
        self._backend.release()

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
