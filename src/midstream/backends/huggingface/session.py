"""One exclusive use of a model in this process: captures, checked before the model runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from midstream.core.backend import ModelFacts, Progress
from midstream.core.capture import CaptureSpec
from midstream.core.errors import BusyError, PromptError, SessionClosedError, spec_error
from midstream.core.generation import Completion, GenerationParams, derive_seed
from midstream.core.prompts import PreparedPrompt
from midstream.core.result import CaptureResult
from midstream.core.select import SelectSpec
from midstream.core.sites import Site, SiteLayout, layer_set
from midstream.taps.locate import TapMap
from midstream.taps.recorder import RecordedRequest, Recorder

from .checks import check_memory, check_params, check_prompts, each_select
from .decoding import DecodeLoop, Growing, Stopping, cut_at_stop, decode_batches, eos_ids
from .facts import fingerprint, model_facts
from .forward import Done, rotary_boundary, run_multimodal, run_prompts, split_at
from .hooks import tapped


class HuggingFaceSession:
    """A session on a loaded model; `close` gives the backend back. The model's weights and hooks are not changed."""

    def __init__(
        self,
        taps_of: Callable[[], TapMap],
        tokenizer_of: Callable[[], Any],
        model_ref: str,
        on_close: Callable[[], None],
    ) -> None:
        self._taps_of = taps_of
        self._tokenizer_of = tokenizer_of
        self._model_ref = model_ref
        self._on_close = on_close
        self._closed = False
        self._calls = 0

    @property
    def taps(self) -> TapMap:
        """The taps of the model as it is now."""
        self._open()
        return self._taps_of()

    @property
    def model(self) -> Any:
        """The transformers model itself."""
        return self.taps.anatomy.model

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer, or None."""
        self._open()
        return self._tokenizer_of()

    @property
    def num_layers(self) -> int:
        """How many decoder blocks the model has."""
        return len(self.taps.anatomy.blocks)

    @property
    def layout(self) -> ModelFacts:
        """The model's facts, read off it on each access."""
        return model_facts(self.model, self._model_ref)

    def close(self) -> None:
        """End the session; idempotent."""
        if not self._closed:
            self._closed = True
            self._on_close()

    def _open(self) -> None:
        if self._closed:
            raise SessionClosedError("this session is closed: open another, or load the model again")

    # --- capture

    def capture(
        self,
        prompts: Sequence[PreparedPrompt],
        spec: CaptureSpec | None = None,
        *,
        layers: Any = None,
        mode: Literal["all_tokens", "last_token"] = "all_tokens",
        location: Literal["layer_output", "layer_input"] = "layer_output",
        per_prompt_select: Sequence[SelectSpec | None] | None = None,
        params: GenerationParams | None = None,
        call: int | None = None,
        progress: Progress | None = None,
    ) -> CaptureResult:
        """The rows that `spec` selects, of the prompts and, with max_tokens > 1, of what is generated after them.

        layers, mode, location: the short form, where there is no spec (`CaptureSpec.short`).
        per_prompt_select: one per prompt, None keeping the spec's. call: the call's number in seeds; None counts the
        session's own. With max_tokens and n of 1 only the prompts run: no token is sampled. Warns when no row was
        selected. Raises SpecError, UnsupportedOperationError or PromptError before the model runs, BusyError while
        another capture of this model does.
        """
        self._open()
        spec = CaptureSpec.short(layers, mode, location) if spec is None else spec
        params = params or GenerationParams()
        if not prompts:
            raise spec_error("E_BAD_PARAM", "prompts", "no prompts: a capture needs at least one")
        taps, tokenizer = self.taps, self.tokenizer
        model: Any = taps.anatomy.model
        sites = site_layers(taps, spec)
        check_params(params, tokenizer)
        check_prompts(model, prompts, params.max_tokens)
        selects = each_select(spec.select, per_prompt_select, len(prompts))
        generating = params.max_tokens > 1 or params.n > 1
        requests = [
            RecordedRequest(index, choice, prompt.token_ids, len(prompt.token_ids) + params.max_tokens - 1, select,
                            with_prompt=choice == 0)
            for index, (prompt, select) in enumerate(zip(prompts, selects, strict=True))
            for choice in range(params.n)
        ]  # fmt: skip
        recorder = Recorder(sites, requests, getattr(torch, spec.dtype) if spec.dtype else None)
        layouts: dict[Site, dict[int, SiteLayout]] = {
            site: {layer: taps.layouts[site][layer] for layer in of} for site, of in sites.items()
        }
        check_memory(recorder.certain, layouts, spec, model)
        prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        new_tokens = len(prompts) * params.n * params.max_tokens if generating else 0
        tokens = _Tokens(prompt_tokens + new_tokens, progress)
        with alone_on(model), tapped(taps, sites, recorder.record, stop=not generating):
            if generating:
                call = self._next_call() if call is None else call
                grown = decode_prompts(taps, prompts, params, recorder, call, tokenizer, tokens.add)
                recorded = recorder.finish([one.token_ids for one in grown])
                outputs = completions(grown, params, tokenizer)
            else:
                read_prompts(taps, prompts, recorder, tokens.add)
                recorded = recorder.finish()
                outputs = [Completion(prompt.token_ids) for prompt in prompts]
        if not recorded.receipt.selected:
            warnings.warn(f"no row was selected by {spec.select or 'the per-prompt rows'}", stacklevel=3)
        return CaptureResult(
            recorded.labels,
            recorded.tensors,
            layouts,
            [replace(one, receipt=receipt) for one, receipt in zip(outputs, recorded.receipts, strict=True)],
            recorded.receipt,
            spec,
            self._model_ref,
            fingerprint(model),
            recorded.errors,
            token_texts(tokenizer),
        )

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls - 1


