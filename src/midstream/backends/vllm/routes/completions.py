"""`/v1/completions` and `/v1/chat/completions` in a `vllm serve`: vLLM's own, and what was asked of taps added.

A request that asks for nothing goes to vLLM's function as it is. The others go there too, with an id of ours; what
comes back is JSON or a stream of it, to which the rows are added.
"""

# FastAPI reads the annotations of routes, so they are no texts here
# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false, reportInvalidTypeForm=false

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.api_router import create_completion
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

from midstream.core.errors import CaptureError, MidstreamError, SpecError, spec_error

from ..requests import FIELDS, KEY
from .answering import Answering, Wished
from .app import answering_of, error_body, refusal, refused
from .wishes import XARGS, asked_of

_OURS: Final = (KEY, *FIELDS)
_DONE: Final = "[DONE]"


def attach(app: FastAPI) -> None:
    """Put both routes in the place of vLLM's."""
    _route(app, "/v1/completions", CompletionRequest, create_completion)
    _route(app, "/v1/chat/completions", ChatCompletionRequest, create_chat_completion)


def _route(app: FastAPI, path: str, model: Any, inner: Callable[..., Any]) -> None:
    async def completion(request: model, raw_request: Request) -> Any:
        return await _completed(request, raw_request, inner)

    completion.__name__ = inner.__name__
    completion.__doc__ = inner.__doc__
    app.post(path, dependencies=[Depends(validate_json_request)], response_model=None)(completion)


async def _completed(request: Any, raw: Request, inner: Callable[..., Any]) -> Any:
    answering = answering_of(raw)
    try:
        asked = asked_of(request.model_extra or {}, request.vllm_xargs or {})
        if asked is None:
            return await inner(request, raw)
        if answering is None:
            message = "this engine was not asked for taps: start it with `midstream vllm-serve`"
            raise spec_error("E_UNKNOWN_KIND", XARGS, message)
        _check_one_choice(request)
        meant, served = asked.own.model_fingerprint, answering.engine.facts.fingerprint
        if meant is not None and meant != served:
            return refused(409, f"another model is served here: {served}, and {meant} is meant", None, "conflict")
        wished = await asyncio.to_thread(answering.begin, asked)
        if wished.tapped:
            _check_echo(request)
    except SpecError as error:
        return refusal(error)
    ids = _Ids(bool(request.return_token_ids))
    rest = {name: value for name, value in (request.vllm_xargs or {}).items() if name not in _OURS}
    request.vllm_xargs = {**rest, **({KEY: wished.request.text()} if wished.tapped else {})} or None
    request.return_token_ids = request.return_token_ids or wished.tapped
    admission = answering.engine.admission
    assert admission.served is not None, "an engine that answers is served"
    admission.served.add(wished.request.id)
    done = False
    try:
        async with answering.engine.with_artifacts(wished.artifacts, answering.registry.file_of):
            response = await inner(request, raw)
            if isinstance(response, StreamingResponse):
                pieces = _streamed(answering, wished, ids, aiter(response.body_iterator))
                await anext(pieces)  # its artifacts stay with the workers until it has begun
                response.body_iterator = pieces
                done = True
                return response
        if response is None or response.status_code >= 400:  # gone, or refused by vLLM
            return response
        done = True
        return await _whole(answering, wished, ids, response)
    except SpecError as error:
        return refusal(error)
    finally:
        admission.served.discard(wished.request.id)
        if not done:
            answering.give_up(wished)


def _check_echo(request: Any) -> None:
    """SpecError for an echo, whose text vLLM leaves out where ids come back, as they must."""
    if getattr(request, "echo", False) and not request.return_token_ids:
        raise spec_error("E_BAD_PARAM", "echo", "give return_token_ids too: the prompt comes back as ids, not as text")


def _check_one_choice(request: Any) -> None:
    """SpecError for what has several answers: whose rows would they be?"""
    message = "Set n to 1: activations and steering vectors are for one choice only."
    if (request.n or 1) != 1 or getattr(request, "use_beam_search", False):
        raise spec_error("E_BAD_PARAM", "n", message)
    prompt = getattr(request, "prompt", None)
    if isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(one, int) for one in prompt):
        raise spec_error("E_BAD_PARAM", "prompt", f"{len(prompt)} prompts: send them one by one")


@dataclass
class _Ids:
    """The tokens of an answer, as they come. shown: whether whoever asked wants them. lost: some came without ids."""

    shown: bool
    prompt: list[int] | None = None
    generated: list[int] = field(default_factory=list[int])
    lost: bool = False

    def take(self, body: dict[str, Any]) -> None:
        """Note those of an answer or a piece of one, and hide them where nobody asked."""
        for choice in body.get("choices", ()):
            said = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content")
            self.lost |= choice.get("token_ids") is None and bool(said or choice.get("finish_reason"))
        for holder in (body, *body.get("choices", ())):
            if holder.get("prompt_token_ids") is not None:
                self.prompt = holder["prompt_token_ids"]
            if holder.get("token_ids") is not None:
                self.generated += holder["token_ids"]
            if not self.shown:
                for name in ("prompt_token_ids", "token_ids"):
                    holder.pop(name, None)


async def _finished(answering: Answering, wished: Wished, ids: _Ids) -> dict[str, Any]:
    """What is added to an answer whose tokens have all come."""
    if ids.lost and wished.tapped:
        answering.give_up(wished)
        raise CaptureError("the answer came without its token ids: leave include_reasoning on")
    return await answering.finish(wished, ids.prompt or (), ids.generated)


async def _whole(answering: Answering, wished: Wished, ids: _Ids, response: Response) -> Response:
    """An answer in one piece, with what was asked."""
    body = json.loads(bytes(response.body))
    ids.take(body)
    try:
        body |= await _finished(answering, wished, ids)
    except MidstreamError as error:
        return refused(422, str(error), "capture", "capture_failed")
    kept = {name: value for name, value in response.headers.items() if name not in ("content-length", "content-type")}
    return JSONResponse(body, headers=kept)


async def _streamed(answering: Answering, wished: Wished, ids: _Ids, pieces: AsyncIterator[Any]) -> AsyncIterator[str]:
    """A stream of server-sent events, with one more before the last, unless one said that something failed.

    The first is empty: once it is there, the request has begun, and is given up when the stream is closed.
    """
    finished = False
    head: dict[str, Any] = {}
    try:
        first = True
        async for piece in pieces:
            text = piece if isinstance(piece, str) else bytes(piece).decode()
            if first:
                first = False
                yield ""
            last = text.strip() == f"data: {_DONE}"
            if last and not head.get("error"):
                finished = True
                try:
                    yield _event({**head, "choices": [], **await _finished(answering, wished, ids)})
                except MidstreamError as error:  # after which nothing follows
                    yield _event(error_body(422, str(error), "capture", "capture_failed"))
                    return
            yield text if last else _piece(text, ids, head)
    finally:
        if not finished:
            answering.give_up(wished)


def _piece(text: str, ids: _Ids, head: dict[str, Any]) -> str:
    """One event, whose tokens are noted; what is no event goes by."""
    if not text.startswith("data: "):
        return text
    body = json.loads(text.removeprefix("data: "))
    if "error" in body:
        head["error"] = True
        return text
    ids.take(body)
    for name in ("id", "object", "created", "model"):
        if name in body:
            head[name] = body[name]
    return _event(body)


def _event(body: Mapping[str, Any]) -> str:
    """One event; the one that has the rows has no choice of its own, and the other events' names."""
    return f"data: {json.dumps(body)}\n\n"
