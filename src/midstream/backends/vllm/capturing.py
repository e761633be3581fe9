"""A capture on an engine: its requests, the recorder that their rows go to, and rows that are there already."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from midstream.core.backend import ModelFacts
from midstream.core.capture import CaptureSpec
from midstream.core.errors import CaptureError, EngineError, MidstreamError
from midstream.core.generation import Completion, GenerationParams
from midstream.core.interventions import receipts_together, warn_of_idle
from midstream.core.result import CaptureResult
from midstream.core.select import SelectSpec, resolve
from midstream.core.sites import Site, layouts_at
from midstream.core.text import decoder, token_texts
from midstream.taps.recorder import Recorded, RecordedRequest, Recorder
from midstream.taps.step import whole_sequence

from .calls import Request, completion_of, steering_receipts
from .checks import Known
from .jobs import Job
from .reuse import Lookup, RowStore
from .rows import Collected, Owner, Segmented


class Host(Known, Protocol):
    """An engine as a session sees it, in this process or behind a server."""

    @property
    def store(self) -> RowStore:
        """Rows that it keeps for reuse."""
        ...

    def release(self, ids: Sequence[str]) -> None:
        """The rows of some requests are not wanted any more."""
        ...


class Capturing:
    """One capture under way on an engine: its requests, and the recorder that their rows go to."""

    def __init__(
        self,
        engine: Host,
        segmented: Segmented,
        jobs: Sequence[Job],
        spec: CaptureSpec,
        sites: Mapping[Site, tuple[int, ...]],
        selects: Sequence[SelectSpec | None],
        params: GenerationParams,
    ) -> None:
        self._engine, self._store, self._segmented = engine, engine.store, segmented
        self._jobs, self._spec, self._params = jobs, spec, params
        self.layouts = layouts_at(sites, engine.facts.layouts)
        self.requests: list[Request] = []
        self._lookups: dict[str, Lookup] = {}
        recorded: list[RecordedRequest] = []
        for index, (job, select) in enumerate(zip(jobs, selects, strict=True)):
            length = len(job.prompt.token_ids)
            mine = spec.model_copy(update={"select": select})
            for choice in range(params.n):
                # the first choice's prompt rows are those of all
                self.requests.append(Request(job, index, choice, mine, first=length if choice else 0))
                bound = length + params.max_tokens - 1
                recorded.append(RecordedRequest(index, choice, job.prompt.token_ids, bound, select, choice == 0))
        self.recorder = Recorder(sites, recorded)
        self._place_of = {request.id: place for place, request in enumerate(self.requests)}
        self._needed: set[str] = set()
        self._reruns: dict[str, Request] = {}

    def begin(self) -> None:
        """Look up what is there already of the rows that are wanted; `close` must follow, whatever happens."""
        for request in self.requests:
            if not request.choice and request.capture is not None:
                lookup = self._lookups[request.id] = self._store.look_up(request.job, request.capture)
                request.first = lookup.first
                self._store.promise(request.id, lookup)
        self._needed = {self._store.provider(key) for one in self._lookups.values() for key, _ in one.blocks}

    def settle(self, ended: Sequence[Request], parts: Sequence[Collected]) -> set[str]:
        """Take the rows of requests that have ended. Returns those whose rows shall stay where they are."""
        self._segmented.deliver(parts, [self._owner(one) for one in ended], self.recorder)
        kept: set[str] = set()
        for place, request in enumerate(ended):
            lookup = self._lookups.get(request.id)
            if request.error is not None:
                self._store.forget_promises(request.id)
                if request.id in self._reruns:
                    self._reruns[request.id].error = request.error
            elif lookup is not None and any(lookup.whole):
                lines = [part.take(part.request == place, owner=0) for part in parts]
                self._store.keep(request.id, lookup, lines)
                kept.add(request.id)
        dropped = set(self._store.evict(self._needed))
        if others := sorted(dropped - kept):
            self._engine.release(others)
        return kept - dropped

    def _owner(self, request: Request) -> Owner:
        prompt = request.job.prompt.token_ids
        if request.id in self._reruns:  # only its prompt's rows are wanted
            return Owner(self._place_of[self._reruns[request.id].id], len(prompt), () if request.error else prompt)
        return Owner(self._place_of[request.id], len(prompt), () if request.error else request.consumed)

    def take_shared(self) -> list[Request]:
        """Give prompts the rows that they share with others. Returns what must run after all, for its prompt alone."""
        orphans: list[Request] = []
        for request in self.requests:
            lookup = self._lookups.get(request.id)
            if lookup is None or not lookup.blocks or request.error is not None:
                continue
            if not all(self._store.has(key) for key, _ in lookup.blocks):
                orphans.append(request)
                continue
            assert request.capture is not None
            ids = request.job.prompt.token_ids
            wanted = np.flatnonzero(resolve(request.capture.select, whole_sequence(ids, len(ids))))
            for lines in self._store.rows_of(lookup.blocks, wanted):
                self._segmented.deliver(lines, [self._owner(request)], self.recorder, reused=True)
        made = [Request(one.job, one.index, 0, one.capture) for one in orphans]
        self._reruns |= {new.id: one for new, one in zip(made, orphans, strict=True)}
        return made

    def close(self) -> None:
        """Let go of rows that are kept past the bound, whatever became of the call."""
        for request in self.requests:
            self._store.forget_promises(request.id)
        if dropped := self._store.evict():
            with suppress(EngineError):  # what it held is gone with it
                self._engine.release(dropped)
        self._segmented.forget_removed()

    def result(self, tokenizer: Any, facts: ModelFacts) -> CaptureResult:
        """All of it, once every request has ended; a sample that failed has its error in its place."""
        for request in self.requests:
            if request.error is not None:
                self.recorder.fail(request.index, request.error)
        recorded: Recorded = self.recorder.finish([request.generated for request in self.requests])
        outputs = completions(self.requests, self._params, tokenizer)
        outputs = [
            replace(one, receipt=receipt, error=one.error or recorded.errors.get(index))
            for index, (one, receipt) in enumerate(zip(outputs, recorded.receipts, strict=True))
        ]
        if not recorded.receipt.selected:
            warnings.warn(f"no row was selected by {self._spec.select or 'the per-prompt rows'}", stacklevel=4)
        warn_of_idle(one.steering for one in outputs)
        steered = any(job.spec is not None for job in self._jobs)
        return CaptureResult(
            recorded.labels,
            recorded.tensors,
            self.layouts,
            outputs,
            recorded.receipt,
            self._spec,
            facts.model_ref,
            facts.model_fingerprint,
            recorded.errors,
            token_texts(tokenizer),
            [None if job.spec is None else job.spec.described() for job in self._jobs] if steered else (),
        )


def completions(requests: Sequence[Request], params: GenerationParams, tokenizer: Any) -> list[Completion]:
    """One Completion per job, with its choices where n > 1."""
    decode = decoder(tokenizer)
    found: list[Completion] = []
    for start in range(0, len(requests), params.n):
        mine = requests[start : start + params.n]
        done = [completion_of(one, params, decode) for one in mine]
        errors: list[MidstreamError] = [one.error for one in mine if one.error is not None]
        try:
            steering = receipts_together(steering_receipts(one) for one in mine)
        except CaptureError as error:
            steering, errors = (), [*errors, error]
        first = replace(done[0], steering=steering, error=errors[0] if errors else None)
        found.append(replace(first, choices=tuple(done)) if params.n > 1 else first)
    return found
