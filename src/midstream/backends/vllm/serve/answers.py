"""Requests as the body of a completion, and its answer as what an engine in this process would have said."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from torch import Tensor

from midstream.core.capture import CaptureSpec
from midstream.core.errors import CaptureError, UnfitAnswerError
from midstream.core.generation import GenerationParams
from midstream.core.select import SelectSpec
from midstream.formats.activations import Activations, Stack
from midstream.taps.segments import Place
from midstream.taps.step import check_rows, whole_sequence

from ..calls import Request
from ..checks import Layouts, captured
from ..rendering import sampling_fields, structured_fields
from ..requests import KEY
from ..rows import Collected, Segmented

_NEUTRAL: Final = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0, "add_special_tokens": False}
"""Fields that a server would fill from its model's own defaults."""
_ID: Final = "token_id:"


@contextmanager
def fitting() -> Iterator[None]:
    """While an answer is read: what it lacks, or has in another form, is an UnfitAnswerError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UnfitAnswerError(f"{said:.200}") from error


def body_of(
    request: Request, params: GenerationParams, eos: frozenset[int], model: str, fingerprint: str, stream: bool
) -> dict[str, Any]:
    """What is sent to `/v1/completions`: every field, ids in and ids back."""
    job = request.job
    own: dict[str, Any] = {"model_fingerprint": fingerprint}
    if request.wishes:
        own["prompt_len"] = len(job.prompt.token_ids)
        if request.decided is not None:
            own["decided"] = dict(request.decided)
    xargs: dict[str, Any] = {KEY: _text(own)}
    if (capture := capture_of(request)) is not None:
        xargs["capture"] = _text(capture.canonical())
        xargs["activations_transport"] = "binary"
    if job.spec is not None:
        xargs["steering"] = job.spec.canonical_json()
    return {
        "model": model,
        "prompt": list(job.ids),
        **sampling_fields(params, seed=job.seeds[request.choice], eos=eos),
        **_NEUTRAL,
        "structured_outputs": structured_fields(job.constraint),
        "cache_salt": job.prompt.cache_salt,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": stream,
        "vllm_xargs": xargs,
    }


def capture_of(request: Request) -> CaptureSpec | None:
    """What is captured of a request; a choice after the first has the first one's rows of the prompt."""
    if request.capture is None or not request.first:
        return request.capture
    return request.capture.model_copy(update={"select": SelectSpec.generated_of(request.capture.select)})


def check_fit(request: Request, found: Activations, facts: Layouts) -> None:
    """UnfitAnswerError unless activations are of the places and rows that a request asked for, which has its output."""
    capture = capture_of(request)
    assert capture is not None
    layouts = captured(capture, facts)
    wanted = {(site, layer): of.width for site, layers in layouts.items() for layer, of in layers.items()}
    came = {(one.site, layer): one.tensor.shape[-1] for one in found.stacks for layer in one.layers}
    if came != wanted:
        raise UnfitAnswerError(f"{len(wanted)} places were asked for, and {len(came)} came, or of other widths")
    rows = whole_sequence(request.consumed, len(request.job.prompt.token_ids))
    try:
        check_rows(found.position, found.token_id, rows, capture.select)
    except CaptureError as error:
        raise UnfitAnswerError(str(error)) from None


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(eq=False)
class Said:
    """What a server says of a request, in the form of vLLM's RequestOutput. activations: of what was captured."""

    outputs: list[Any]
    prompt_logprobs: list[Any] | None
    finished: bool
    described: Mapping[str, Any] | None = None
    activations: Any = None

    @classmethod
    def failed(cls) -> Said:
        """Of a request that got no answer."""
        return cls([_output([], None)], None, True)

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> Said:
        """An answer in one piece."""
        (choice,) = answer["choices"]
        output = _output(choice["token_ids"], choice.get("logprobs"))
        output.finish_reason, output.stop_reason = choice["finish_reason"], choice.get("stop_reason")
        prompt = _prompt_logprobs(choice.get("prompt_logprobs"))
        return cls([output], prompt, True, _described(answer), answer.get("activations"))


