"""The app: routes, the one form of every refusal, and what happens around each request."""

from __future__ import annotations

import html
import logging
import secrets
import time
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Final

import anyio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException

from midstream.core.errors import MidstreamError, json_path

from .api import Api
from .batches import Batches
from .errors import REQUEST_ID, ApiError, database_refusal, refusal, unexpected
from .routes import activations, artifacts, completions, files, jobs, models, usage
from .schema import describe
from .working import Working

_LOG: Final = logging.getLogger("midstream.server")
_HEADER: Final = "x-request-id"
Scope = MutableMapping[str, Any]


def create_app(api: Api) -> FastAPI:
    """An app that answers for a server's models."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await anyio.to_thread.run_sync(api.ledger.expire)
        app.state.working.start()
        try:
            yield
        finally:
            api.stopping.set()
            await app.state.working.stop()
            api.database.close()

    app = FastAPI(
        title="midstream",
        version=version("midstream"),
        description="Completions that can carry activations and steering.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.api = api
    app.state.batches = Batches(api.database, api.jobs, api.owned, api.files, api.limits.batch_lines)
    app.state.working = Working(api, app.state.batches)
    for part in (completions, models, artifacts, activations, files, jobs, usage):
        app.include_router(part.router)
    app.openapi = lambda: describe(app)  # pyright: ignore[reportAttributeAccessIssue]
    _refusals(app)
    _front(app, api)
    _gauges(api)
    app.add_middleware(Around, api=api)
    return app


def _refusals(app: FastAPI) -> None:
    @app.exception_handler(MidstreamError)
    async def refused(_: Request, error: MidstreamError) -> JSONResponse:
        found = refusal(error)
        if found.status >= 500:
            _LOG.error("failed", exc_info=error, extra={"request_id": REQUEST_ID.get()})
        return _answer(found)

    @app.exception_handler(OperationalError)
    async def away(_: Request, error: OperationalError) -> JSONResponse:
        _LOG.error("the database failed", exc_info=error)
        return _answer(database_refusal(error))

    @app.exception_handler(RequestValidationError)
    async def wrong(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = json_path("", tuple(first["loc"][1:]))
        return _answer(ApiError(400, f"{place}: {first['msg']}", place or None))

    @app.exception_handler(HTTPException)
    async def unrouted(request: Request, error: HTTPException) -> JSONResponse:
        message = f"no route {request.method} {request.url.path:.120}" if error.status_code == 404 else error.detail
        return _answer(ApiError(error.status_code, message), error.headers or {})

    @app.post("/v1/hooks/{name}", include_in_schema=False)
    async def hooks(name: str) -> None:
        message = f"hooks/{name:.40}: code of a caller is never run here: use steering and capture"
        raise ApiError(400, message, "apply_hooks")


def _answer(found: ApiError, headers: Mapping[str, str] = MappingProxyType({})) -> JSONResponse:
    return JSONResponse(found.body(), found.status, {**found.headers(), **headers})


def _front(app: FastAPI, api: Api) -> None:
    @app.get("/", include_in_schema=False)
    async def facts() -> HTMLResponse:
        """A plain page of facts."""
        rows = "".join(
            f"<tr><td>{html.escape(one.name)}</td><td>{one.engine.facts.num_layers}</td>"
            f"<td>{one.engine.facts.hidden_size}</td><td>{html.escape(one.engine.facts.dtype)}</td>"
            f"<td>{html.escape(', '.join(one.engine.capabilities.capture.sites))}</td></tr>"
            for one in api.served
        )
        return HTMLResponse(
            "<!doctype html><html lang=en><meta charset=utf-8><title>midstream</title>"
            f"<h1>midstream {html.escape(version('midstream'))}</h1>"
            "<table><tr><th>model<th>layers<th>width<th>dtype<th>sites</tr>"
            f"{rows}</table><p><a href=/openapi.json>OpenAPI</a>, <a href=/metrics>metrics</a></p></html>"
        )


def _gauges(api: Api) -> None:
    metrics = api.metrics
    metrics.gauge("requests_here", "Completions that run or wait", lambda: api.completing.places.taken)
    metrics.gauge("sequences_running", "Sequences in the batch", lambda: _sum(api, 0))
    metrics.gauge("sequences_waiting", "Sequences that wait for the batch", lambda: _sum(api, 1))
    metrics.gauge("held_bytes", "Activations that are made, or wait for whoever asked", lambda: api.held.nbytes)
    metrics.gauge("open_holds", "Holds of tokens that this process keeps", lambda: len(api.completing.renewing))


def _sum(api: Api, place: int) -> int:
    return sum(one.engine.counts[place] for one in api.served)


class Around:
    """Gives each request its id, counts it, and writes one line of log: no prompt, no key."""

    def __init__(self, app: Any, api: Api) -> None:
        self._app, self._api = app, api

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, begun, status = f"req_{secrets.token_hex(16)}", time.perf_counter(), 0
        REQUEST_ID.set(request_id)

        async def told(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (_HEADER.encode(), request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, told)
        except Exception as error:
            if not status:
                await _answer(unexpected())(scope, receive, told)
            _LOG.error("unexpected", exc_info=error, extra={"request_id": request_id})
        finally:
            route = getattr(scope.get("route"), "path", "none")
            seconds = time.perf_counter() - begun
            self._api.metrics.answered(route, status, seconds)
            facts = {"request_id": request_id, "route": route, "status": status, "seconds": round(seconds, 4)}
            _LOG.info("answered", extra={**facts, "method": scope["method"]})
