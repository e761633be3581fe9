"""Jobs as they run: taken from the queue below what people wait for, each result written once and paid once."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from anyio import to_thread
from sqlalchemy.exc import SQLAlchemyError

from midstream.core.errors import MidstreamError
from midstream.core.narrow import is_mapping

from .api import Api
from .asking import Ask
from .batches import Batches
from .bodies import Body, ChatBody, CompletionBody
from .errors import ApiError, refusal, unexpected
from .jobs_store import Job
from .permission import permitted

_LOG: Final = logging.getLogger(__name__)
_POLL: Final = 1.0
"""Seconds between looks for a job that another process queued, or left behind."""
_PASSING: Final = (MidstreamError, SQLAlchemyError)
"""What a database that is away for a moment, or a full disk, raises: the next round may go better."""
_BUSY: Final = frozenset({429, 503})
_ATTEMPTS: Final = 5
"""How often a job is begun whose worker dies before its end: it may be what kills it."""
BODIES: Final[dict[str, type[Body]]] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}


def check_job(value: Any, endpoint: str) -> Body:
    """The body of a job; ApiError or SpecError for one that cannot be a job's."""
    if not is_mapping(value):
        raise ApiError(400, f"a body is an object, got {value!r:.60}", "body")
    body = BODIES[endpoint].of(value, "body")
    if body.stream:
        raise ApiError(400, "a job has nobody to stream to: leave stream out", "body.stream")
    transport = body.activations_transport or (body.vllm_xargs or {}).get("activations_transport")
    if transport == "binary":
        raise ApiError(400, "a handle expires before a job is read: leave it out", "body.activations_transport")
    return body


@dataclass(eq=False)
class Working:
    """The workers of one server."""

    api: Api
    batches: Batches
    name: str = field(default_factory=lambda: f"worker-{secrets.token_hex(4)}")
    _claims: dict[str, tuple[str, asyncio.Task[Any]]] = field(default_factory=dict[str, Any])
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _look: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list[Any])

    def start(self) -> None:
        """Begin to take jobs, and to keep the leases of what runs."""
        self._tasks = [asyncio.create_task(self._work()) for _ in range(self.api.limits.jobs_at_a_time)]
        self._tasks += [asyncio.create_task(self._keep())]

    def told(self) -> None:
        """There is a job."""
        self._news.set()

    def cancelled(self) -> None:
        """Some jobs were cancelled: those that run here end now."""
        self._look.set()

    async def stop(self) -> None:
        """Take no more; what runs goes back to the queue."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _work(self) -> None:
        while True:
            try:
                job = await to_thread.run_sync(self.api.jobs.claim, self.name)
                if job is not None:
                    await self._run(job)
                    continue
            except _PASSING:
                _LOG.exception("a job could not be taken, or its end not written")
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _POLL)

    async def _run(self, job: Job) -> None:
        assert job.claim is not None, "it was claimed"
        task = asyncio.create_task(self._answer(job))
        self._claims[job.id] = (job.claim, task)
        try:
            await asyncio.wait([task])
        finally:
            del self._claims[job.id]
            if not task.done():  # the server stops
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                await asyncio.shield(to_thread.run_sync(self.api.jobs.release, job.id, job.claim))
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("job %s failed", job.id, exc_info=error)
            await self._finish(job, unexpected())
        if job.batch_id is not None:
            await to_thread.run_sync(self.batches.ended, job.batch_id)

    async def _answer(self, job: Job) -> None:
        """Run a job and write its result; what is too busy now goes back to the queue."""
        api, claim = self.api, job.claim
        assert claim is not None, "it was claimed"
        if job.attempts > _ATTEMPTS:
            await self._finish(job, ApiError(500, f"whoever ran it died, {_ATTEMPTS} times"))
            return
        try:
            ask = await self._asked(job)
            async with api.completing.running(ask, job.key_id) as (run, paying):
                result = b"".join(await run.whole()).decode()
                paying.open = False  # with the result, in one transaction
                used, usage = run.used, run.usage

                def finish() -> bool:
                    return api.jobs.finish(job.id, claim, 200, result, paying.hold_id, used, usage)

                try:
                    await to_thread.run_sync(finish)
                except MidstreamError:
                    paying.open = True
                    raise
            api.metrics.completed(run)
        except MidstreamError as error:
            refused = refusal(error)
            if refused.status in _BUSY:
                await to_thread.run_sync(api.jobs.release, job.id, claim)
                await asyncio.sleep(_POLL)
            else:
                await self._finish(job, refused)

    async def _asked(self, job: Job) -> Ask:
        api = self.api
        key = await to_thread.run_sync(api.keys.get, job.key_id)
        if key is None or key.revoked_at is not None:
            raise ApiError(401, "its key was revoked")
        body = check_job(json.loads(await to_thread.run_sync(api.jobs.body, job.id) or "null"), job.endpoint)
        return await permitted(api, key, body)

    async def _finish(self, job: Job, error: ApiError) -> None:
        assert job.claim is not None, "it was claimed"
        body = json.dumps(error.body(f"req_{secrets.token_hex(16)}"))
        await to_thread.run_sync(self.api.jobs.finish, job.id, job.claim, error.status, body)

    async def _keep(self) -> None:
        """Renew leases well before they end, let go of what others left behind, and see to batches that are over."""
        api = self.api
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), api.limits.lease_seconds / 4)
            self._look.clear()
            try:
                if api.completing.renewing:
                    await to_thread.run_sync(api.ledger.renew, set(api.completing.renewing))
                for job_id, (claim, task) in list(self._claims.items()):
                    if not await to_thread.run_sync(api.jobs.renew, job_id, claim):
                        task.cancel()  # it was cancelled, or another has it
                await to_thread.run_sync(api.ledger.expire)
                await to_thread.run_sync(api.jobs.delete_expired)
                for batch_id in await to_thread.run_sync(self.batches.unfinished):
                    await to_thread.run_sync(self.batches.ended, batch_id)
            except _PASSING:
                _LOG.exception("leases could not be renewed")
