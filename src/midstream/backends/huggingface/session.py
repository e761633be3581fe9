"""One exclusive use of a model in this process: capture, generate, score; all checked before the model runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from midstream.core.backend import ModelFacts, Progress, Tokens
from midstream.core.capture import CaptureSpec
from midstream.core.errors import BusyError, SessionClosedError, spec_error
from midstream.core.generation import Completion, GenerationParams
from midstream.core.interventions import InterventionSpec, OpReceipt, warn_of_idle
from midstream.core.items import (
    GenerationItem,
    ScoringItem,
    StateEntry,
    check_references,
    check_scored,
    specs_of,
    steered_items,
)
from midstream.core.prompts import PreparedPrompt
from midstream.core.result import CaptureResult
from midstream.core.select import SelectSpec
from midstream.core.sites import site_layers
from midstream.core.stream import Chunk
from midstream.formats.artifacts import ArtifactRegistry
from midstream.taps.locate import TapMap, text_config
from midstream.taps.passes import Passes

from .capturing import Capturing, samples
from .checks import check_params, check_prompts
from .compiled import CompiledBlocks, check_compilable
from .decoding import model_eos_ids
from .entries import Follower, hooked
from .facts import model_facts
from .generating import completions, decode_jobs, decode_loop, growing, steerer_of, steering_receipts
from .hooks import steered, tapped
from .jobs import Job, Workshop, hooks_of
from .own_generate import check_extra, generate_alone, steered_sites
from .scoring import Scorer
from .steertest import prove_steering
from .streaming import chunks_of
from .structured import Constrainer


class HuggingFaceSession:
    """A session on a loaded model; `close` gives the backend back. The model's weights and hooks are not changed."""

    def __init__(
        self,
        taps_of: Callable[[], TapMap],
        tokenizer_of: Callable[[], Any],
        model_ref: str,
        on_close: Callable[[], None],
        registry: ArtifactRegistry,
    ) -> None:
        self._taps_of = taps_of
        self._tokenizer_of = tokenizer_of
        self._model_ref = model_ref
        self._on_close = on_close
        self.registry = registry
        self._grammars: tuple[Any, Any, Constrainer] | None = None
        self._closed = False
        self._calls = 0
        self._compiled: CompiledBlocks | None = None

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
        steering: Sequence[InterventionSpec | None] | None = None,
        params: GenerationParams | None = None,
        call: int | None = None,
        progress: Progress | None = None,
    ) -> CaptureResult:
        """The rows that `spec` selects, of the prompts and, with max_tokens > 1, of what is generated after them.

        layers, mode, location: the short form, where there is no spec (`CaptureSpec.short`).
        per_prompt_select: one per prompt, None keeping the spec's. steering: one per prompt, None for none. call: the
        call's number in seeds; None counts the session's own. With max_tokens and n of 1 only the prompts run: no
        token is sampled. Warns when no row was selected. Raises SpecError, UnsupportedOperationError or PromptError
        before the model runs, BusyError while another call on this model does.
        """
        self._open()
        spec = CaptureSpec.short(layers, mode, location) if spec is None else spec
        params = params or GenerationParams()
        if not prompts:
            raise spec_error("E_BAD_PARAM", "prompts", "no prompts: a capture needs at least one")
        if params.extra:
            raise spec_error("E_UNKNOWN_KIND", "generation.extra", "a capture takes no extra: lm.generate does")
        jobs = self._generation_jobs(steered_items(prompts, steering), params, call)
        capturing = Capturing.of(self.taps, spec, jobs, per_prompt_select, params, self._model_ref, self.tokenizer)
        passes = Passes(capturing.recorder, steerer_of(jobs, params.n))
        done = self._tokens(jobs, params if samples(params) else None, progress).add
        if self._compiled is not None:
            self._check_compiled(capturing, passes, jobs, samples(params))
        with self._running(passes, capturing, stop=not samples(params)):
            if not samples(params):
                result = capturing.read_prompts(jobs, passes, done, compiled=self._compiled is not None)
            else:
                grown = growing(jobs, params.n)
                decode_jobs(self.taps, jobs, grown, decode_loop(self.taps, passes, params, self.tokenizer, done))
                result = capturing.after_decoding(jobs, grown, passes)
        warn_of_idle(one.steering for one in result.outputs)
        return result

    @contextmanager
    def compiled(self, spec: CaptureSpec) -> Generator[None]:
        """While open, captures of prompts alone run on compiled blocks, down to the deepest that `spec` asks for.

        That pays for long runs: making them takes half a minute or more. Rows differ from others by rounding.
        E_UNKNOWN_KIND for sites inside of blocks, and for models that are not listed; MidstreamError where nothing can
        be compiled, as without a C++ compiler.
        """
        self._open()
        taps = self.taps
        with alone_on(self.model):
            self._compiled = CompiledBlocks(taps, site_layers(spec.sites, spec.layers, taps.layouts, taps.refused))
        try:
            yield
        finally:
            self._compiled = None

    def check_compilable(self, spec: CaptureSpec) -> None:
        """E_UNKNOWN_KIND where `compiled` would refuse `spec`."""
        taps = self.taps
        check_compilable(taps, site_layers(spec.sites, spec.layers, taps.layouts, taps.refused))

    def _check_compiled(self, capturing: Capturing, passes: Passes, jobs: Sequence[Job], decodes: bool) -> None:
        """E_UNKNOWN_KIND for a capture that the compiled blocks are not for."""
        assert self._compiled is not None, "asked for by the caller"
        other = decodes or passes.steerer is not None or any(job.prompt.multi_modal_data for job in jobs)
        if other or not self._compiled.fit(capturing.sites):
            message = (
                "these blocks are compiled for other captures: of prompts alone, unsteered, at the sites named there"
            )
            raise spec_error("E_UNKNOWN_KIND", "compiled", message)

    # --- generate

    def generate(
        self,
        items: Sequence[GenerationItem],
        params: GenerationParams,
        *,
        call: int | None = None,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """One Completion per item, in order; a mixed batch gives what each item gives alone.

        Items that differ in steering, seeds and constraints share every pass; those with plain hooks, images or
        `params.extra` go one by one. An item that failed has its `error`, and the others are whole. Warns once of ops
        that selected no row. Raises before the model runs what it cannot do.
        """
        self._open()
        if not items:
            return []
        jobs = self._generation_jobs(items, params, call)
        if params.extra:
            check_extra(self.model, params)
            return self._by_own_generate(jobs, params)
        passes = Passes(steerer=steerer_of(jobs, params.n))
        grown = growing(jobs, params.n)
        loop = decode_loop(self.taps, passes, params, self.tokenizer, self._tokens(jobs, params, progress).add)
        with self._running(passes):
            errors = decode_jobs(self.taps, jobs, grown, loop)
        receipts = steering_receipts(passes.steerer, grown)
        found = completions(grown, params, self.tokenizer, steering=receipts, errors=errors)
        warn_of_idle(one.steering for one in found)
        return found

    def stream(
        self,
        item: GenerationItem,
        params: GenerationParams,
        spec: CaptureSpec | None = None,
        *,
        call: int | None = None,
    ) -> Iterator[Chunk]:
        """One item a token at a time; the last chunk has the whole completion, and with `spec` the activations.

        Everything is checked before the iterator is returned; the model is in use until it is exhausted or closed.
        """
        self._open()
        if params.n > 1 or params.extra:
            name = "n" if params.n > 1 else "extra"
            raise spec_error("E_UNKNOWN_KIND", f"generation.{name}", f"a stream takes no {name}: use lm.generate")
        jobs = self._generation_jobs([item], params, call)
        capturing = None
        if spec is not None:
            capturing = Capturing.of(self.taps, spec, jobs, None, params, self._model_ref, self.tokenizer)
        passes = Passes(None if capturing is None else capturing.recorder, steerer_of(jobs))
        loop = decode_loop(self.taps, passes, params, self.tokenizer, lambda _: None)
        return self._stream(jobs[0], loop, capturing)

    def _stream(self, job: Job, loop: Any, capturing: Capturing | None) -> Iterator[Chunk]:
        with self._running(loop.passes, capturing), hooked(self.model, job.hooks):
            grown = growing([job], 1)
            yield from chunks_of(grown, loop, dict(job.prompt.multi_modal_data) or None, self.tokenizer)
            if capturing is None:
                receipts = steering_receipts(loop.passes.steerer, grown)
                found = completions(grown, loop.params, self.tokenizer, steering=receipts)
                warn_of_idle(one.steering for one in found)
                yield Chunk(completion=found[0])
            else:
                result = capturing.after_decoding([job], grown, loop.passes)
                warn_of_idle(one.steering for one in result.outputs)
                yield Chunk(completion=result.outputs[0], capture=result)

    def _by_own_generate(self, jobs: Sequence[Job], params: GenerationParams) -> list[Completion]:
        grown, receipts = growing(jobs, params.n), list[tuple[OpReceipt, ...]]()
        with alone_on(self.model):
            prove_steering(self.taps, {one.op.site for job in jobs for one in job.ops})
            for job, choices in zip(jobs, grown, strict=True):
                receipts.append(generate_alone(self.taps, job, choices, params))
        found = completions(grown, params, self.tokenizer, steering=receipts)
        warn_of_idle(one.steering for one in found)
        return found

    # --- score

    def score(
        self, items: Sequence[ScoringItem], params: GenerationParams | None = None, *, progress: Progress | None = None
    ) -> Tensor:
        """Log-probabilities of each item's reference after its prompt, `[items, reference length]`, float32.

        All references have one length. params: `extra` alone, which reaches the forward. Rows from the prompt's
        length on are generation. No items give `[0, 0]`.
        """
        self._open()
        params = params or GenerationParams()
        check_scored(items, params)
        if not items:
            return torch.empty((0, 0))
        length = check_references(items, text_config(self.model).vocab_size)
        check_prompts(self.model, [item.prompt for item in items], max(1, length))
        jobs = self._workshop().scoring_jobs(items)
        if not length:
            return torch.empty((len(items), 0))
        passes = Passes(steerer=steerer_of(jobs))
        scorer = Scorer(self.taps, passes, self._tokens(jobs, None, progress, length).add, params.extra)
        references = [item.ref_output_ids for item in items]
        with self._running(passes):
            scores = scorer.run(jobs, references)
        if passes.steerer is not None:
            consumed = [
                ([*job.prompt.token_ids, *ids[:-1]], len(job.prompt.token_ids))
                for job, ids in zip(jobs, references, strict=True)
            ]
            warn_of_idle(passes.steerer.finish(consumed))
        return scores

    # --- a caller's own loop

    @contextmanager
    def entries_applied(self, state_entries: Sequence[StateEntry]) -> Generator[Follower]:
        """While open, every forward that the caller runs on `model` has these entries applied to all its rows.

        A pass with an empty cache begins prompts; what follows on that cache is generation. What is given has
        `receipts()`: what each op did so far.
        """
        self._open()
        spec, workshop = specs_of(state_entries), self._workshop()
        prompt = PreparedPrompt((0,))
        if spec is not None:  # what can be refused without a prompt is refused now
            workshop.ops(spec.without_patches(), prompt, "state_entries")
        follower = Follower(
            self.taps,
            steered_sites(() if spec is None else spec.ops),
            lambda ids: workshop.ops(spec, PreparedPrompt(tuple(ids)), "state_entries"),
        )
        hooks = hooks_of(GenerationItem(prompt, state_entries))
        with alone_on(self.model), hooked(self.model, hooks), follower.following():
            yield follower

    # --- shared

    def _workshop(self) -> Workshop:
        return Workshop(self.taps, self.registry, self._constrainer)

    def _generation_jobs(
        self, items: Sequence[GenerationItem], params: GenerationParams, call: int | None
    ) -> list[Job]:
        check_params(params, self.tokenizer)
        check_prompts(self.model, [item.prompt for item in items], params.max_tokens)
        return self._workshop().generation_jobs(items, params, self._next_call() if call is None else call)

    def _constrainer(self) -> Constrainer:
        """Grammars compiled for the tokenizer and the logits as they are now."""
        model, tokenizer = self.model, self.tokenizer
        if self._grammars is None or self._grammars[0] is not model or self._grammars[1] is not tokenizer:
            made = Constrainer(tokenizer, text_config(model).vocab_size, model_eos_ids(model))
            self._grammars = (model, tokenizer, made)
        return self._grammars[2]

    @contextmanager
    def _running(self, passes: Passes, capturing: Capturing | None = None, *, stop: bool = False) -> Generator[None]:
        """With the model for this call alone, and the hooks of its capture and its steering in place."""
        with ExitStack() as stack:
            stack.enter_context(alone_on(self.model))
            if stop and self._compiled is not None:
                stack.enter_context(self._compiled.installed())
            if passes.steerer is not None:
                prove_steering(self.taps, set(passes.steerer.sites))
            if capturing is not None:
                given = {"steerer": passes.steerer, "stop": stop, "threads": passes.threads}
                stack.enter_context(tapped(self.taps, capturing.sites, capturing.recorder.record, **given))
            elif passes.steerer is not None:
                stack.enter_context(steered(self.taps, passes.steerer))
            yield

    def _tokens(
        self, jobs: Sequence[Job], params: GenerationParams | None, progress: Progress | None, each: int = 0
    ) -> Tokens:
        prompts = sum(len(job.prompt.token_ids) + each for job in jobs)
        return Tokens(prompts + (len(jobs) * params.n * params.max_tokens if params else 0), progress)

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls - 1


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
