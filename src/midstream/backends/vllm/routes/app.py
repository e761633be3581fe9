"""Routes of our own in a `vllm serve`: what it is, artifacts, and tensors by handle."""

# FastAPI reads the annotations of routes, so they are no texts here
# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

import asyncio
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from midstream.core.errors import SpecError

from .answering import Answering

STATE: Final = "midstream_answering"
"""Where the app's state has the Answering; None where the engine was not asked for taps."""
SAID: Final = "midstream_capabilities"
_STATUS: Final = {"E_ARTIFACT_MISSING": 404, "E_SPEC_TOO_LARGE": 413}
router: Final = APIRouter(tags=["midstream"])


def answering_of(request: Request) -> Answering | None:
    """The Answering of an app; None where its engine was not asked for taps."""
    return getattr(request.app.state, STATE, None)


def error_body(status: int, message: str, param: str | None, code: str | None = None) -> dict[str, Any]:
    """An error as vLLM writes them, whose own code is the status."""
    return {
        "error": {"message": message, "type": code or "invalid_request_error", "param": param, "code": status}
    }  # fmt: skip


def refused(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """The answer to what cannot be."""
    return JSONResponse(error_body(status, message, param, code), status_code=status)


def refusal(error: SpecError) -> JSONResponse:
    """The answer to what is wrong."""
    return refused(_STATUS.get(error.code, 400), str(error), error.path)


@router.get("/v1/midstream/capabilities")
async def capabilities(request: Request) -> Response:
    """Versions, model, sites, kinds and limits."""
    said = getattr(request.app.state, SAID, None)
    return _untapped() if said is None else JSONResponse(said)


def _untapped() -> JSONResponse:
    return refused(501, "this engine was not asked for taps: start it with `midstream vllm-serve`", None, "untapped")


# --- artifacts


@router.get("/v1/midstream/artifacts")
async def artifacts(request: Request) -> Response:
    """What is kept, and how much room there is."""
    if (answering := answering_of(request)) is None:
        return _untapped()
    registry = answering.registry
    listed = [{"id": one.id, "bytes": one.bytes, "shape": one.shape} for one in registry.entries()]
    return JSONResponse({"data": listed, "used_bytes": registry.used_bytes(), "max_bytes": registry.max_bytes})


@router.put("/v1/midstream/artifacts/{artifact_id}")
async def put_artifact(artifact_id: str, request: Request) -> Response:
    """Keep the file of an artifact; its bytes are hashed again."""
    if (answering := answering_of(request)) is None:
        return _untapped()
    try:
        upload = await asyncio.to_thread(answering.registry.receiving, artifact_id, "artifact")
        with upload:
            async for piece in request.stream():
                await asyncio.to_thread(upload.take, piece)
            await asyncio.to_thread(upload.keep)
    except SpecError as error:
        return refusal(error)
    return JSONResponse({"id": artifact_id}, status_code=201)


@router.head("/v1/midstream/artifacts/{artifact_id}")
async def has_artifact(artifact_id: str, request: Request) -> Response:
    """Whether an artifact is kept: 200 or 404."""
    answering = answering_of(request)
    try:
        known = answering is not None and artifact_id in answering.registry
    except SpecError:
        known = False
    return Response(status_code=200 if known else 404)


@router.get("/v1/midstream/artifacts/{artifact_id}")
async def get_artifact(artifact_id: str, request: Request) -> Response:
    """The file of an artifact."""
    if (answering := answering_of(request)) is None:
        return _untapped()
    try:
        data = await asyncio.to_thread(answering.registry.get_bytes, artifact_id, "artifact")
    except SpecError as error:
        return refusal(error)
    return Response(data, media_type="application/octet-stream")


@router.delete("/v1/midstream/artifacts/{artifact_id}")
async def delete_artifact(artifact_id: str, request: Request) -> Response:
    """Keep an artifact no longer; requests under way have it."""
    if (answering := answering_of(request)) is None:
        return _untapped()
    try:
        answering.registry.delete(artifact_id, "artifact")
    except SpecError as error:
        return refusal(error)
    return Response(status_code=204)


# --- tensors by handle


@router.get("/v1/activations/{handle}")
async def activations(handle: str, request: Request, compression: str = "zstd") -> Response:
    """The bytes of a tensor: one zstd frame, or with `?compression=none` as they are."""
    answering = answering_of(request)
    if compression not in ("zstd", "none"):
        return refused(400, f"no compression {compression!r:.40}; there are: zstd, none", "compression")
    found = None if answering is None else await answering.held.sent(handle, compression)
    if found is None:
        return refused(404, "no such handle, or it has expired: ask again for the completion", "handle", "not_found")
    size, pieces = found
    headers = {"content-length": str(size), "cache-control": "no-store, private"}
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


@router.delete("/v1/activations/{handle}")
async def drop_activations(handle: str, request: Request) -> Response:
    """Hold a tensor no longer."""
    answering = answering_of(request)
    known = answering is not None and await answering.held.drop(handle)
    return Response(status_code=204 if known else 404)