class Growing:
    """The same from the events of a stream."""

    def __init__(self) -> None:
        self.said = Said([_output([], None)], None, False)

    def take(self, event: Mapping[str, Any]) -> None:
        """One more event."""
        for choice in event["choices"]:
            output, more = self.said.outputs[0], _output(choice.get("token_ids") or [], choice.get("logprobs"))
            output.token_ids += more.token_ids
            if more.logprobs is not None:
                output.logprobs = [*(output.logprobs or []), *more.logprobs]
            output.finish_reason = choice.get("finish_reason") or output.finish_reason
            if choice.get("stop_reason") is not None:
                output.stop_reason = choice["stop_reason"]
        if KEY in event:
            self.said.described, self.said.activations = _described(event), event.get("activations")
            self.said.finished = True


def _output(ids: Sequence[int], logprobs: Any) -> Any:
    """One choice. logprobs: OpenAI's, whose tokens are `token_id:<id>`."""
    found = None
    if logprobs is not None:
        found = [
            _ranked({token: logprob, **(top or {})})
            for token, logprob, top in zip(
                logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
            )
        ]
    return SimpleNamespace(index=0, text="", token_ids=list(ids), logprobs=found, finish_reason=None, stop_reason=None)


def _ranked(top: Mapping[str, float]) -> dict[int, Any]:
    """Token id → its log-probability and its rank among those that were sent."""
    known = {int(token.removeprefix(_ID)): float(logprob) for token, logprob in top.items()}
    order = sorted(known, key=lambda token: (-known[token], token))
    return {token: SimpleNamespace(logprob=known[token], rank=rank) for rank, token in enumerate(order)}


def _prompt_logprobs(found: Sequence[Mapping[str, Any] | None] | None) -> list[Any] | None:
    if found is None:
        return None
    return [None if one is None else {int(token): SimpleNamespace(**of) for token, of in one.items()} for one in found]


def _described(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was done to a request, as a worker says it."""
    if KEY not in answer:
        raise UnfitAnswerError("the server answered without our plugin's word: is it a proxy that drops vllm_xargs?")
    found = answer[KEY]
    steering = [
        [one["op"], one["kind"], one["site"], one["layer"], one["computed"], one["relative"], one["skipped"]]
        for one in found["steering"]
    ]
    return {
        "cached": found["cached"],
        "steering": steering,
        "decided": found["decided"],
        "fingerprint": found["model_fingerprint"],
        "error": None,
    }


class Downloaded(Segmented):
    """The rows of requests that have ended, in memory, as if a worker had put each into a segment of its own."""

    def __init__(self) -> None:
        super().__init__(())
        self._numbers = count()
        self._stacks: dict[int, Sequence[Stack]] = {}

    @contextmanager
    def collected(self, found: Activations | None) -> Iterator[Collected]:
        """One request's lines, whose tensors are there while this is open; None: it has none."""
        number, empty = next(self._numbers), np.zeros(0, dtype=np.int64)
        if found is None or not len(found.position):
            yield Collected(empty, empty, empty, empty, empty, empty, [], [])
            return
        rows = len(found.position)
        zeros = np.zeros(rows, dtype=np.int64)
        overflowed = zeros.copy()
        overflowed[0] = found.receipt.overflowed
        self._stacks[number] = found.stacks
        try:
            yield Collected(
                zeros, found.position, found.token_id, np.full(rows, number), np.arange(rows), overflowed, [],
                [{"number": number, "capacity": rows}],
            )  # fmt: skip
        finally:
            del self._stacks[number]

    def tensors(self, rank: int, plain: Mapping[str, Any]) -> Mapping[Place, Tensor]:
        """The tensors of a request."""
        return {
            (stack.site, layer): rows
            for stack in self._stacks[plain["number"]]
            for layer, rows in zip(stack.layers, stack.tensor, strict=True)
        }
