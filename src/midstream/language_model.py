"""`ms.load` and LanguageModel: the face of midstream, thin over the seam of core/backend.py."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from .core.backend import Backend, BackendCapabilities, BackendSpec, ModelFacts, Progress, Session
from .core.capture import CaptureSpec, as_storage_dtype
from .core.errors import ModelLoadError, spec_error
from .core.generation import GenerationParams
from .core.prompts import PreparedPrompt, prepare, prompt_list
from .core.result import CaptureResult
from .core.select import SelectSpec
from .core.sites import layer_ids


def load(
    model: Any,
    *,
    backend: str = "huggingface",
    dtype: Any = "auto",
    device: str = "auto",
    tokenizer: Any = None,
    **options: Any,
) -> LanguageModel:
    """A model to capture from: a folder, a hub id, `smollm2` (bundled), or a loaded transformers model.

    dtype, device: of a model loaded here; `auto` takes the checkpoint's own, and a GPU where there is one. options:
    hf_model_kwargs, device_map, tokenizer_name_or_path, trust_remote_code. Raises ModelLoadError when the model
    cannot be found or fails its self-test.
    """
    if backend != "huggingface":
        raise spec_error("E_UNKNOWN_KIND", "backend", f"no backend {backend!r}; there is: huggingface")
    from .backends.huggingface.backend import HuggingFaceBackend

    if not isinstance(model, str) and not hasattr(model, "__fspath__"):
        given = {"dtype": dtype, "device": device, **options}
        if clash := [name for name, value in given.items() if value != "auto"]:
            message = f"the model is loaded already: {', '.join(clash)} would change nothing"
            raise spec_error("E_BAD_PARAM", clash[0], message)
        if not hasattr(model, "config"):
            message = f"a {type(model).__name__} is no transformers model: give a folder, a hub id, or a model"
            raise ModelLoadError(message)
        reference = getattr(model.config, "_name_or_path", "") or type(model).__name__
        spec = BackendSpec("huggingface", reference)
        return LanguageModel(HuggingFaceBackend.adopt(spec, lambda: model, lambda: tokenizer))
    given = {"dtype": str(dtype).removeprefix("torch."), "device": device, **options}
    spec = BackendSpec("huggingface", str(model), given)
    return LanguageModel(HuggingFaceBackend(spec, tokenizer))


def _one_of(site: str | None, sites: Sequence[str] | None) -> Sequence[str]:
    """The sites of a capture, given by one parameter or the other."""
    if site is not None and sites is not None:
        raise spec_error("E_SITE", "site", f"site {site!r} and sites {sites!r}: give one of them")
    return sites if sites is not None else [site or "resid_post"]


def _shown(progress: bool | Progress) -> AbstractContextManager[Progress | None]:
    """A callback for `progress`: a bar on stderr for True, none for False, else the caller's own."""
    if progress is True:
        from .progress import token_progress

        return token_progress()
    return nullcontext(progress or None)


class LanguageModel:
    """A loaded model with one open session; a context manager that closes it.

    >>> import midstream as ms
    >>> with ms.load("smollm2") as lm:                                        # doctest: +SKIP
    ...     cap = lm.capture(["What is steering?"], layers=[10, 20], rows="prompt[-1]")
    ...     cap.rows(10).shape
    torch.Size([1, 576])
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
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

    @property
    def session(self) -> Session:
        """The open session behind this face."""
        return self._session

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
        progress: bool | Progress = False,
        add_special_tokens: bool = True,
        **generation: Any,
    ) -> CaptureResult:
        """Labelled activations of `prompts`, and with max_tokens > 1 of what the model generates after them.

        prompts: one or a list of text, token ids, chat messages, or dicts with prompt_token_ids, multi_modal_data,
        cache_salt. layers: ids of blocks, None for all. site or sites: what to read ("resid_post" unless given). rows:
        which rows, in the row grammar, None for all. dtype: the storage type, None for the model's bits. generation:
        any field of GenerationParams. With max_tokens=1 only the prompts run and no token is sampled.
        """
        if layers is not None:
            layers = layer_ids(layers, "layers", f"the model has layers 0 to {self._session.num_layers - 1}")
        spec = CaptureSpec(
            sites=_one_of(site, sites),  # pyright: ignore[reportArgumentType]
            layers=layers,
            select=SelectSpec.read(rows, "rows"),
            dtype=as_storage_dtype(dtype),
        )
        params = GenerationParams(max_tokens=max_tokens, **generation)
        each = None
        if per_prompt_rows is not None:
            each = [SelectSpec.read(one, f"per_prompt_rows[{place}]") for place, one in enumerate(per_prompt_rows)]
        prepared = self.prepare(prompts, add_special_tokens=add_special_tokens)
        with _shown(progress) as callback:
            # each call counts from 0, so that the same call with the same seed gives the same text
            return self._session.capture(
                prepared, spec, per_prompt_select=each, params=params, call=0, progress=callback
            )

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
