"""Jobs: claimed by one, finished once, paid once, kept under a quota and for a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from midstream.server.jobs_store import Job, Jobs, NewJob
from midstream.server.keys import Keys
from midstream.server.ledger import Ledger, Usage
from midstream.server.quota import QuotaError
from midstream.server.storage import Database, sqlite_url
from midstream.server.storage.tables import BatchRow
from unit.stores import Clock, check_sums, check_working, opened

COMPLETIONS = "/v1/completions"


class Store:
    """A store of jobs, with a key, and a clock that a test sets."""

    def __init__(self, database: Database, result_bytes: int = 1000) -> None:
        self.database, self.clock = database, Clock()
        self.key = Keys(database, self.clock).create("ada", budget=1000)[0].id
        self.ledger = Ledger(database, self.clock, lease_seconds=60)
        self.jobs = Jobs(database, self.ledger, result_bytes, self.clock, lease_seconds=60, keep_seconds=3600)

    def add(self, *bodies: str, batch: str | None = None) -> list[str]:
        ids = self.jobs.add(self.key, [NewJob(COMPLETIONS, body, f"mine-{body}") for body in bodies], batch)
        self.clock.now += 1
        return ids

    def claimed(self, worker: str = "worker") -> tuple[Job, str]:
        job = self.jobs.claim(worker)
        assert job is not None
        assert job.claim is not None
        return job, job.claim

    def get(self, job_id: str) -> Job:
        job = self.jobs.get(job_id)
        assert job is not None
        return job

    def batch(self) -> str:
        with self.database.session() as session:
            session.add(BatchRow(
                id="batch_1", key_id=self.key, endpoint=COMPLETIONS, input_file_id="file-1", completion_window="24h",
                state="in_progress", created=self.clock(),
            ))  # fmt: skip
        return "batch_1"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path) as database:
        yield Store(database)
        check_sums(database)


def test_a_job_from_its_beginning_to_its_end(store: Store) -> None:
    (job_id,) = store.add('{"prompt": "é"}')
    job = store.get(job_id)
    assert (job.state, job.custom_id, job.endpoint, job.attempts) == ("queued", 'mine-{"prompt": "é"}', COMPLETIONS, 0)
    assert (job.bytes, store.jobs.result(job_id)) == (16, None)
    job, claim = store.claimed()
    assert (job.id, job.state, job.attempts, job.started) == (job_id, "running", 1, 1001.0)
    assert store.jobs.body(job_id) == '{"prompt": "é"}'
    assert store.jobs.claim("another") is None
    hold = store.ledger.hold(store.key, 50, job_id)
    store.clock.now += 5
    assert store.jobs.finish(job_id, claim, 200, '{"ü": 1}', hold, 20, Usage(requests=1, completion_tokens=20))
    job = store.get(job_id)
    assert (job.state, job.status_code, job.claim, job.ended, job.expires_at) == ("done", 200, None, 1006.0, 4606.0)
    assert (job.bytes, store.jobs.result(job_id)) == (16 + 9, '{"ü": 1}')
    assert (store.ledger.budget(store.key).held, store.ledger.budget(store.key).spent) == (0, 20)
    assert not store.jobs.finish(job_id, claim, 200, '"again"', store.ledger.hold(store.key, 5, ""), 5)
    assert (store.ledger.budget(store.key).held, store.ledger.budget(store.key).spent) == (0, 20)
    assert store.jobs.result(job_id) == '{"ü": 1}'
    assert store.jobs.claim("another") is None


def test_the_oldest_is_taken_first(store: Store) -> None:
    first = store.add("1", "2")
    second = store.add("3")
    assert [store.claimed()[0].id for _ in range(3)] == first + second
    assert store.jobs.claim("another") is None


def test_a_claim_that_ended_goes_to_another(store: Store) -> None:
    old, new = store.add("1")[0], store.add("2")[0]
    job, lost = store.claimed("dies")
    hold = store.ledger.hold(store.key, 50, "dies")
    store.clock.now += 60
    again, claim = store.claimed("heir")
    assert (again.id, again.attempts) == (old, 2)
    assert claim != lost
    assert not store.jobs.renew(old, lost)
    assert not store.jobs.release(old, lost)
    assert not store.jobs.finish(old, lost, 200, '"lost"', hold, 50)
    assert store.ledger.budget(store.key).held == store.ledger.budget(store.key).spent == 0
    assert store.jobs.result(old) is None
    assert store.jobs.finish(old, claim, 200, '"heir"', store.ledger.hold(store.key, 50, "heir"), 7)
    assert store.jobs.result(old) == '"heir"'
    assert store.ledger.budget(store.key).spent == 7
    assert store.claimed()[0].id == new
    assert job.id == old


def test_a_claim_that_is_renewed_stays(store: Store) -> None:
    store.add("1")
    job, claim = store.claimed()
    for _ in range(3):
        store.clock.now += 50
        assert store.jobs.renew(job.id, claim)
    assert store.jobs.claim("another") is None
    assert store.jobs.finish(job.id, claim, 200, '"x"')


def test_a_late_claim_that_nobody_took_can_still_finish(store: Store) -> None:
    store.add("1")
    job, claim = store.claimed()
    store.clock.now += 1000
    assert store.jobs.finish(job.id, claim, 200, '"x"')


def test_a_job_given_back_is_as_if_it_had_not_been_claimed(store: Store) -> None:
    store.add("1")
    job, claim = store.claimed()
    assert store.jobs.release(job.id, claim)
    again, _ = store.claimed("another")
    assert (again.id, again.attempts) == (job.id, 1)


def test_a_job_whose_hold_has_ended_is_queued_again_and_nothing_is_written(store: Store) -> None:
    store.add("1")
    job, claim = store.claimed()
    hold = store.ledger.hold(store.key, 50, "late")
    store.clock.now += 60
    assert store.ledger.expire() == 1
    assert not store.jobs.finish(job.id, claim, 200, '"unpaid"', hold, 50)
    assert store.get(job.id).state == "queued"
    assert store.jobs.result(job.id) is None
    again, claim = store.claimed()
    assert again.attempts == 2
    assert store.jobs.finish(job.id, claim, 200, '"paid"', store.ledger.hold(store.key, 50, "in time"), 50)
    assert store.ledger.budget(store.key).spent == 50


def test_one_that_fails_pays_nothing(store: Store) -> None:
    store.add("1")
    job, claim = store.claimed()
    hold = store.ledger.hold(store.key, 50, "fails")
    assert store.jobs.finish(job.id, claim, 400, '{"error": {}}', hold, 50, Usage(requests=1))
    assert (store.get(job.id).state, store.get(job.id).status_code) == ("failed", 400)
    assert store.ledger.budget(store.key).held == store.ledger.budget(store.key).spent == 0
    assert store.ledger.usage(store.key) == Usage()


def test_results_count_against_the_quota(store: Store) -> None:
    store.add("1" * 900)
    job, claim = store.claimed()
    hold = store.ledger.hold(store.key, 50, "large")
    with pytest.raises(QuotaError, match="101 bytes, and the key may keep 100 more: delete jobs"):
        store.jobs.finish(job.id, claim, 200, "x" * 101, hold, 50)
    assert (store.get(job.id).state, store.ledger.budget(store.key).held) == ("running", 50)
    check_sums(store.database)
    assert store.jobs.finish(job.id, claim, 413, "y" * 101, hold)  # that it did not fit is always said
    with pytest.raises(QuotaError, match="1 bytes, and the key may keep 0 more"):
        store.add("1")
    assert store.jobs.delete(job.id)
    with pytest.raises(QuotaError):
        store.jobs.add(store.key, [NewJob(COMPLETIONS, "1" * 600), NewJob(COMPLETIONS, "1" * 600)])
    assert store.jobs.claim("worker") is None  # all of them, or none
    store.add("1" * 1000)


def test_a_crash_within_finish_writes_and_pays_nothing(store: Store) -> None:
    (job_id,) = store.add("1")
    job, claim = store.claimed()
    hold = store.ledger.hold(store.key, 50, "dies")
    left = 0

    def die(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    event.listen(store.database.engine, "before_cursor_execute", die)
    event.listen(store.database.engine, "commit", lambda _: die())
    for step in range(100):
        left = step
        try:
            finished = store.jobs.finish(job_id, claim, 200, '"x"', hold, 5, Usage(requests=1))
        except KeyboardInterrupt:
            left = 100
            assert (store.get(job_id), store.jobs.result(job_id)) == (job, None)
            assert store.ledger.budget(store.key).held == 50
            check_sums(store.database)
        else:
            break
    left = 100
    assert step > 6
    assert finished  # pyright: ignore[reportPossiblyUnboundVariable]
    assert store.ledger.budget(store.key).spent == 5


def test_what_is_cancelled_is_written_by_nobody(store: Store) -> None:
    queued, running = store.add("1", "2")
    job, claim = store.claimed()
    assert job.id == queued
    queued, running = running, queued
    hold = store.ledger.hold(store.key, 50, "cancelled")
    assert store.jobs.cancel(queued)
    assert store.jobs.cancel(running)
    assert not store.jobs.cancel(running)
    assert not store.jobs.cancel("job-none")
    assert not store.jobs.renew(running, claim)
    assert not store.jobs.finish(running, claim, 200, '"x"', hold, 50)
    assert store.ledger.budget(store.key).held == store.ledger.budget(store.key).spent == 0
    assert [store.get(one).state for one in (queued, running)] == ["cancelled"] * 2
    assert store.jobs.claim("another") is None


def test_one_that_was_deleted_while_it_ran_is_written_by_nobody(store: Store) -> None:
    (job_id,) = store.add("1")
    _, claim = store.claimed()
    assert store.jobs.delete(job_id)
    assert not store.jobs.delete(job_id)
    assert not store.jobs.finish(job_id, claim, 200, '"x"')
    assert (store.jobs.get(job_id), store.jobs.body(job_id), store.jobs.result(job_id)) == (None, None, None)


def test_what_ended_is_forgotten_in_its_time(store: Store) -> None:
    done, cancelled, queued = store.add("1", "2", "3")
    job, claim = store.claimed()
    assert job.id == done
    store.jobs.cancel(cancelled)
    store.clock.now += 10
    store.jobs.finish(done, claim, 200, '"x"')
    store.clock.now += 3590
    assert store.jobs.delete_expired() == 1
    assert store.jobs.get(cancelled) is None
    store.clock.now += 10
    assert store.jobs.delete_expired() == 1
    store.clock.now += 10**9
    assert store.jobs.delete_expired() == 0
    assert store.get(queued).state == "queued"


def test_a_batch_is_listed_page_by_page(store: Store) -> None:
    batch = store.batch()
    ids = store.add(*map(str, range(5)), batch=batch)
    store.add("alone")
    assert [job.id for job in store.jobs.list_of_batch(batch)] == ids
    page = store.jobs.list_of_batch(batch, limit=2)
    assert [job.place for job in page] == [0, 1]
    assert [job.place for job in store.jobs.list_of_batch(batch, after=page[-1].place, limit=2)] == [2, 3]
    _, claim = store.claimed()
    store.jobs.finish(ids[0], claim, 200, '"x"')
    store.claimed()
    assert store.jobs.counts_of_batch(batch) == {"done": 1, "running": 1, "queued": 3}
    assert store.jobs.cancel_batch(batch) == 4
    assert store.jobs.counts_of_batch(batch) == {"done": 1, "cancelled": 4}
    assert store.claimed()[0].batch_id is None


def test_nothing_added_is_nothing(store: Store) -> None:
    assert store.jobs.add(store.key, []) == []


def test_many_are_added_and_claimed_without_reading_the_queue(store: Store) -> None:
    """The plan of a claim goes along an index: a queue of 50,000 is not sorted for each."""
    plans: list[str] = []

    def explain(connection: Any, _: Any, statement: str, parameters: Any, *__: Any) -> None:
        if statement.startswith("UPDATE jobs"):
            rows = connection.connection.cursor().execute(f"EXPLAIN QUERY PLAN {statement}", parameters).fetchall()
            plans.append(" ".join(str(row[3]) for row in rows))

    store.add("1", "2", "3")
    event.listen(store.database.engine, "before_cursor_execute", explain)
    store.claimed()
    assert len(plans) == 2
    assert all("USING COVERING INDEX ix_jobs_state" in plan or "USING INDEX ix_jobs_state" in plan for plan in plans)
    assert not any("TEMP B-TREE" in plan for plan in plans)


def test_threads_of_two_processes_do_each_job_once(tmp_path: Path) -> None:
    check_working(sqlite_url(tmp_path))
