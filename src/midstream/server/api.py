"""What every route answers with: the models, what is kept, and who asks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Annotated, Any, Final, TypeVar

from anyio import to_thread
from fastapi import Depends, Request

from midstream.core.wire import Wire
from midstream.formats.artifacts import ArtifactRegistry
from midstream.formats.held import Held

from .asking import Served, model_named
from .completing import Completing
from .errors import ApiError
from .files import Files
from .jobs_store import Jobs
from .keys import Key, Keys, Scope
from .ledger import Ledger
from .metrics import Metrics
from .owned import Owned
from .settings import Limits
from .storage import Database

Body = TypeVar("Body", bound=Wire)
_JSON: Final = "application/json"


@dataclass(frozen=True, eq=False)
class Api:
    """One server. models: by reference and alias. anonymous: who everybody is where there are no keys.

    sharing: held while an artifact gets or loses an owner, whose file others may have too.
    """

    models: Mapping[str, Served]
    limits: Limits
    database: Database
    keys: Keys
    ledger: Ledger
    owned: Owned
    registry: ArtifactRegistry
    files: Files
    jobs: Jobs
    held: Held
    completing: Completing
    metrics: Metrics
    anonymous: Key | None
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    sharing: Lock = field(default_factory=Lock)

    def model(self, name: str | None) -> Served:
        """The model that a request names."""
        return model_named(self.models, name)

    @property
    def served(self) -> list[Served]:
        """Every model once."""
        return list({one.name: one for one in self.models.values()}.values())


def api_of(request: Request) -> Api:
    """The server that a request came to."""
    return request.app.state.api


async def caller(request: Request, api: Annotated[Api, Depends(api_of)]) -> Key:
    """Whose request it is; 401 for none that is known."""
    if api.anonymous is not None:
        return api.anonymous
    scheme, _, secret = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret:
        raise ApiError(401, "no key: send Authorization: Bearer ms-…")
    key = await to_thread.run_sync(api.keys.find, secret.strip())
    if key is None:
        raise ApiError(401, "no such key, or it was revoked")
    return key


def need(key: Key, *scopes: Scope) -> None:
    """403 where a key lacks a scope."""
    for scope in scopes:
        if not key.may(scope):
            raise ApiError(403, f"this key may not {scope}: it has {', '.join(sorted(key.scopes))}")


TheApi = Annotated[Api, Depends(api_of)]
Caller = Annotated[Key, Depends(caller)]


async def read(request: Request, limit: int, seconds: float) -> bytes:
    """The body of a request: 413 past the limit, 408 where it does not come in time."""
    found = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                found += piece
                if len(found) > limit:
                    raise ApiError(413, f"the body has more than {limit:,} bytes")
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {seconds:g} seconds") from None
    return bytes(found)


async def body_of(request: Request, model: type[Body], limits: Limits) -> Body:
    """The body of a request, read as JSON of one form."""
    if (given := request.headers.get("content-type", "").partition(";")[0].strip().lower()) != _JSON:
        raise ApiError(415, f"the body is {_JSON}, and this one is {given or 'of no type'}")
    return parsed(await read(request, limits.body_bytes, limits.body_seconds), model)


def parsed(data: bytes | str, model: type[Body]) -> Body:
    """A text of JSON as one form; ApiError or SpecError for what is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is no JSON: {said:.120}") from None
    return model.of(value, "")


@asynccontextmanager
async def while_there(request: Request) -> AsyncIterator[Callable[[Any], Any]]:
    """Awaits something for as long as whoever asked is there; cancelled else, with an ApiError that nobody reads."""
    gone = asyncio.create_task(_gone(request))

    async def run(awaited: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(awaited)
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ApiError(499, "whoever asked has gone")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    try:
        yield run
    finally:
        gone.cancel()


async def _gone(request: Request) -> None:
    """Ends when the connection does: after the body, nothing else comes."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
