"""One call on an engine: its requests, run to their ends, and what each of them gave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from midstream.core.binding import BoundOp
from midstream.core.capture import CaptureSpec
from midstream.core.errors import BusyError, CaptureError, EngineError, MidstreamError
from midstream.core.generation import Completion, GenerationParams
from midstream.core.interventions import OpReceipt, acts_on
from midstream.core.text import Decode, text_of
from midstream.taps.step import StepBatch, whole_sequence

from .engine import Engine, refusing
from .jobs import Job
from .rendering import finish_reason, prompt_logprobs, sampling_params, token_logprobs
from .requests import EngineRequest
from .rows import Collected, error_of


def new_id() -> str:
    """An id that no other request has."""
    return uuid4().hex


@dataclass(eq=False)
class Request:
    """One choice of one job, as the engine runs it. index: its place in the call."""

    job: Job
    index: int
    choice: int
    capture: CaptureSpec | None
    first: int = 0
    decided: Mapping[str, bool] | None = None
    id: str = field(default_factory=new_id)
    output: Any = None
    described: Mapping[str, Any] | None = None
    counted: int = 0
    error: MidstreamError | None = None

    @property
    def wishes(self) -> bool:
        """Whether our plugin has to do with it."""
        return self.capture is not None or self.job.spec is not None

    def text(self, max_tokens: int) -> str | None:
        """What travels with it to the plugin."""
        return self.engine_request(max_tokens).text() if self.wishes else None

    def engine_request(self, max_tokens: int) -> EngineRequest:
        """The same as data."""
        return EngineRequest(
            id=self.id,
            prompt_len=len(self.job.prompt.token_ids),
            max_len=len(self.job.ids) + max_tokens,
            first=self.first,
            capture=self.capture,
            steering=self.job.spec,
            decided=None if self.decided is None else dict(self.decided),
        )

    @property
    def generated(self) -> tuple[int, ...]:
        """The ids that were sampled."""
        return () if self.output is None else tuple(self.output.outputs[0].token_ids)

    @property
    def consumed(self) -> tuple[int, ...]:
        """The ids that the model has rows of."""
        return (*self.job.ids, *self.generated[:-1])


Settle = Callable[[Sequence[Request], Sequence[Collected]], Collection[str]]
"""Takes requests that have ended, and what every rank says of them; gives the ids of those whose rows shall stay."""


class AnyCall(Protocol):
    """Requests of one call, on an engine here or behind a server."""

    @property
    def requests(self) -> Sequence[Request]:
        """All of them."""
        ...

    @property
    def params(self) -> GenerationParams:
        """How they are sampled."""
        ...

    def run(self) -> None:
        """Run all of them to their ends."""
        ...

    def outputs(self) -> Iterator[Request]:
        """The same, giving each request whenever the engine has said more of it."""
        ...


@dataclass(eq=False)
class Call:
    """Requests of one call on an engine. settle: called as requests with wishes end, while their rows are held."""

    engine: Engine
    params: GenerationParams
    eos: frozenset[int]
    requests: Sequence[Request]
    settle: Settle
    done: Callable[[int], None] = lambda _: None

    def run(self) -> None:
        """Run all of them to their ends."""
        for _ in self.outputs():
            pass

    def outputs(self) -> Iterator[Request]:
        """The same, giving each request whenever the engine has said more of it."""
        with self.engine.one_call():
            yield from self._steps()

    def _steps(self) -> Iterator[Request]:
        waiting: dict[str, Request] = {}
        if self.engine.llm.llm_engine.has_unfinished_requests():
            raise BusyError("this engine runs requests of others, whose outputs would be lost: let them end first")
        try:
            self._submit(waiting)
            while waiting:
                if not self.engine.llm.llm_engine.has_unfinished_requests():
                    raise EngineError("somebody else took this call's outputs: let one call end before the next")
                heard: list[Request] = []
                for output in self.engine.step():
                    if (request := waiting.get(output.request_id)) is not None:
                        self._count(request, output)
                        request.output = output
                        heard.append(request)
                ended = [waiting.pop(one.id) for one in heard if one.output.finished]
                self._collect([one for one in ended if one.wishes])
                yield from heard
        finally:
            if waiting:  # interrupted
                with suppress(EngineError):
                    self.engine.abort(list(waiting))
            if any(one.error is not None and one.job.spec is not None for one in self.requests):
                # what a steer should have done is a part of its blocks' keys, and was not done to these
                self.engine.llm.reset_prefix_cache()

    def _submit(self, waiting: dict[str, Request]) -> None:
        for request in self.requests:
            job = request.job
            with refusing(request.index):
                params = sampling_params(
                    self.params,
                    seed=job.seeds[request.choice],
                    eos=self.eos if job.constraint is None else self.eos | self.engine.eos,
                    constraint=job.constraint,
                    text=request.text(self.params.max_tokens),
                )
                self.engine.submit(request.id, job.engine_prompt, params)
            waiting[request.id] = request

    def _count(self, request: Request, output: Any) -> None:
        count = len(output.outputs[0].token_ids)  # vLLM's own list, which grows
        self.done(count - request.counted + (0 if request.output is not None else len(request.job.ids)))
        request.counted = count

    def _collect(self, ended: Sequence[Request]) -> None:
        if not ended:
            return
        ids = [one.id for one in ended]
        parts = [Collected.read(data) for data in self.engine.call("collect", ids)]
        for place, request in enumerate(ended):
            request.described = parts[0].described[place]
            errors = [error for part in parts if (error := error_of(part.described[place])) is not None]
            request.error = errors[0] if errors else None
        whole = [place for place, request in enumerate(ended) if request.error is None]
        kept: Collection[str] = ()
        try:
            kept = self.settle(ended, [part.take(np.isin(part.request, whole)) for part in parts])
        finally:
            if gone := [one for one in ids if one not in kept]:
                self.engine.call("release", gone)


def completion_of(request: Request, params: GenerationParams, decode: Decode | None) -> Completion:
    """What one request gave."""
    output = request.output.outputs[0]
    ids = request.generated
    try:
        reason = finish_reason(output, params)
    except CaptureError as error:
        reason, request.error = None, request.error or error
    text = None if decode is None else text_of(ids, reason, params, decode)
    output.text = text or ""  # the engine itself makes none of our requests
    return Completion(
        prompt_token_ids=tuple(request.job.prompt.token_ids),
        token_ids=ids,
        text=text,
        finish_reason=reason,
        logprobs=token_logprobs(output.logprobs, ids, params.logprobs),
        prompt_logprobs=prompt_logprobs(request.output.prompt_logprobs, request.job.ids, params.prompt_logprobs),
        error=request.error,
        engine_output=request.output,
    )


def steering_receipts(request: Request) -> tuple[OpReceipt, ...]:
    """What each op did to the rows that are this request's own; CaptureError when a selected row was not steered.

    A choice after the first counts no prompt row, and a score not the row of its last token: nothing is read from it.
    """
    if request.job.spec is None or request.error is not None or request.described is None:
        return ()
    rows = whole_sequence(request.consumed, len(request.job.prompt.token_ids))
    own = np.ones(len(rows), dtype=np.bool_)
    if request.choice:
        own &= rows.position >= rows.prompt_len
    if request.job.reference:
        own &= rows.position < len(request.job.ids) - 1
    return op_receipts(request.job.ops, rows, request.described, f"request {request.index}", own)


def op_receipts(
    ops: Sequence[BoundOp],
    rows: StepBatch,
    described: Mapping[str, Any],
    what: str,
    own: NDArray[np.bool_] | None = None,
) -> tuple[OpReceipt, ...]:
    """What each op did to the rows of a sequence; CaptureError names what was missed.

    described: what a worker says of it. Rows before its `cached` came from the prefix cache, as the same ops left them.
    own: `[rows]`, those that count; None: all.
    """
    reused = rows.position < int(described["cached"])
    tally = {(line[0], line[3]): line for line in described["steering"]}
    found: list[OpReceipt] = []
    for bound in ops:
        for layer in bound.op.layers:
            *_, computed, relative, skipped = tally[bound.place, layer]
            selected = acts_on(bound.op, rows, layer if bound.op.gate is not None else None)
            if skipped:
                selected &= False
            elif computed < (due := int((selected & ~reused).sum())):
                op = f"op {bound.place} ({bound.op.kind}) at layer {layer}"
                raise CaptureError(f"{what}, {op}: {due} rows were due, and {computed} steered")
            if own is not None:
                selected &= own
            counts = (int(selected.sum()), int((selected & ~reused).sum()), int((selected & reused).sum()))
            at = (bound.place, bound.op.kind, bound.op.site, layer)
            found.append(OpReceipt(*at, *counts, relative=relative, skipped=skipped))
    return tuple(found)
