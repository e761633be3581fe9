"""`/v1/activations/{handle}`: the bytes of what was captured."""

from typing import Literal

from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse

from ..api import Caller, TheApi
from ..errors import ApiError
from ..schema import Bytes

router = APIRouter(tags=["activations"])


@router.get("/v1/activations/{handle}", response_class=Bytes)
async def activations(
    handle: str, api: TheApi, _: Caller, compression: Literal["zstd", "none"] = "zstd"
) -> StreamingResponse:
    """The bytes of a tensor: one zstd frame, or as they are. The handle is the right to it: nobody can guess one."""
    found = await api.held.sent(handle, compression)
    if found is None:
        raise ApiError(404, "no such handle, or it has expired: ask again for the completion", "handle")
    size, pieces = found
    headers = {"content-length": str(size), "cache-control": "no-store, private"}
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


@router.delete("/v1/activations/{handle}", status_code=204)
async def drop(handle: str, api: TheApi, _: Caller) -> Response:
    """Hold a tensor no longer."""
    if not await api.held.drop(handle):
        raise ApiError(404, "no such handle, or it has expired", "handle")
    return Response(status_code=204)
