"""`/v1/activations/{handle}`: the bytes of what was captured."""

from collections.abc import AsyncIterator
from typing import Literal

from anyio import to_thread
from fastapi import APIRouter
from fastapi.responses import Response, StreamingResponse

from midstream.formats.wire import tensor_bytes, tensor_frame

from ..api import Caller, TheApi
from ..errors import ApiError
from ..schema import Bytes

router = APIRouter(tags=["activations"])
_PIECE = 1 << 20


@router.get("/v1/activations/{handle}", response_class=Bytes)
async def activations(
    handle: str, api: TheApi, _: Caller, compression: Literal["zstd", "none"] = "zstd"
) -> StreamingResponse:
    """The bytes of a tensor: one zstd frame, or as they are. The handle is the right to it: nobody can guess one."""
    tensor = api.held.get(handle)
    if tensor is None:
        raise ApiError(404, "no such handle, or it has expired: ask again for the completion", "handle")
    data = tensor_bytes(tensor) if compression == "none" else await to_thread.run_sync(tensor_frame, tensor)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), _PIECE):
            yield bytes(data[start : start + _PIECE])
        await api.held.fetched(handle)

    headers = {"content-length": str(len(data)), "cache-control": "no-store, private"}
    return StreamingResponse(pieces(), media_type="application/octet-stream", headers=headers)


@router.delete("/v1/activations/{handle}", status_code=204)
async def drop(handle: str, api: TheApi, _: Caller) -> Response:
    """Hold a tensor no longer."""
    if not await api.held.drop(handle):
        raise ApiError(404, "no such handle, or it has expired", "handle")
    return Response(status_code=204)
