"""One server over HTTP: what is sent again and what is not, and what its refusals mean."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, get_args

import anyio
import httpx2
import stamina
import torch
from torch import Tensor

from midstream.core.errors import (
    CaptureError,
    Code,
    EngineError,
    MidstreamError,
    PromptError,
    TransportError,
    spec_error,
)
from midstream.formats.activations import HANDLE, HeldTensor
from midstream.taps.pages import PAGES

from .options import ServeOptions

_AGAIN: Final = frozenset({408, 429})
_NEVER: Final = frozenset({501, 505})
"""Of the 5xx: a server that says so will say so again."""
_LONGEST: Final = 30.0
_SOON: Final = 2.0
"""Seconds in which a server says that it is well."""
_CODED: Final = re.compile(r"(E_[A-Z_]+) at ([^ ]*): (.*)", re.DOTALL)


class _Again(TransportError):
    """What may go better the next time. after: seconds that the server asks for."""

    def __init__(self, message: str, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


class UnknownThereError(EngineError):
    """A server that does not know a route, or what it names."""


class BrokenStreamError(TransportError):
    """A stream that broke off after some of it had come: another would go on differently."""


class Server:
    """One server. running: how many requests of ours it has."""

    def __init__(self, base_url: str, options: ServeOptions, api_key: str | None) -> None:
        self.base_url, self._options = base_url, options
        self.running = 0
        self.artifacts: set[str] = set()
        self.sending = anyio.Lock()
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        limits = httpx2.Limits(max_connections=2 * options.max_concurrency + 4)
        self._client = httpx2.AsyncClient(
            base_url=base_url, headers=headers, timeout=options.request_timeout, limits=limits, trust_env=False
        )

    def __repr__(self) -> str:
        return f"Server({self.base_url!r})"

    async def close(self) -> None:
        """Let go of its connections."""
        await self._client.aclose()

    # --- requests

    async def is_well(self) -> bool:
        """Whether it says that it is, soon."""
        try:
            return (await self._client.get("/health", timeout=_SOON)).status_code == 200
        except httpx2.TransportError:
            return False

    async def json(self, method: str, path: str, body: Any = None, *, read: bool = True) -> Any:
        """What it answers, read as JSON. TransportError: it did not answer; else what its refusal means.

        read: whether there is anything to read.
        """
        async for attempt in self._attempts():
            with attempt:
                with _heard(self.base_url):
                    response = await self._client.request(method, path, json=body)
                _check(self.base_url, response.status_code, response.headers, response.content)
                with _heard(self.base_url):
                    return response.json() if read else None
        raise AssertionError("an attempt returns or raises")

    async def put(self, path: str, data: bytes) -> None:
        """Send bytes."""
        async for attempt in self._attempts():
            with attempt:
                with _heard(self.base_url):
                    response = await self._client.put(path, content=data)
                _check(self.base_url, response.status_code, response.headers, response.content)

    async def has(self, path: str) -> bool:
        """Whether it knows what is there."""
        async for attempt in self._attempts():
            with attempt:
                with _heard(self.base_url):
                    response = await self._client.head(path)
                if response.status_code == 404:
                    return False
                _check(self.base_url, response.status_code, response.headers, b"")
                return True
        raise AssertionError("an attempt returns or raises")

    async def tensor(self, held: HeldTensor) -> Tensor:
        """A tensor that it holds, in memory of our own; it holds it no longer then."""
        path = HANDLE.format(handle=held.handle)
        async for attempt in self._attempts():
            with attempt:
                raw = PAGES.tensor((held.size_bytes,), torch.uint8)
                await self._read_into(raw.numpy().data, path)
                with suppress(httpx2.HTTPError):  # it goes by itself too
                    await self._client.delete(path)
                return raw.view(held.torch_dtype).view(held.shape)
        raise AssertionError("an attempt returns or raises")

    async def _read_into(self, out: memoryview, path: str) -> None:
        """Fill memory with the bytes that are there; exactly so many."""
        read = 0
        with _heard(self.base_url):
            async with self._client.stream(
                "GET", path, params={"compression": "none"}, headers={"accept-encoding": "identity"}
            ) as response:
                if response.status_code == 404:
                    raise TransportError(f"{self.base_url} holds these activations no longer: send it again")
                if response.status_code != 200:
                    _check(self.base_url, response.status_code, response.headers, await response.aread())
                async for piece in response.aiter_raw():
                    if read + len(piece) > len(out):
                        raise _Again(f"{self.base_url} sent more than {len(out)} bytes of activations")
                    out[read : read + len(piece)] = piece
                    read += len(piece)
        if read != len(out):
            raise _Again(f"{self.base_url} sent {read} of {len(out)} bytes of activations")

    @asynccontextmanager
    async def events(self, path: str, body: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The events of a stream, read as JSON. BrokenStreamError: some of it had come."""
        with _heard(self.base_url):
            async with self._client.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    _check(self.base_url, response.status_code, response.headers, await response.aread())
                yield self._events(response)

    async def _events(self, response: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
        begun = False
        try:
            with _heard(self.base_url):
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        return
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise _meaning(self.base_url, int(event["error"].get("code") or 500), event)
                    begun = True
                    yield event
            raise TransportError(f"{self.base_url} broke off in the middle of a stream: send it again")
        except TransportError as error:
            raise (BrokenStreamError(str(error)) if begun else error) from error

    def _attempts(self) -> Any:
        """One, and others after pauses that grow, or that the server asks for."""

        def again(error: Exception) -> bool | timedelta:
            if not isinstance(error, _Again):
                return False
            return True if error.after is None else timedelta(seconds=min(error.after, _LONGEST))

        return stamina.retry_context(
            on=again,
            attempts=self._options.max_retries + 1,
            timeout=None,
            wait_initial=self._options.retry_backoff,
            wait_max=_LONGEST,
            wait_jitter=self._options.retry_backoff / 2,
        )


@contextmanager
def _heard(base_url: str) -> Iterator[None]:
    """What goes wrong on the way, in our words."""
    try:
        yield
    except httpx2.TimeoutException as error:
        raise _Again(f"{base_url} did not answer in time: give a larger request_timeout") from error
    except httpx2.TransportError as error:
        said = str(error) or type(error).__name__
        raise _Again(f"{base_url} cannot be reached, or broke off: {said:.200}") from error
    except MidstreamError:
        raise
    except (ValueError, httpx2.DecodingError) as error:
        raise _Again(f"{base_url} answered what is no JSON: {error!s:.120}") from error


def _check(base_url: str, status: int, headers: Mapping[str, str], content: bytes) -> None:
    """Raise what a status means, if it is no success."""
    if status < 400:
        return
    if status in _AGAIN or (status >= 500 and status not in _NEVER):
        after = headers.get("retry-after", "")
        message = f"{base_url} said {status}: {_message(content)}"
        raise _Again(message, float(after) if after.isdigit() else None)
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    raise _meaning(base_url, status, body, _message(content))


def _message(content: bytes) -> str:
    text = " ".join(content.decode("utf-8", "replace").split())
    try:
        found = json.loads(content)["error"]
        text = found["message"] if isinstance(found, dict) else str(found)
    except (ValueError, KeyError, TypeError):
        pass
    return f"{text:.300}"


def _meaning(base_url: str, status: int, body: Any, text: str = "") -> MidstreamError:
    """A refusal as the error that it would be here."""
    found = body.get("error") if isinstance(body, dict) else None
    message = str(found.get("message", text)) if isinstance(found, dict) else text
    coded = _CODED.match(message)
    if coded is not None and coded[1] in get_args(Code):
        return spec_error(coded[1], coded[2], coded[3])  # pyright: ignore[reportArgumentType]
    if status in (401, 403):
        return EngineError(f"{base_url} refuses the key: give its api_key")
    if status == 404:
        return UnknownThereError(f"{base_url} knows nothing of that: {message:.200}")
    if status == 409:
        return EngineError(f"{base_url}: {message:.200}: load it again")
    if status == 422:
        return CaptureError(message)
    if status >= 500:
        return TransportError(f"{base_url}: {message:.200}")
    return PromptError(f"the server refuses it: {message:.300}")
