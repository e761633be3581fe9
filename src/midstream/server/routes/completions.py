"""`/v1/completions` and `/v1/chat/completions`."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from ..api import Api, Caller, TheApi, body_of, while_there
from ..asking import Ask
from ..bodies import Body, ChatBody, CompletionBody
from ..completing import Paying, Run
from ..keys import Key
from ..permission import permitted
from ..schema import request_of

router = APIRouter(tags=["completions"])


_EXAMPLES: dict[str, Any] = {
    "a_completion": {"prompt": "What is steering?", "max_tokens": 8, "temperature": 0},
    "the_residual_stream_of_two_layers": {
        "prompt": "What is steering?", "max_tokens": 8, "temperature": 0, "output_residual_stream": [0, 1],
    },
    "the_last_row_of_the_prompt": {
        "prompt": "What is steering?", "max_tokens": 1, "capture": {"sites": ["resid_post"], "select": "prompt[-1]"},
    },
    "tensors_by_handle": {"prompt": "hello", "max_tokens": 1, "capture": {}, "activations_transport": "binary"},
    "log_probabilities": {"prompt": "hello", "max_tokens": 2, "logprobs": 3, "echo": True},
}  # fmt: skip
_CHATS: dict[str, Any] = {
    "a_chat": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8},
    "a_captured_chat": {
        "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "output_residual_stream": True,
    },
}  # fmt: skip


@router.post("/v1/completions", openapi_extra=request_of(CompletionBody, **_EXAMPLES))
async def completions(request: Request, api: TheApi, key: Caller) -> Response:
    """What a model says after a prompt, with activations and steering where they are asked for."""
    return await completed(request, api, key, await body_of(request, CompletionBody, api.limits))


@router.post("/v1/chat/completions", openapi_extra=request_of(ChatBody, **_CHATS))
async def chat(request: Request, api: TheApi, key: Caller) -> Response:
    """What a model says in a chat, with activations and steering where they are asked for."""
    return await completed(request, api, key, await body_of(request, ChatBody, api.limits))


async def completed(request: Request, api: Api, key: Key, body: Body) -> Response:
    """The answer, whole or as a stream."""
    ask = await permitted(api, key, body)
    if body.stream:
        return await _streamed(api, key, ask)
    async with while_there(request) as running:
        return await running(_whole(api, key, ask))


async def _whole(api: Api, key: Key, ask: Ask) -> Response:
    async with api.completing.running(ask, key.id) as (run, paying):
        pieces = await run.whole()
        await paying.settle(run.used, run.usage)
    api.metrics.completed(run)
    return StreamingResponse(pieces, media_type="application/json")


async def _streamed(api: Api, key: Key, ask: Ask) -> Response:
    stack = AsyncExitStack()
    run, paying = await stack.enter_async_context(api.completing.running(ask, key.id))
    pieces = _pieces(api, run, paying, stack)
    first = await anext(pieces)  # what fails before the first token is an error of its own
    return EventStream(_after(first, pieces))


async def _pieces(api: Api, run: Run, paying: Paying, stack: AsyncExitStack) -> AsyncIterator[bytes]:
    """The stream, after which what came is paid for: all of it, or what came before it broke off."""
    async with stack:
        try:
            async for piece in run.stream():
                yield piece
        finally:
            await paying.settle(run.used, run.usage)
            api.metrics.completed(run)


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for piece in rest:
            yield piece
    finally:
        await rest.aclose()  # pyright: ignore[reportAttributeAccessIssue]  # an async generator


class EventStream(StreamingResponse):
    """Server-sent events; closed with the connection, so that what runs for nobody ends."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Any) -> None:
        """Send them, and close what they come from."""
        try:
            await super().stream_response(send)
        finally:
            await self.body_iterator.aclose()  # pyright: ignore[reportAttributeAccessIssue]
