"""One exclusive use of a model in this process: captures, checked before the model runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch

from midstream.core.backend import ModelFacts, Progress
from midstream.core.capture import CaptureReceipt, CaptureSpec, Labels
from midstream.core.errors import CaptureError, PromptError, SessionClosedError, spec_error
from midstream.core.generation import Completion, GenerationParams, derive_seed
from midstream.core.prompts import PreparedPrompt
from midstream.core.result import CaptureResult
from midstream.core.select import SelectSpec
from midstream.core.sites import Site, SiteLayout, layer_set
from midstream.taps.locate import TapMap, text_config
from midstream.taps.recorder import Recorded, RecordedRequest, Recorder

from .decoding import DecodeLoop, Growing, Stopping, cut_at_stop, decode_batches, eos_ids
from .facts import compute_dtype, context_length, model_facts
from .forward import run_multimodal, run_prompts
from .hooks import tapped

_LATER = ("logprobs", "prompt_logprobs", "constraint", "extra")


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
        sample: bool = False,
        call: int | None = None,
        progress: Progress | None = None,
    ) -> CaptureResult:
        """The rows that `spec` selects, of the prompts and, with max_tokens > 1, of what is generated after them.

        layers, mode, location: the short form, where there is no spec (`CaptureSpec.short`).
        per_prompt_select: one per prompt, None keeping the spec's. sample: generate also when max_tokens is 1. call:
        the call's number in seeds; None counts the session's own. Warns when no row was selected.
        Raises SpecError, UnsupportedOperationError or PromptError before the model runs.
        """
        self._open()
        spec = CaptureSpec.short(layers, mode, location) if spec is None else spec
        params = params or GenerationParams()
        if not prompts:
            raise spec_error("E_BAD_PARAM", "prompts", "no prompts: a capture needs at least one")
        sites = self.site_layers(spec)
        self._check_params(params)
        self._check_prompts(prompts, params.max_tokens)
        selects = _selects(spec.select, per_prompt_select, len(prompts))
        generating = sample or params.max_tokens > 1
        choices = params.n if generating else 1
        requests = [
            RecordedRequest(index, choice, prompt.token_ids, len(prompt.token_ids) + params.max_tokens - 1, select,
                            with_prompt=choice == 0)
            for index, (prompt, select) in enumerate(zip(prompts, selects, strict=True))
            for choice in range(choices)
        ]  # fmt: skip
        recorder = Recorder(sites, requests, getattr(torch, spec.dtype) if spec.dtype else None)
        layouts: dict[Site, dict[int, SiteLayout]] = {
            site: {layer: self.taps.layouts[site][layer] for layer in layers} for site, layers in sites.items()
        }
        _check_memory(recorder.slots, layouts, spec, self.model)
        tokens = _Tokens(sum(len(prompt.token_ids) for prompt in prompts), progress)
        with tapped(self.taps, sites, recorder.record, stop=not generating):
            if generating:
                grown = self._decode(prompts, params, choices, recorder, tokens, self._call_number(call))
                recorded = recorder.finish([one.token_ids for one in grown])
                outputs = self._completions(grown, params, choices)
            else:
                self._read(prompts, recorder, tokens)
                recorded = recorder.finish()
                outputs = [
                    Completion(prompt.token_ids, receipt=receipt)
                    for prompt, receipt in zip(prompts, _receipts(recorded, len(prompts)), strict=True)
                ]
        if generating:
            receipts = _receipts(recorded, len(prompts))
            outputs = [replace(output, receipt=receipt) for output, receipt in zip(outputs, receipts, strict=True)]
        return CaptureResult(
            recorded.labels,
            recorded.tensors,
            layouts,
            outputs,
            recorded.receipt,
            spec.model_copy(update={"layers": tuple(sorted({layer for layers in sites.values() for layer in layers}))}),
            self._model_ref,
            model_facts(self.model, self._model_ref).model_fingerprint,
            recorded.errors,
            token_texts(self.tokenizer),
        )

    def _call_number(self, given: int | None) -> int:
        if given is not None:
            return given
        self._calls += 1
        return self._calls - 1

    def site_layers(self, spec: CaptureSpec) -> dict[Site, tuple[int, ...]]:
        """Each site's layers, checked against the model: E_SITE and E_LAYER_RANGE name what there is."""
        return {
            site: layer_set(spec.layers, self.taps.layers_of(site), "capture.layers", f"{site} of this model")
            for site in spec.sites
        }

    def _check_params(self, params: GenerationParams) -> None:
        for name in _LATER:
            if getattr(params, name) not in (None, {}):
                raise spec_error("E_UNKNOWN_KIND", f"generation.{name}", f"a capture in process takes no {name}")
        if params.stop and self.tokenizer is None:
            raise spec_error("E_BAD_PARAM", "generation.stop", "stop strings need a tokenizer: use stop_token_ids")

    def _check_prompts(self, prompts: Sequence[PreparedPrompt], max_tokens: int) -> None:
        model = self.model
        vocabulary, context = text_config(model).vocab_size, context_length(model)
        for index, prompt in enumerate(prompts):
            if (largest := max(prompt.token_ids)) >= vocabulary:
                raise PromptError(f"prompt {index} has token id {largest}; the model has ids 0 to {vocabulary - 1}")
            needed = len(prompt.token_ids) + max_tokens - 1
            if context is not None and needed > context:
                raise PromptError(
                    f"prompt {index} has {len(prompt.token_ids)} tokens and max_tokens is {max_tokens}: "
                    f"{needed} positions, but the context has {context}; shorten it"
                )
            _check_multimodal(model, index, prompt.multi_modal_data)

    def _read(self, prompts: Sequence[PreparedPrompt], recorder: Recorder, tokens: _Tokens) -> None:
        """Prompts alone: no token is sampled and no logits are computed."""
        plain = [index for index, prompt in enumerate(prompts) if not prompt.multi_modal_data]
        run_prompts(self.taps.anatomy, recorder, {index: prompts[index].token_ids for index in plain}, tokens.add)
        for index, prompt in enumerate(prompts):
            if prompt.multi_modal_data:
                with _naming(index):
                    run_multimodal(self.taps.anatomy, recorder, index, prompt.token_ids, dict(prompt.multi_modal_data))
                tokens.add(len(prompt.token_ids))

    def _decode(
        self,
        prompts: Sequence[PreparedPrompt],
        params: GenerationParams,
        choices: int,
        recorder: Recorder,
        tokens: _Tokens,
        call: int,
    ) -> list[Growing]:
        stopping = Stopping(params, eos_ids(self.model), _decoder(self.tokenizer))
        loop = DecodeLoop(self.model, recorder, params, stopping)
        grown: list[list[Growing]] = []
        for index, prompt in enumerate(prompts):
            place = 0 if params.seed_scope == "dispatch" else index
            seeds = [derive_seed(params.seed, call, place, choice) for choice in range(choices)]
            grown.append(
                [Growing(index * choices + choice, prompt.token_ids, seed) for choice, seed in enumerate(seeds)]
            )
        plain = [index for index, prompt in enumerate(prompts) if not prompt.multi_modal_data]
        for batch in decode_batches({index: prompts[index].token_ids for index in plain}, choices, loop.padded):
            loop.run([grown[index] for index in batch])
            tokens.add(sum(len(prompts[index].token_ids) for index in batch))
        for index, prompt in enumerate(prompts):
            if prompt.multi_modal_data:
                with _naming(index):
                    loop.run([grown[index]], dict(prompt.multi_modal_data))
                tokens.add(len(prompt.token_ids))
        return [one for row in grown for one in row]

    def _completions(self, grown: Sequence[Growing], params: GenerationParams, choices: int) -> list[Completion]:
        decode = _decoder(self.tokenizer)
        done = [
            Completion(
                prompt_token_ids=one.prompt,
                token_ids=tuple(one.token_ids),
                text=None if decode is None else cut_at_stop(decode(one.token_ids), params.stop),
                finish_reason=one.finish_reason,
            )
            for one in grown
        ]
        firsts = [done[start : start + choices] for start in range(0, len(done), choices)]
        return [replace(group[0], choices=tuple(group)) if choices > 1 else group[0] for group in firsts]


