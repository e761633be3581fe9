"""`/v1/completions` and `/v1/chat/completions`."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import anyio
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..api import Api, Caller, TheApi, body_of, while_there
from ..asking import Ask
from ..bodies import Body, ChatBody, CompletionBody
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
    pieces = _pieces(api, key, ask)
    async with while_there(request) as running:
        first = await running(anext(pieces))  # what fails before it is an error of its own
    return Sent(first, pieces, "text/event-stream" if body.stream else "application/json")


async def _pieces(api: Api, key: Key, ask: Ask) -> AsyncGenerator[bytes]:
    """An answer as it is sent, until then with its place and its room; what was used is paid for, once.

    A stream that breaks off pays for what came before.
    """
    async with api.completing.running(ask, key.id) as (run, paying):
        if not ask.body.stream:
            pieces = await run.whole()
            await paying.settle(run.used, run.usage)
            api.metrics.completed(run)
            for piece in pieces:
                yield piece
            return
        try:
            async for piece in run.stream():
                yield piece
        finally:
            await paying.settle(run.used, run.usage)
            api.metrics.completed(run)


class Sent(StreamingResponse):
    """Pieces, of which the first is there; their source is closed with the connection: what runs for nobody ends."""

    def __init__(self, first: bytes, source: AsyncGenerator[bytes], media_type: str) -> None:
        self._source = source
        super().__init__(_after(first, source), media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._source.aclose()


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece
