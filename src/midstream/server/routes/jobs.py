"""`/v1/jobs`: one request that outlives its connection."""

import json
from typing import Any, ClassVar

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import Response

from midstream.core.wire import Wire

from ..api import Api, Caller, TheApi, body_of, need
from ..batches import Endpoint
from ..errors import ApiError
from ..jobs_store import Job, NewJob
from ..keys import Key
from ..permission import permitted
from ..schema import request_of
from ..working import check_job

router = APIRouter(tags=["jobs"])


class JobBody(Wire):
    """`POST /v1/jobs`: the body of a completion, and which kind it is."""

    root: ClassVar[str] = ""

    endpoint: Endpoint = "/v1/completions"
    body: dict[str, Any]


_JOB: dict[str, Any] = {"endpoint": "/v1/completions", "body": {"prompt": "hello", "max_tokens": 4, "capture": {}}}


@router.post("/v1/jobs", status_code=202, openapi_extra=request_of(JobBody, a_captured_completion=_JOB))
async def create(request: Request, api: TheApi, key: Caller) -> dict[str, Any]:
    """Queue a completion; what is wrong with it is said now."""
    need(key, "complete")
    given = await body_of(request, JobBody, api.limits)
    await permitted(api, key, check_job(given.body, given.endpoint))
    new = NewJob(given.endpoint, json.dumps(given.body))
    (job_id,) = await to_thread.run_sync(api.jobs.add, key.id, [new])
    request.app.state.working.told()
    return _plain(await _mine(api, key, job_id))


@router.get("/v1/jobs/{job_id}")
async def job(job_id: str, api: TheApi, key: Caller) -> dict[str, Any]:
    """How a job goes."""
    return _plain(await _mine(api, key, job_id))


@router.get("/v1/jobs/{job_id}/result")
async def result(job_id: str, api: TheApi, key: Caller) -> Response:
    """Its completion, or the error that it ended with."""
    one = await _mine(api, key, job_id)
    text = await to_thread.run_sync(api.jobs.result, job_id)
    if text is None:
        raise ApiError(409, f"{job_id} is {one.state}: it has no result")
    return Response(text, status_code=one.status_code or 200, media_type="application/json")


@router.delete("/v1/jobs/{job_id}", status_code=204)
async def delete(job_id: str, request: Request, api: TheApi, key: Caller) -> Response:
    """Cancel a job if it has not ended, and forget it."""
    one = await _mine(api, key, job_id)
    if one.batch_id is not None:
        raise ApiError(409, f"{job_id} belongs to {one.batch_id}: cancel that")
    await to_thread.run_sync(api.jobs.cancel, job_id)
    request.app.state.working.cancelled()
    await to_thread.run_sync(api.jobs.delete, job_id)
    return Response(status_code=204)


async def _mine(api: Api, key: Key, job_id: str) -> Job:
    found = await to_thread.run_sync(api.jobs.get, job_id)
    if found is None or found.key_id != key.id:
        raise ApiError(404, f"no job {job_id!r:.60}")
    return found


def _plain(one: Job) -> dict[str, Any]:
    def second(value: float | None) -> int | None:
        return None if value is None else int(value)

    return {
        "id": one.id,
        "object": "job",
        "status": one.state,
        "endpoint": one.endpoint,
        "status_code": one.status_code,
        "created_at": int(one.created),
        "started_at": second(one.started),
        "ended_at": second(one.ended),
        "expires_at": second(one.expires_at),
    }
