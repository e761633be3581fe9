"""`/v1/files` and `/v1/batches`: OpenAI's, for requests in files."""

from collections.abc import AsyncGenerator
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from ..api import Api, Caller, TheApi, body_of
from ..batches import BatchBody, Batches
from ..bodies import check_name
from ..errors import ApiError
from ..keys import Key
from ..owned import OwnedFile
from ..schema import Bytes, request_of

router = APIRouter(tags=["files"])
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}
_PIECE = 1 << 20
Limit = Annotated[int, Query(ge=1, le=100)]


@router.post("/v1/files", openapi_extra=_FORM)
async def upload(request: Request, api: TheApi, key: Caller) -> dict[str, Any]:
    """Keep a file of requests, for a batch."""
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise ApiError(
            415, f"a file comes as multipart/form-data, and this is {kind.partition(';')[0] or 'of no type'}"
        )
    room = min(await to_thread.run_sync(api.owned.room, key.id, api.owned.file_quota), api.limits.upload_bytes)
    parser = MultiPartParser(request.headers, _counted(request, room + _PIECE), max_files=1, max_fields=8)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise ApiError(400, f"the form cannot be read: {error.message:.120}", "file") from None
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "the form has no file", "file")
        if purpose != "batch":
            raise ApiError(400, f"purpose is batch, got {purpose!r:.40}", "purpose")
        name = check_name(file.filename or "file", "file")
        return _plain(await to_thread.run_sync(_kept, api, key, file, name, room))
    finally:
        await form.close()


async def _counted(request: Request, most: int) -> AsyncGenerator[bytes]:
    count = 0
    async for piece in request.stream():
        count += len(piece)
        if count > most:
            raise ApiError(413, f"the file has more than {most - _PIECE:,} bytes, which may be kept: delete others")
        yield piece


def _kept(api: Api, key: Key, file: UploadFile, name: str, room: int) -> OwnedFile:
    with api.files.arriving(room) as arriving:
        while piece := file.file.read(_PIECE):
            arriving.take(piece)
        made = api.owned.add_file(key.id, name, "batch", arriving.bytes, arriving.sha256)
        try:
            arriving.keep(made.id)
        except BaseException:
            api.owned.drop_file(key.id, made.id)
            raise
    return made


@router.get("/v1/files")
async def files(
    api: TheApi, key: Caller, purpose: str | None = None, after: str | None = None, limit: Limit = 100
) -> dict[str, Any]:
    """This key's files, newest first."""
    found = await to_thread.run_sync(api.owned.files, key.id)
    found = [one for one in found if purpose in (None, one.purpose)]
    ids = [one.id for one in found]
    start = ids.index(after) + 1 if after in ids else 0
    shown = [_plain(one) for one in found[start : start + limit]]
    return _page(shown, len(found) > start + limit)


@router.get("/v1/files/{file_id}")
async def file(file_id: str, api: TheApi, key: Caller) -> dict[str, Any]:
    """One file."""
    return _plain(await _mine(api, key, file_id))


@router.get("/v1/files/{file_id}/content", response_class=Bytes)
async def content(file_id: str, api: TheApi, key: Caller) -> FileResponse:
    """What is in it."""
    one = await _mine(api, key, file_id)
    return FileResponse(api.files.path(one.id), media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
async def delete(file_id: str, api: TheApi, key: Caller) -> dict[str, Any]:
    """Keep it no longer."""
    one = await _mine(api, key, file_id)
    await to_thread.run_sync(api.owned.drop_file, key.id, one.id)
    await to_thread.run_sync(api.files.delete, one.id)
    return {"id": one.id, "object": "file", "deleted": True}


async def _mine(api: Api, key: Key, file_id: str) -> OwnedFile:
    found = await to_thread.run_sync(api.owned.file, key.id, file_id)
    if found is None:
        raise ApiError(404, f"no file {file_id!r:.60}")
    return found


def _plain(one: OwnedFile) -> dict[str, Any]:
    return {
        "id": one.id, "object": "file", "bytes": one.bytes, "created_at": int(one.created), "filename": one.filename,
        "purpose": one.purpose, "status": one.status,
    }  # fmt: skip


def _page(found: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return {"object": "list", "data": found, **ends, "has_more": more}


# --- batches


def _batches(request: Request) -> Batches:
    return request.app.state.batches


@router.post("/v1/batches", openapi_extra=request_of(BatchBody))
async def create(request: Request, api: TheApi, key: Caller) -> dict[str, Any]:
    """Run every request of a file."""
    body = await body_of(request, BatchBody, api.limits)
    made = await to_thread.run_sync(_batches(request).create, key.id, body)
    request.app.state.working.told()
    return made


@router.get("/v1/batches")
async def batches(
    request: Request, api: TheApi, key: Caller, after: str | None = None, limit: Limit = 20
) -> dict[str, Any]:
    """This key's batches, newest first."""
    return _page(*await to_thread.run_sync(_batches(request).list, key.id, after, limit))


@router.get("/v1/batches/{batch_id}")
async def batch(batch_id: str, request: Request, key: Caller) -> dict[str, Any]:
    """One batch."""
    return await to_thread.run_sync(_batches(request).get, key.id, batch_id)


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel(batch_id: str, request: Request, key: Caller) -> dict[str, Any]:
    """Run no more of it; what is done stays."""
    found = await to_thread.run_sync(_batches(request).cancel, key.id, batch_id)
    request.app.state.working.cancelled()
    return found