@contextmanager
def _naming(index: int) -> Generator[None]:
    """What a model says of one prompt's images or the like, said of that prompt."""
    try:
        yield
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise PromptError(f"prompt {index}: the model refuses it: {first[0]:.200}") from error


class _Tokens:
    """Counts settled prompt tokens for a progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


def _selects(
    common: SelectSpec | None, each: Sequence[SelectSpec | None] | None, count: int
) -> Sequence[SelectSpec | None]:
    if each is None:
        return [common] * count
    if len(each) != count:
        raise spec_error("E_SELECTION", "per_prompt_rows", f"{len(each)} row selections for {count} prompts")
    return [common if one is None else one for one in each]


def _receipts(recorded: Recorded, count: int) -> list[CaptureReceipt]:
    """One receipt per prompt, counted from the labels."""
    return [CaptureReceipt(rows, rows) for rows in rows_per_sample(recorded.labels, count)]


def rows_per_sample(labels: Labels, count: int) -> list[int]:
    """How many rows each of `count` samples has."""
    return torch.bincount(torch.from_numpy(labels.sample), minlength=count).tolist()


def _check_multimodal(model: Any, index: int, data: Mapping[str, Any]) -> None:
    """In process, multi_modal_data is tensors by the names of the model's own forward arguments."""
    import inspect

    names = inspect.signature(model.forward).parameters
    if unknown := [name for name in data if name not in names or name in ("input_ids", "inputs_embeds")]:
        takes = [name for name in names if "pixel" in name or "image" in name or "audio" in name or "video" in name]
        raise PromptError(
            f"prompt {index}: {type(model).__name__} takes no {', '.join(unknown)}; "
            f"give tensors as its processor makes them: {', '.join(takes) or 'it reads text alone'}"
        )


def _check_memory(slots: int, layouts: Mapping[Site, Mapping[int, SiteLayout]], spec: CaptureSpec, model: Any) -> None:
    """Refuse a capture that this machine's memory cannot hold, before the model runs."""
    size = getattr(torch, spec.dtype or compute_dtype(model)).itemsize
    width = sum(layout.width for layers in layouts.values() for layout in layers.values())
    needed, have = slots * width * size, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > have:
        raise CaptureError(
            f"{slots} rows of {width} values are {needed / 2**30:.1f} GiB, and this machine has {have / 2**30:.1f}: "
            "choose fewer rows or layers, or fewer prompts a call"
        )


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
