"""EmbeddedEngine: a transformers model in this process behind the seam of a server (backends/serving.py)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from threading import Lock
from typing import Any, Final

import torch

from midstream.backends.bundled import SMOLLM2, smollm2_path
from midstream.backends.fingerprints import fingerprints
from midstream.backends.serving import Ended, Grown, ServedRequest
from midstream.core.backend import (
    BackendCapabilities,
    BackendSpec,
    Capability,
    InterventionKinds,
    ModelFacts,
    ProcessorKinds,
)
from midstream.core.capture import CaptureSpec
from midstream.core.errors import EngineError, MidstreamError, ModelLoadError, PromptError, SpecError, spec_error
from midstream.core.items import GenerationItem, InterventionEntry
from midstream.core.ops import KINDS
from midstream.core.sites import Site, SiteLayout, site_layers
from midstream.core.text import decoder
from midstream.formats.artifacts import ArtifactRegistry
from midstream.formats.discovery import Model
from midstream.taps.locate import TapMap, text_config
from midstream.taps.segments import Column, Place
from midstream.taps.step import in_reach

from ..backend import HuggingFaceBackend
from ..checks import check_params, check_prompts
from ..choosing import Stopping
from ..decoding import model_eos_ids
from ..forward import input_device, rotary_boundary
from ..jobs import Workshop
from ..session import alone_on
from ..steertest import prove_steering
from ..structured import Constrainer
from .served import Event, Finished, Keeping, Served
from .watch import shown
from .worker import Limits, Worker

_IN_PROCESS: Final = frozenset({Capability.IN_PROCESS_TORCH, Capability.BEAM_PROPOSALS})


@dataclass(frozen=True, eq=False)
class _Ready:
    """The engine, once it was started."""

    taps: TapMap
    facts: ModelFacts
    identity: Model
    capabilities: BackendCapabilities
    tokenizer: Any
    types: Mapping[Place, torch.dtype]
    unsteerable: Mapping[Site, SpecError]
    eos: frozenset[int]
    boundary: int | None
    workshop: Workshop
    worker: Worker


class EmbeddedEngine:
    """Serves one transformers model from one thread: sequences join the next pass, and leave when they end.

    model: a BackendSpec, whose model is loaded by `start` and let go by `close`, or a backend, which stays the
    caller's own; either is in use until `close`. registry: where specs find their artifacts; a backend has one.
    max_batch: sequences that run at once. max_tokens_in_batch: tokens that these may come to hold, those that share
    passes counted as long as the longest of them; None: what a third of the free memory holds. prefill_chunk: tokens of
    one prompt in a pass, after which others get their next token first. row_bytes: of captured rows that are held until
    they are read. What does not fit waits.
    """

    def __init__(
        self,
        model: BackendSpec | HuggingFaceBackend,
        *,
        registry: ArtifactRegistry | None = None,
        tokenizer: Any = None,
        max_batch: int = 64,
        max_tokens_in_batch: int | None = None,
        prefill_chunk: int = 512,
        row_bytes: int = 1 << 30,
    ) -> None:
        self._owned = isinstance(model, BackendSpec)
        self._backend = HuggingFaceBackend(model, tokenizer, registry) if isinstance(model, BackendSpec) else model
        for name, value in (
            ("max_batch", max_batch),
            ("max_tokens_in_batch", max_tokens_in_batch),
            ("prefill_chunk", prefill_chunk),
            ("row_bytes", row_bytes),
        ):
            if value is not None and value < 1:
                raise spec_error("E_BAD_PARAM", name, f"is 1 or more, got {value}")
        self._limits = Limits(max_batch, max_tokens_in_batch or 0, prefill_chunk, row_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stack = ExitStack()
        self._found: _Ready | None = None
        self._compiling = Lock()

    # --- what it is

    @property
    def _ready(self) -> _Ready:
        if self._found is None:
            raise EngineError("the engine is not started")
        return self._found

    @property
    def facts(self) -> ModelFacts:
        """The model's facts, as they were at the start."""
        return self._ready.facts

    @property
    def capabilities(self) -> BackendCapabilities:
        """What can be captured and steered; nothing of what takes code in process."""
        return self._ready.capabilities

    @property
    def layouts(self) -> Mapping[Site, Mapping[int, SiteLayout]]:
        """How wide each site is, by layer."""
        return self._ready.taps.layouts

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None."""
        return self._ready.tokenizer

    @property
    def identity(self) -> Model:
        """What a client of another process negotiates with."""
        return self._ready.identity

    @property
    def registry(self) -> ArtifactRegistry:
        """Where specs find their artifacts."""
        return self._backend.registry

    @property
    def counts(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        return (0, 0) if self._found is None else self._found.worker.counts

    @property
    def well(self) -> bool:
        """Whether requests are answered."""
        return self._found is not None and self._found.worker.well

    # --- its life

    async def start(self) -> None:
        """Load the model, show its taps, and begin. ModelLoadError: it cannot be, or cannot be decoded.

        BusyError: somebody else uses it.
        """
        self._loop = asyncio.get_running_loop()
        if self._found is None:
            self._found = await asyncio.to_thread(self._start)

    def _start(self) -> _Ready:
        with ExitStack() as stack:
            if self._owned:
                stack.callback(self._backend.release)
            session = self._backend.open_session()
            stack.callback(session.close)
            taps, tokenizer = session.taps, session.tokenizer
            model = taps.anatomy.model
            stack.enter_context(alone_on(model))
            eos = model_eos_ids(model)
            constrainer = Constrainer(tokenizer, text_config(model).vocab_size, eos)
            capabilities, unsteerable = self._backend.negotiated_capabilities(), dict[Site, SpecError]()
            for site in capabilities.interventions.sites:
                try:
                    prove_steering(taps, {site})
                except SpecError as error:
                    unsteerable[site] = error
            try:
                types, token_bytes = shown(taps)
            except SpecError as error:
                raise ModelLoadError(error.message) from error
            facts = session.layout
            if not self._limits.max_tokens_in_batch:
                most = max(_free_bytes(model) // 3 // token_bytes, facts.context_length or 1)
                self._limits = replace(self._limits, max_tokens_in_batch=most)
            worker = Worker(taps, self._limits, self._tell)
            stack.callback(worker.close)
            source = str(smollm2_path()) if facts.model_ref == SMOLLM2 else facts.model_ref
            known = asdict(fingerprints(model.config, source, tokenizer))
            ready = _Ready(
                taps,
                facts,
                Model(facts=asdict(facts), fingerprints=known, eos=tuple(sorted(eos))),
                _for_others(capabilities, unsteerable),
                tokenizer,
                types,
                unsteerable,
                eos,
                rotary_boundary(model),
                Workshop(taps, self._backend.registry, lambda: constrainer),
                worker,
            )
            self._stack = stack.pop_all()
        return ready

    async def close(self) -> None:
        """Give up what runs, and let the model go; idempotent."""
        stack, self._stack = self._stack, ExitStack()
        await asyncio.to_thread(stack.close)
        self._found = None

    # --- requests

    def check(self, request: ServedRequest) -> None:
        """SpecError or PromptError for what this model or this engine cannot do; may be called in a thread."""
        self._served(request)

    def _served(self, request: ServedRequest) -> Served:
        """A request made ready, with everything checked."""
        ready, params, prompt = self._ready, request.params, request.prompt
        if params.n > 1 or params.extra:
            name = "n" if params.n > 1 else "extra"
            raise spec_error("E_UNKNOWN_KIND", f"generation.{name}", f"a served sequence takes no {name}")
        if prompt.multi_modal_data:
            message = "prompt 0 has multi_modal_data: the embedded engine serves text; use lm.generate, or vLLM"
            raise PromptError(message)
        check_params(params, ready.tokenizer)
        check_prompts(ready.taps.anatomy.model, [prompt], params.max_tokens)
        length, prompt_len = len(prompt.token_ids), request.prompt_len or len(prompt.token_ids)
        if not 1 <= prompt_len <= length:
            raise spec_error("E_BAD_PARAM", "prompt_len", f"is {prompt_len}, of a prompt of {length} tokens")
        if (needed := length + params.max_tokens - 1) > (most := self._limits.max_tokens_in_batch):
            message = (
                f"prompt 0 has {length} tokens and max_tokens is {params.max_tokens}: {needed} positions, but the "
            )
            raise PromptError(f"{message}engine holds {most}; shorten it, or raise max_tokens_in_batch")
        keeping = None if request.capture is None else self._keeping(request.capture, request, prompt_len)
        entries = ()
        if request.steering is not None:
            request.steering.canonical_json()
            if error := next((ready.unsteerable.get(op.site) for op in request.steering.ops), None):
                raise spec_error(error.code, error.path, error.message)
            entries = (InterventionEntry(request.steering),)
        with self._compiling if params.constraint is not None else nullcontext():
            (job,) = ready.workshop.generation_jobs([GenerationItem(prompt, entries, (), params.seed)], params, 0)
            shaping = job.shaping()
        return Served(
            -1,
            prompt.token_ids,
            job.seeds[0],
            shaping,
            prompt_len=prompt_len,
            stopping=Stopping(params, ready.eos, decoder(ready.tokenizer)),
            ops=job.ops,
            keeping=keeping,
            past=ready.boundary is not None and length > ready.boundary,
        )

    def _keeping(self, capture: CaptureSpec, request: ServedRequest, prompt_len: int) -> Keeping:
        """What a capture is of; SpecError for what this model has not, and for more rows than can be held."""
        ready = self._ready
        sites = site_layers(capture.sites, capture.layers, ready.taps.layouts, ready.taps.refused, "capture.sites")
        dtype = getattr(torch, capture.dtype) if capture.dtype else None
        columns = tuple(
            Column(site, layer, ready.taps.layouts[site][layer].width, dtype or ready.types[site, layer])
            for site, layers in sites.items()
            for layer in layers
        )
        rows = in_reach(capture.select, request.prompt.token_ids, prompt_len, request.params.max_tokens)
        keeping = Keeping(columns, capture.select, sum(column.row_bytes for column in columns), rows)
        if keeping.nbytes > (most := self._limits.row_bytes):
            message = f"{rows} rows of {keeping.row_bytes:,} bytes; this engine holds {most:,} bytes"
            raise spec_error("E_BAD_PARAM", "capture", f"{message}, or {most // keeping.row_bytes} such rows")
        return keeping

    async def run(self, request: ServedRequest) -> AsyncGenerator[Grown | Ended]:
        """The pieces of one sequence, `Ended` the last; closed before that, it leaves before the next pass.

        Raises what `check` does, CaptureError where its own rows or steers failed, EngineError where the model did.
        """
        quick = request.steering is None and request.params.constraint is None
        served = self._served(request) if quick else await asyncio.to_thread(self._served, request)
        worker = self._ready.worker
        worker.submit(served)
        try:
            while True:
                event = await served.events.get()
                if isinstance(event, MidstreamError):
                    raise event
                if isinstance(event, Finished):
                    activations = None
                    if event.rows is not None:
                        activations = await asyncio.to_thread(event.rows.activations)
                        worker.leave(served)  # its rows are not held while whoever reads takes his time
                    yield Ended(event.finish_reason, event.prompt_logprobs, event.steering, activations)
                    return
                yield event
        finally:
            worker.leave(served)

    def _tell(self, news: list[tuple[Served, Event]]) -> None:
        """Called in the worker's thread: one message for all."""
        assert self._loop is not None, "started"
        with suppress(RuntimeError):  # the loop was closed: nobody waits
            self._loop.call_soon_threadsafe(_deliver, news)


def _free_bytes(model: Any) -> int:
    """Of the memory that the model is in."""
    device = input_device(model)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _deliver(news: list[tuple[Served, Event]]) -> None:
    for one, event in news:
        one.events.put_nowait(event)


def _for_others(capabilities: BackendCapabilities, unsteerable: Mapping[Site, SpecError]) -> BackendCapabilities:
    """Of these, what a request from elsewhere can ask for."""
    sites: tuple[Site, ...] = tuple(site for site in capabilities.interventions.sites if site not in unsteerable)
    return replace(
        capabilities,
        atoms=capabilities.atoms - _IN_PROCESS,
        interventions=InterventionKinds(tuple(KINDS), sites),
        processors=ProcessorKinds(),
    )
