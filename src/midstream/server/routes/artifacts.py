"""Tensors by content address, owned by a key; under both `/v1/artifacts` and `/v1/midstream/artifacts`."""

from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from midstream.core.artifacts import as_artifact_id
from midstream.formats.artifacts import Upload

from ..api import Api, Caller, TheApi
from ..errors import ApiError
from ..files import full_disk
from ..keys import Key
from ..schema import Bytes

router = APIRouter(tags=["artifacts"])
_RAW = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}  # fmt: skip  # noqa: E501


def _routes(prefix: str) -> None:
    at = f"{prefix}/{{artifact_id}}"

    @router.get(prefix)
    async def artifacts(api: TheApi, key: Caller) -> dict[str, Any]:
        """What this key keeps, and how much room it has."""
        found = await to_thread.run_sync(api.owned.artifacts, key.id)
        listed = [{"id": one.artifact_id, "bytes": one.bytes, "created": int(one.created)} for one in found]
        used = sum(one.bytes for one in found)
        return {"data": listed, "used_bytes": used, "max_bytes": api.owned.artifact_quota.max_bytes}

    @router.put(at, status_code=201, openapi_extra=_RAW)
    async def put(artifact_id: str, request: Request, api: TheApi, key: Caller) -> Response:
        """Keep the file of an artifact; its bytes are hashed again."""
        await _put(artifact_id, request, api, key)
        return JSONResponse({"id": artifact_id}, status_code=201)

    @router.head(at, response_class=Response)
    async def has(artifact_id: str, api: TheApi, key: Caller) -> Response:
        """Whether this key keeps it: 200 or 404."""
        if not await _owned(api, key, artifact_id):
            raise ApiError(404, f"no artifact {artifact_id!r:.90}")
        return Response(status_code=200)

    @router.get(at, response_class=Bytes)
    async def get(artifact_id: str, api: TheApi, key: Caller) -> Response:
        """The file of an artifact."""
        if not await _owned(api, key, artifact_id):
            raise ApiError(404, f"no artifact {artifact_id!r:.90}")
        data = await to_thread.run_sync(api.registry.get_bytes, artifact_id, "artifact")
        return Bytes(data)

    @router.delete(at, status_code=204)
    async def delete(artifact_id: str, api: TheApi, key: Caller) -> Response:
        """Keep an artifact no longer; requests under way have it."""
        await to_thread.run_sync(_drop, api, key, artifact_id)
        return Response(status_code=204)


_routes("/v1/artifacts")
_routes("/v1/midstream/artifacts")


async def _put(artifact_id: str, request: Request, api: Api, key: Key) -> None:
    as_artifact_id(artifact_id, "artifact")
    room = await to_thread.run_sync(api.owned.room, key.id, api.owned.artifact_quota)
    most = min(room, api.limits.upload_bytes)
    with full_disk(), await to_thread.run_sync(api.registry.receiving, artifact_id, "artifact") as upload:
        count = 0
        async for piece in request.stream():
            count += len(piece)
            if count > most:
                raise ApiError(413, f"the artifact has more than {most:,} bytes, which may be kept: delete others")
            await to_thread.run_sync(upload.take, piece)
        await to_thread.run_sync(_keep, api, key, artifact_id, upload, count)


def _keep(api: Api, key: Key, artifact_id: str, upload: Upload, count: int) -> None:
    with api.sharing:
        upload.keep()
        api.owned.add_artifact(key.id, artifact_id, count)


def _drop(api: Api, key: Key, artifact_id: str) -> None:
    with api.sharing:
        left = api.owned.drop_artifact(key.id, artifact_id)
        if left is None:
            raise ApiError(404, f"no artifact {artifact_id!r:.90}")
        if not left and artifact_id in api.registry:
            api.registry.delete(artifact_id, "artifact")


async def _owned(api: Api, key: Key, artifact_id: str) -> bool:
    return await to_thread.run_sync(api.owned.artifact, key.id, artifact_id) is not None
