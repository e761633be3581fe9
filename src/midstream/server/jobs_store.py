"""Jobs: requests that outlive their connections. Whoever runs one has a claim, which ends unless it is renewed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, delete, func, insert, select, update
from sqlalchemy.orm import Session

from .ledger import Ledger, Usage
from .quota import Quota
from .storage import Database, storable
from .storage.tables import CANCELLED, DONE, FAILED, QUEUED, RUNNING, BatchRow, JobRow


@dataclass(frozen=True)
class NewJob:
    """What is asked for. body: the request's JSON. custom_id: the client's own name for it."""

    endpoint: str
    body: str
    custom_id: str | None = None


@dataclass(frozen=True)
class Job:
    """A job without its texts, which may be large: `Jobs.body` and `Jobs.result` read them.

    state: queued, running, done, failed or cancelled. claim: of who runs it. attempts: how often it was claimed.
    place: in its batch. bytes: of its texts. expires_at: when it is forgotten, once it has ended.
    """

    id: str
    key_id: str
    batch_id: str | None
    place: int
    custom_id: str | None
    endpoint: str
    state: str
    claim: str | None
    attempts: int
    status_code: int | None
    bytes: int
    created: float
    started: float | None
    ended: float | None
    expires_at: float | None


_COLUMNS: Final[list[Any]] = [getattr(JobRow, one.name) for one in fields(Job)]
_ORDER: Final = (JobRow.created, JobRow.place, JobRow.id)


class Jobs:
    """The jobs of a database; threads and processes may each have one.

    result_bytes: what one key's jobs may take, bodies and results. keep_seconds: for which one that ended is kept.
    """

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        result_bytes: int,
        clock: Callable[[], float] = time.time,
        lease_seconds: float = 60.0,
        keep_seconds: float = 7 * 86400.0,
    ) -> None:
        self._database, self._ledger, self._clock = database, ledger, clock
        self.quota: Final = Quota("result", result_bytes)
        self.lease_seconds, self.keep_seconds = lease_seconds, keep_seconds

    def add(
        self, key_id: str, jobs: Sequence[NewJob], batch_id: str | None = None, session: Session | None = None
    ) -> list[str]:
        """Queue some jobs, all or none, and give their ids in order; QuotaError where their bodies have no room.

        E_BAD_PARAM for a custom_id or a body that cannot be kept.
        """
        now = self._clock()
        rows = [
            {
                "id": f"job-{secrets.token_hex(12)}",
                "key_id": key_id,
                "batch_id": batch_id,
                "place": place,
                "custom_id": None if one.custom_id is None else storable(one.custom_id, "custom_id"),
                "endpoint": one.endpoint,
                "body": storable(one.body, "body"),
                "bytes": len(one.body.encode()),
                "state": QUEUED,
                "created": now,
            }
            for place, one in enumerate(jobs)
        ]
        if rows:
            with self._database.session(session) as own:
                self.quota.take(own, key_id, sum(row["bytes"] for row in rows))
                own.execute(insert(JobRow), rows)
        return [row["id"] for row in rows]

    # --- running them

    def claim(self, worker: str) -> Job | None:
        """Take the oldest job whose claim has ended, else the oldest that is queued. None: there is neither.

        worker: the name of who takes it, for a person.
        """
        now = self._clock()
        late = select(JobRow.id).where(JobRow.state == RUNNING, JobRow.lease_until <= now)
        with self._database.session() as session:
            for free in (late, select(JobRow.id).where(JobRow.state == QUEUED)):
                # the row is locked as it is found, so that no two find one; SQLite has one writer at a time anyway
                first = free.order_by(*_ORDER).limit(1).with_for_update(skip_locked=True).scalar_subquery()
                taken = (
                    update(JobRow)
                    .where(JobRow.id == first)
                    .values(
                        state=RUNNING, claim=secrets.token_hex(16), worker=worker, attempts=JobRow.attempts + 1,
                        started=now, lease_until=now + self.lease_seconds,
                    )
                    .returning(*_COLUMNS)
                    .execution_options(synchronize_session=False)
                )  # fmt: skip
                if (found := session.execute(taken).one_or_none()) is not None:
                    return Job(*found)
        return None

    def renew(self, job_id: str, claim: str) -> bool:
        """Begin the lease of a claim anew. Whether it is still held: else another has the job, or it was cancelled."""
        with self._database.session() as session:
            return self._change(session, _claimed(job_id, claim), lease_until=self._clock() + self.lease_seconds)

    def release(self, job_id: str, claim: str) -> bool:
        """Give a job back to the queue, as if it had not been claimed. Whether the claim was still held."""
        with self._database.session() as session:
            return self._change(session, _claimed(job_id, claim), **_UNCLAIMED, attempts=JobRow.attempts - 1)

    def finish(
        self,
        job_id: str,
        claim: str,
        status_code: int,
        result: str,
        hold_id: str | None = None,
        paid: int = 0,
        usage: Usage | None = None,
    ) -> bool:
        """Write a job's result and settle its hold, both or neither. Whether it was written.

        A claim that is not held any more writes nothing, pays nothing and frees the hold. So does one whose hold
        had ended: its job is queued again. A result of status 400 or more pays nothing. QuotaError, and the claim is
        still held, where the result has no room; one of status 400 or more is always taken.
        """
        failed, now, nbytes = status_code >= 400, self._clock(), len(result.encode())
        with self._database.session() as session:
            mine = _claimed(job_id, claim)
            key_id = session.scalar(select(JobRow.key_id).where(*mine).with_for_update())
            if hold_id is not None and (key_id is None or failed):
                self._ledger.free(hold_id, session)
            if key_id is None:
                return False
            if hold_id is not None and not failed and not self._ledger.settle(hold_id, paid, usage, session):
                self._change(session, mine, **_UNCLAIMED)
                return False
            self.quota.take(session, key_id, nbytes, anyway=failed)
            return self._change(
                session, mine, state=FAILED if failed else DONE, status_code=status_code, result=result, claim=None,
                lease_until=None, bytes=JobRow.bytes + nbytes, ended=now, expires_at=now + self.keep_seconds,
            )  # fmt: skip

    # --- their ends

    def cancel(self, job_id: str) -> bool:
        """End a job that is queued or running; who runs it hears so as it renews. Whether it had not ended yet."""
        with self._database.session() as session:
            return self._cancel(session, JobRow.id == job_id) == 1

    def cancel_batch(self, batch_id: str) -> int:
        """Cancel what of a batch has not ended. How many jobs that were."""
        with self._database.session() as session:
            session.execute(select(BatchRow.id).where(BatchRow.id == batch_id).with_for_update())  # one at a time
            return self._cancel(session, JobRow.batch_id == batch_id)

    def delete(self, job_id: str) -> bool:
        """Forget a job, whatever its state, and give its bytes back. Whether it was there."""
        return self._delete(job_id)

    def delete_expired(self) -> int:
        """Forget the jobs that ended long enough ago. How many."""
        late = JobRow.expires_at <= self._clock()
        with self._database.reading() as session:
            found = session.scalars(select(JobRow.id).where(late).order_by(JobRow.id)).all()
        return sum(self._delete(job_id, late) for job_id in found)

    # --- reading

    def get(self, job_id: str) -> Job | None:
        """One job."""
        with self._database.reading() as session:
            return next(iter(_read(session, select(*_COLUMNS).where(JobRow.id == job_id))), None)

    def body(self, job_id: str) -> str | None:
        """The JSON of its request."""
        with self._database.reading() as session:
            return session.scalar(select(JobRow.body).where(JobRow.id == job_id))

    def result(self, job_id: str) -> str | None:
        """The JSON of its answer; None: it has none yet."""
        with self._database.reading() as session:
            return session.scalar(select(JobRow.result).where(JobRow.id == job_id))

    def list_of_batch(self, batch_id: str, after: int = -1, limit: int = 1000) -> list[Job]:
        """The jobs of a batch behind a place, in order, at most `limit` of them."""
        with self._database.reading() as session:
            found = select(*_COLUMNS).where(JobRow.batch_id == batch_id, JobRow.place > after)
            return _read(session, found.order_by(JobRow.place).limit(limit))

    def counts_of_batch(self, batch_id: str) -> Mapping[str, int]:
        """How many jobs of a batch are in each state; a state that none is in is left out."""
        with self._database.reading() as session:
            counted = select(JobRow.state, func.count()).where(JobRow.batch_id == batch_id).group_by(JobRow.state)
            return {row[0]: row[1] for row in session.execute(counted)}

    def _cancel(self, session: Session, which: ColumnElement[bool]) -> int:
        now = self._clock()
        ended: dict[str, Any] = {"state": CANCELLED, "claim": None, "lease_until": None, "ended": now}
        changed = (
            update(JobRow)
            .where(which, JobRow.state.in_((QUEUED, RUNNING)))
            .values(**ended, expires_at=now + self.keep_seconds)
            .returning(JobRow.id)
        )
        return len(session.execute(changed).all())

    def _delete(self, job_id: str, *conditions: ColumnElement[bool]) -> bool:
        gone = delete(JobRow).where(JobRow.id == job_id, *conditions).returning(JobRow.key_id, JobRow.bytes)
        with self._database.session() as session:
            found = session.execute(gone).one_or_none()
            if found is not None:
                self.quota.give_back(session, *found)
        return found is not None

    @staticmethod
    def _change(session: Session, which: Sequence[ColumnElement[bool]], **values: Any) -> bool:
        changed = update(JobRow).where(*which).values(**values).returning(JobRow.id)
        return session.execute(changed).one_or_none() is not None


_UNCLAIMED: Final[dict[str, Any]] = {"state": QUEUED, "claim": None, "worker": None, "lease_until": None}


def _claimed(job_id: str, claim: str) -> tuple[ColumnElement[bool], ...]:
    return JobRow.id == job_id, JobRow.claim == claim, JobRow.state == RUNNING


def _read(session: Session, found: Select[*tuple[Any, ...]]) -> list[Job]:
    return [Job(*row) for row in session.execute(found)]
