"""Batches: a file of requests as jobs, and what they answered as files, in OpenAI's words."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field
from sqlalchemy import select, update

from midstream.core.errors import MidstreamError
from midstream.core.wire import Wire

from .bodies import Text
from .errors import ApiError
from .files import Files
from .jobs_store import Jobs, NewJob
from .owned import Owned
from .storage import Database
from .storage.tables import CANCELLED, DONE, QUEUED, RUNNING, BatchRow

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]
_WINDOW: Final = 86400.0
_ENDED: Final = ("completed", "failed", "expired", "cancelled")


class BatchBody(Wire):
    """`POST /v1/batches`."""

    root: ClassVar[str] = ""

    input_file_id: Text
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Text, Text], Field(max_length=16)] | None = None


class _Line(Wire):
    """One request of a batch."""

    root: ClassVar[str] = ""

    custom_id: Annotated[Text, Field(max_length=512)]
    method: Literal["POST"] = "POST"
    url: Endpoint
    body: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Batches:
    """Of one server."""

    database: Database
    jobs: Jobs
    owned: Owned
    files: Files
    max_lines: int

    def create(self, key_id: str, body: BatchBody) -> dict[str, Any]:
        """A batch whose jobs are queued; one whose file is wrong has failed, and says on which line."""
        source = self.owned.file(key_id, body.input_file_id)
        if source is None:
            raise ApiError(404, f"no file {body.input_file_id!r:.60}", "input_file_id")
        if source.purpose != "batch":
            raise ApiError(400, f"{source.id} is for {source.purpose}: upload it with purpose batch", "input_file_id")
        lines, errors = self._lines(source.id, body.endpoint)
        now = time.time()
        row = BatchRow(
            id=f"batch_{source.id.removeprefix('file-')[:8]}{time.time_ns():x}", key_id=key_id, endpoint=body.endpoint,
            input_file_id=source.id, completion_window=body.completion_window, created=now, expires_at=now + _WINDOW,
            state="failed" if errors else "in_progress", total=len(lines),
            errors=json.dumps(errors) if errors else None,
            metadata_json=None if body.metadata is None else json.dumps(body.metadata),
            in_progress_at=None if errors else now, failed_at=now if errors else None,
        )  # fmt: skip
        with self.database.session() as session:
            session.add(row)
            session.flush()
            if not errors:
                self.jobs.add(key_id, lines, row.id, session)
        return self._plain(row)

    def _lines(self, file_id: str, endpoint: str) -> tuple[list[NewJob], list[dict[str, Any]]]:
        found: list[NewJob] = []
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()
        with self.files.path(file_id).open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    found.append(_job(line, endpoint, seen))
                except (MidstreamError, ValueError, RecursionError) as error:
                    errors.append({"code": "invalid_line", "line": number, "message": f"{error!s:.300}", "param": None})
                if len(found) > self.max_lines or len(errors) > 100:
                    break
        if len(found) > self.max_lines:
            message = f"more than {self.max_lines} lines"
            errors.append({"code": "too_many_lines", "line": None, "message": message, "param": None})
        if not found and not errors:
            errors.append({"code": "empty_file", "line": None, "message": "the file has no line", "param": None})
        return found, errors

    # --- what becomes of them

    def ended(self, batch_id: str) -> bool:
        """Write the files of a batch of which no job is left, once. Whether it is over."""
        counts = self.jobs.counts_of_batch(batch_id)
        if counts.get(QUEUED) or counts.get(RUNNING):
            return False
        with self.database.reading() as session:
            row = session.get(BatchRow, batch_id)
        if row is None or row.state in _ENDED:
            return True
        output = self._write(row, "output", done=True)
        errors = self._write(row, "errors", done=False)
        now, cancelled = time.time(), row.state == "cancelling"
        ends: dict[str, Any] = {"state": "cancelled" if cancelled else "completed", "output_file_id": output}
        ends |= {"error_file_id": errors, "completed": counts.get(DONE, 0)}
        ends |= {"failed": row.total - counts.get(DONE, 0), "cancelled_at" if cancelled else "completed_at": now}
        still = (BatchRow.id == batch_id, BatchRow.state.not_in(_ENDED))
        with self.database.session() as session:
            mine = session.execute(update(BatchRow).where(*still).values(**ends).returning(BatchRow.id)).one_or_none()
        if mine is None:  # another process was quicker
            for made in filter(None, (output, errors)):
                self.owned.drop_file(row.key_id, made)
                self.files.delete(made)
        return True

    def _write(self, row: BatchRow, what: str, *, done: bool) -> str | None:
        """The answers of a batch's jobs, or the refusals, as a file; None: there are none."""
        quota = self.owned.room(row.key_id, self.owned.file_quota)
        with self.files.arriving(quota) as file:
            for line in self._answers(row.id, done):
                file.take(line)
            if not file.bytes:
                return None
            made = self.owned.add_file(row.key_id, f"{row.id}_{what}.jsonl", "batch_output", file.bytes, file.sha256)
            file.keep(made.id)
        return made.id

    def _answers(self, batch_id: str, done: bool) -> Iterator[bytes]:
        place = -1
        while jobs := self.jobs.list_of_batch(batch_id, place, 100):
            for job in jobs:
                place = job.place
                if (job.state == DONE) != done:
                    continue
                body = self.jobs.result(job.id)
                head = json.dumps({"id": job.id, "custom_id": job.custom_id})[:-1]
                if body is None:
                    error = {"code": job.state, "message": f"the job was {job.state}"}
                    yield f'{head}, "response": null, "error": {json.dumps(error)}}}\n'.encode()
                    continue
                status = json.dumps({"status_code": job.status_code, "request_id": job.id})[:-1]
                yield f'{head}, "response": {status}, "body": {body}}}, "error": null}}\n'.encode()

    def cancel(self, key_id: str, batch_id: str) -> dict[str, Any]:
        """Cancel what of a batch has not ended."""
        row = self._row(key_id, batch_id)
        if row.state in _ENDED:
            raise ApiError(409, f"{batch_id} is {row.state}")
        with self.database.session() as session:
            still = (BatchRow.id == batch_id, BatchRow.state == "in_progress")
            session.execute(update(BatchRow).where(*still).values(state="cancelling", cancelling_at=time.time()))
        self.jobs.cancel_batch(batch_id)
        self.ended(batch_id)
        return self.get(key_id, batch_id)

    def unfinished(self) -> list[str]:
        """The batches that are not over."""
        with self.database.reading() as session:
            return list(session.scalars(select(BatchRow.id).where(BatchRow.state.not_in(_ENDED))))

    # --- reading

    def get(self, key_id: str, batch_id: str) -> dict[str, Any]:
        """One of a key's batches."""
        return self._plain(self._row(key_id, batch_id))

    def list(self, key_id: str, after: str | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """A key's batches, newest first, behind one of them; and whether there are more."""
        mine = select(BatchRow).where(BatchRow.key_id == key_id).order_by(BatchRow.created.desc(), BatchRow.id)
        with self.database.reading() as session:
            rows = list(session.scalars(mine))
        ids = [row.id for row in rows]
        start = ids.index(after) + 1 if after in ids else 0
        return [self._plain(row) for row in rows[start : start + limit]], len(rows) > start + limit

    def _row(self, key_id: str, batch_id: str) -> BatchRow:
        with self.database.reading() as session:
            row = session.scalar(select(BatchRow).where(BatchRow.id == batch_id, BatchRow.key_id == key_id))
        if row is None:
            raise ApiError(404, f"no batch {batch_id!r:.60}")
        return row

    def _plain(self, row: BatchRow) -> dict[str, Any]:
        counts: Mapping[str, int] = {DONE: row.completed}
        if row.state not in _ENDED:
            counts = self.jobs.counts_of_batch(row.id)
            failed = sum(counts.get(state, 0) for state in ("failed", CANCELLED))
        else:
            failed = row.failed
        errors = json.loads(row.errors) if row.errors else None
        times = ("in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at")
        return {
            "id": row.id,
            "object": "batch",
            "endpoint": row.endpoint,
            "errors": None if errors is None else {"object": "list", "data": errors},
            "input_file_id": row.input_file_id,
            "completion_window": row.completion_window,
            "status": row.state,
            "output_file_id": row.output_file_id,
            "error_file_id": row.error_file_id,
            "created_at": int(row.created),
            **{name: _second(getattr(row, name)) for name in (*times, "cancelling_at", "cancelled_at")},
            "request_counts": {"total": row.total, "completed": counts.get(DONE, 0), "failed": failed},
            "metadata": json.loads(row.metadata_json) if row.metadata_json else None,
        }


def _second(value: float | None) -> int | None:
    return None if value is None else int(value)


def _job(line: bytes, endpoint: str, seen: set[str]) -> NewJob:
    one = _Line.of(json.loads(line), "")
    if one.url != endpoint:
        raise ValueError(f"url is {one.url}, and the batch's endpoint {endpoint}")
    if one.custom_id in seen:
        raise ValueError(f"custom_id {one.custom_id!r:.80} stands on another line too")
    seen.add(one.custom_id)
    return NewJob(one.url, json.dumps(one.body), one.custom_id)