def site_layers(taps: TapMap, spec: CaptureSpec) -> dict[Site, tuple[int, ...]]:
    """Each site's layers, checked against the model: E_SITE and E_LAYER_RANGE name what there is."""
    return {
        site: layer_set(spec.layers, taps.layers_of(site), "capture.layers", f"{site} of this model")
        for site in spec.sites
    }


_IN_USE: WeakKeyDictionary[Any, Lock] = WeakKeyDictionary()


@contextmanager
def alone_on(model: Any) -> Generator[None]:
    """Hooks of two captures on one model would see each other's rows: the second is refused at once."""
    lock = _IN_USE.setdefault(model, Lock())
    if not lock.acquire(blocking=False):
        raise BusyError("this model is busy with another capture: wait for it, or load the model twice")
    try:
        yield
    finally:
        lock.release()


def read_prompts(taps: TapMap, prompts: Sequence[PreparedPrompt], recorder: Recorder, done: Done) -> None:
    """Prompts alone: no token is sampled and no logits are computed."""
    plain = {index: prompt.token_ids for index, prompt in enumerate(prompts) if not prompt.multi_modal_data}
    run_prompts(taps, recorder, plain, done)
    for index, prompt in enumerate(prompts):
        if prompt.multi_modal_data:
            with _failing_alone(index, recorder):
                run_multimodal(taps.anatomy, recorder, index, prompt.token_ids, prompt.multi_modal_data)
            done(len(prompt.token_ids))


def decode_prompts(
    taps: TapMap,
    prompts: Sequence[PreparedPrompt],
    params: GenerationParams,
    recorder: Recorder,
    call: int,
    tokenizer: Any,
    done: Done,
) -> list[Growing]:
    """Prompts and what is generated after them; every choice of every prompt, in order."""
    stopping = Stopping(params, eos_ids(taps.anatomy.model), _decoder(tokenizer))
    loop = DecodeLoop(taps, recorder, params, stopping, done)
    grown: list[list[Growing]] = []
    for index, prompt in enumerate(prompts):
        place = 0 if params.seed_scope == "dispatch" else index
        seeds = [derive_seed(params.seed, call, place, choice) for choice in range(params.n)]
        grown.append([Growing(index * params.n + choice, prompt.token_ids, seed) for choice, seed in enumerate(seeds)])
    plain = {index: prompt.token_ids for index, prompt in enumerate(prompts) if not prompt.multi_modal_data}
    for part in split_at(rotary_boundary(taps.anatomy.model), plain):
        for batch in decode_batches(part, params.n, loop.padded):
            loop.run([grown[index] for index in batch])
    for index, prompt in enumerate(prompts):
        if prompt.multi_modal_data:
            with _failing_alone(index, recorder):
                loop.run([grown[index]], dict(prompt.multi_modal_data))
    return [one for row in grown for one in row]


def completions(grown: Sequence[Growing], params: GenerationParams, tokenizer: Any) -> list[Completion]:
    """One Completion per prompt, with its choices where n > 1."""
    decode = _decoder(tokenizer)
    done = [
        Completion(
            prompt_token_ids=one.prompt,
            token_ids=tuple(one.token_ids),
            text=None if decode is None else _text(decode(one.token_ids), one, params),
            finish_reason=one.finish_reason,
        )
        for one in grown
    ]
    groups = [done[start : start + params.n] for start in range(0, len(done), params.n)]
    return [replace(group[0], choices=tuple(group)) if params.n > 1 else group[0] for group in groups]


def _text(text: str, one: Growing, params: GenerationParams) -> str:
    """The text of a sequence, which ends before the stop string that ended it."""
    ended_by_text = one.finish_reason == "stop" and one.token_ids[-1] not in params.stop_token_ids
    return cut_at_stop(text, params.stop) if ended_by_text else text


@contextmanager
def _failing_alone(sample: int, recorder: Recorder) -> Generator[None]:
    """What a model says of one prompt's images or the like fails that prompt; the others stay."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        refused = PromptError(f"prompt {sample}: the model refuses it: {said[-1]:.200}")
        refused.__cause__ = error
        recorder.fail(sample, refused)


class _Tokens:
    """Counts settled tokens for a progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str] | None:
    """Ids → text without special tokens."""
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def token_texts(tokenizer: Any) -> Callable[[Sequence[int]], list[str]] | None:
    """Ids → the text of each alone, special tokens shown."""
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.batch_decode([[token] for token in ids])
