"""One use of a vLLM engine, in this process or behind a server: all that is asked is checked before it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from midstream.core.artifacts import Artifact
from midstream.core.backend import BackendCapabilities, ModelFacts, Progress
from midstream.core.capture import CaptureSpec
from midstream.core.errors import PartialBatchError, SessionClosedError, TransportError, spec_error
from midstream.core.generation import Completion, GenerationParams
from midstream.core.interventions import InterventionSpec, warn_of_idle
from midstream.core.items import (
    GenerationItem,
    ScoringItem,
    check_references,
    check_scored,
    item_seeds,
    steered_items,
)
from midstream.core.prompts import PreparedPrompt
from midstream.core.result import CaptureResult
from midstream.core.select import SelectSpec, each_select
from midstream.core.sites import Site, SiteLayout, site_layers
from midstream.core.stream import Chunk
from midstream.core.text import Settled, decoder
from midstream.formats.artifacts import ArtifactRegistry
from midstream.taps.recorder import check_memory

from .calls import AnyCall, Request, Settle, completion_of, steering_receipts
from .capturing import Capturing, Host, completions
from .checks import Checks
from .jobs import Job, Rendered
from .rendering import refuse_extra
from .rows import Collected, Segmented


class EngineSession(ABC):
    """Captures, generates and scores on one engine, wherever that is; how requests get there is its subclasses' own."""

    def __init__(
        self,
        engine: Host,
        facts: ModelFacts,
        eos: frozenset[int],
        tokenizer: Any,
        registry: ArtifactRegistry,
        capabilities: Callable[[], BackendCapabilities],
        on_close: Callable[[], None],
        segmented: Segmented,
    ) -> None:
        self._engine, self._facts, self._eos = engine, facts, eos
        self._tokenizer, self._registry = tokenizer, registry
        self._on_close = on_close
        self._checks = Checks(engine, facts, capabilities, registry)
        self._segmented = segmented
        self._closed = False
        self._calls = 0

    @property
    def layout(self) -> ModelFacts:
        """The model's facts."""
        self._open()
        return self._facts

    @property
    def layouts(self) -> Mapping[Site, Mapping[int, SiteLayout]]:
        """The width of every site and layer that can be captured."""
        return self._engine.facts.layouts

    @property
    def num_layers(self) -> int:
        """How many decoder blocks the model has."""
        return self._facts.num_layers

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        self._open()
        return self._tokenizer

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

        As in process, but that one token is always sampled. A request that failed has its error in its place.
        """
        self._open()
        spec = CaptureSpec.short(layers, mode, location) if spec is None else spec
        params = params or GenerationParams()
        if not prompts:
            raise spec_error("E_BAD_PARAM", "prompts", "no prompts: a capture needs at least one")
        jobs = self._generation_jobs(steered_items(prompts, steering), params, call)
        capturing = self._capturing(jobs, spec, per_prompt_select, params)
        made = self._call(capturing.requests, params, capturing.settle, progress)
        try:
            capturing.begin()
            made.run()
            if orphans := capturing.take_shared():
                self._call(orphans, GenerationParams(), capturing.settle, None).run()
        finally:
            capturing.close()
        return capturing.result(self._tokenizer, self._facts)

    def _capturing(
        self,
        jobs: Sequence[Job],
        spec: CaptureSpec,
        each: Sequence[SelectSpec | None] | None,
        params: GenerationParams,
    ) -> Capturing:
        facts = self._engine.facts
        sites = site_layers(spec.sites, spec.layers, facts.layouts, facts.refused)
        selects = each_select(spec.select, each, len(jobs))
        made = Capturing(self._engine, self._segmented, jobs, spec, sites, selects, params)
        check_memory(made.recorder.certain, made.layouts, spec.dtype or self._facts.dtype)
        return made

    # --- generate

    def generate(
        self,
        items: Sequence[GenerationItem],
        params: GenerationParams,
        *,
        call: int | None = None,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """One Completion per item, in order; an item that failed has its `error`."""
        self._open()
        if not items:
            return []
        jobs = self._generation_jobs(items, params, call)
        requests = [Request(job, index, choice, None) for index, job in enumerate(jobs) for choice in range(params.n)]
        self._call(requests, params, _nothing_to_settle, progress).run()
        found = completions(requests, params, self._tokenizer)
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
        """One item as it grows; the last chunk has the whole completion, and with `spec` the activations."""
        self._open()
        if params.n > 1:
            raise spec_error("E_UNKNOWN_KIND", "generation.n", "a stream takes no n: use lm.generate")
        jobs = self._generation_jobs([item], params, call)
        capturing = None if spec is None else self._capturing(jobs, spec, None, params)
        requests = [Request(jobs[0], 0, 0, None)] if capturing is None else capturing.requests
        settle = _nothing_to_settle if capturing is None else capturing.settle
        return self._stream(self._call(requests, params, settle, None, stream=True), capturing)

    def _stream(self, call: AnyCall, capturing: Capturing | None) -> Iterator[Chunk]:
        request, params, given = call.requests[0], call.params, 0
        text = Settled(decoder(self._tokenizer), params)
        try:
            if capturing is not None:
                capturing.begin()
            for _ in call.outputs():
                ids = request.generated
                if len(ids) > given:
                    reason = request.output.outputs[0].finish_reason
                    ended = completion_of(request, params, None).finish_reason if reason else None
                    yield Chunk(ids[given:], text.grow(ids, ended))
                    given = len(ids)
            if capturing is not None and (orphans := capturing.take_shared()):
                self._call(orphans, GenerationParams(), capturing.settle, None).run()
        finally:
            if capturing is not None:
                capturing.close()
        if capturing is None:
            (completion,) = completions([request], params, self._tokenizer)
            if completion.error is not None:
                raise completion.error
            warn_of_idle([completion.steering])
            yield Chunk(completion=completion)
        else:
            result = capturing.result(self._tokenizer, self._facts)
            if result.errors:
                raise result.errors[0]
            yield Chunk(completion=result.outputs[0], capture=result)

    # --- score

    def score(
        self, items: Sequence[ScoringItem], params: GenerationParams | None = None, *, progress: Progress | None = None
    ) -> Tensor:
        """Log-probabilities of each item's reference after its prompt, `[items, reference length]`, float32."""
        self._open()
        params = params or GenerationParams()
        refuse_extra(params)
        check_scored(items, params)
        if not items:
            return torch.empty((0, 0))
        length = check_references(items, self._engine.vocabulary)
        prompts, inputs = self._rendered([item.prompt for item in items])
        self._checks.prompts(prompts, max(1, length) + 1)
        items = [replace(item, prompt=prompt) for item, prompt in zip(items, prompts, strict=True)]
        jobs: list[Job] = []
        for index, item in enumerate(items):
            reference = tuple(int(token) for token in item.ref_output_ids)
            self._checks.constraint(item.output_entries, GenerationParams())
            spec, ops = self._checks.spec(item, index, len(items), (*item.prompt.token_ids, *reference))
            jobs.append(Job(item.prompt, spec, ops, (None,), reference=reference, rendered=inputs[index]))
        if not length:
            return torch.empty((len(items), 0))
        decided = self._decide(jobs)
        requests = [Request(job, index, 0, None, decided=decided.get(index)) for index, job in enumerate(jobs)]
        self._call(requests, GenerationParams(prompt_logprobs=0), _nothing_to_settle, progress).run()
        scores = torch.empty((len(items), length))
        failures = {index: request.error for index, request in enumerate(requests) if request.error is not None}
        for index, request in enumerate(requests):
            if index in failures:
                continue
            found = request.output.prompt_logprobs[-length:]
            scores[index] = torch.tensor(
                [float(one[token].logprob) for one, token in zip(found, request.job.reference, strict=True)]
            )
        if any(isinstance(error, TransportError) for error in failures.values()):
            raise PartialBatchError({i: scores[i] for i in range(len(items)) if i not in failures}, failures)
        for error in failures.values():
            raise error
        warn_of_idle([steering_receipts(request) for request in requests])
        return scores

    def _decide(self, jobs: Sequence[Job]) -> dict[int, Mapping[str, bool]]:
        """What gates decide on the prompts of jobs: a reference in the same pass would come too early for them."""
        gated = [index for index, job in enumerate(jobs) if any(one.op.gate is not None for one in job.ops)]
        requests = [Request(replace(jobs[index], reference=()), index, 0, None) for index in gated]
        self._call(requests, GenerationParams(), _nothing_to_settle, None).run()
        found: dict[int, Mapping[str, bool]] = {}
        for index, request in zip(gated, requests, strict=True):
            if request.error is not None:
                raise request.error
            assert request.described is not None
            found[index] = request.described["decided"]
        return found

    # --- shared

    @abstractmethod
    def _call(
        self,
        requests: Sequence[Request],
        params: GenerationParams,
        settle: Settle,
        progress: Progress | None,
        stream: bool = False,
    ) -> AnyCall:
        """Requests that are ready, as a call that runs them. stream: the caller wants each as it grows."""

    @abstractmethod
    def _rendered(self, prompts: Sequence[PreparedPrompt]) -> tuple[list[PreparedPrompt], list[Rendered | None]]:
        """Prompts with their images' placeholders in place, and what the engine takes for those that have any."""

    @staticmethod
    def _artifacts_of(requests: Sequence[Request]) -> dict[str, Artifact]:
        """The tensors of all specs of a call, by id."""
        specs = {id(request.job.spec): request.job.spec for request in requests if request.job.spec is not None}
        return {name: one for spec in specs.values() for name, one in spec.artifacts().items()}

    def _generation_jobs(
        self, items: Sequence[GenerationItem], params: GenerationParams, call: int | None
    ) -> list[Job]:
        self._checks.generation(params)
        prompts, inputs = self._rendered([item.prompt for item in items])
        self._checks.prompts(prompts, params.max_tokens)
        items = [replace(item, prompt=prompt) for item, prompt in zip(items, prompts, strict=True)]
        if call is None:
            call, self._calls = self._calls, self._calls + 1
        jobs: list[Job] = []
        for index, (item, seeds) in enumerate(zip(items, item_seeds(items, params, call), strict=True)):
            spec, ops = self._checks.spec(item, index, len(items), item.prompt.token_ids)
            constraint = self._checks.constraint(item.output_entries, params)
            jobs.append(Job(item.prompt, spec, ops, seeds, constraint, rendered=inputs[index]))
        return jobs


def _nothing_to_settle(ended: Sequence[Request], parts: Sequence[Collected]) -> tuple[str, ...]:
    """Requests that capture nothing have no rows."""
    return ()
