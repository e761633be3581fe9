"""The same storage on a real PostgreSQL: its tables, and what threads, processes and deaths do to its sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest
from sqlalchemy import event, text

from midstream.server.jobs_store import Job, Jobs, NewJob
from midstream.server.keys import Keys
from midstream.server.ledger import Ledger
from midstream.server.storage import Database, StorageError
from midstream.server.storage.migrations import VERSION_TABLE
from server.postgres import running
from unit.stores import MB, check_deaths, check_one_settles, check_spending, check_sums, check_working, in_threads
from unit.test_ledger import run_machine
from unit.test_storage import check_quota, differences


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[], str]]:
    """A server, which gives the URL of a new database at each call."""
    with running() as fresh:
        yield fresh


@pytest.fixture
def database(postgres: Callable[[], str]) -> Iterator[Database]:
    with Database.open(postgres()) as database:
        yield database


def test_migrations_and_models_agree(database: Database) -> None:
    assert database.engine.dialect.name == "postgresql"
    assert differences(database) == []


def test_opened_by_many_at_once_it_is_made_once(postgres: Callable[[], str]) -> None:
    url = postgres()

    def one(_: int) -> bool:
        with Database.open(url) as database:
            return Keys(database).any()

    assert in_threads(one) == [False] * 8


def test_a_newer_version_is_refused(postgres: Callable[[], str]) -> None:
    url = postgres()
    with Database.open(url) as database, database.session() as session:
        session.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(StorageError, match="is of version 9999, newer than"):
        Database.open(url)


def test_threads_of_two_processes_spend_one_budget(postgres: Callable[[], str]) -> None:
    check_spending(postgres())


def test_one_of_many_settles(database: Database) -> None:
    check_one_settles(database)


def test_threads_of_two_processes_do_each_job_once(postgres: Callable[[], str]) -> None:
    check_working(postgres())


def test_a_quota_holds_among_threads(database: Database) -> None:
    check_quota(database)


def test_killed_at_each_statement(postgres: Callable[[], str]) -> None:
    check_deaths(postgres())


def test_it_does_what_the_model_does(postgres: Callable[[], str]) -> None:
    run_machine(iter(postgres, ""), 5)


@pytest.mark.slow
def test_it_does_what_the_model_does_for_long(postgres: Callable[[], str]) -> None:
    run_machine(iter(postgres, ""), 40)


def test_two_claims_wait_for_neither(database: Database) -> None:
    """A job that another is just claiming is passed over, not waited for."""
    key, _ = Keys(database).create("ada")
    jobs = Jobs(database, Ledger(database), MB)
    first, second = jobs.add(key.id, [NewJob("/v1/completions", "{}")] * 2)
    with database.session() as session:
        session.execute(text("SELECT id FROM jobs WHERE id = :id FOR UPDATE"), {"id": first})
        job = jobs.claim("another")
    assert job is not None
    assert job.id == second


def test_a_job_that_is_being_finished_is_claimed_by_nobody(database: Database) -> None:
    """Its claim is late, and another looks for work between the statements of `finish`."""
    key, _ = Keys(database).create("ada")
    ledger = Ledger(database)
    jobs, thief = (Jobs(database, ledger, MB, lease_seconds=seconds) for seconds in (-1, 60))
    jobs.add(key.id, [NewJob("/v1/completions", "{}")])
    job = jobs.claim("late")
    assert job is not None
    assert job.claim is not None
    hold = ledger.hold(key.id, 5, "late")
    stolen: list[Job | None] = []

    def steal(_: object, __: object, statement: str, *___: object) -> None:
        if statement.startswith("UPDATE holds"):
            stolen.append(thief.claim("thief"))

    event.listen(database.engine, "before_cursor_execute", steal)
    assert jobs.finish(job.id, job.claim, 200, '"late"', hold, 5)
    assert stolen == [None]
    assert (ledger.budget(key.id).spent, jobs.result(job.id)) == (5, '"late"')


def test_a_connection_that_broke_is_made_anew(database: Database) -> None:
    """As after a restart of PostgreSQL."""
    key, _ = Keys(database).create("ada")
    with database.engine.connect() as connection:
        raw = connection.connection.dbapi_connection
        assert isinstance(raw, psycopg.Connection)
        process, url = raw.info.backend_pid, database.engine.url
    with Database.open(url.render_as_string(hide_password=False)) as other, other.session() as session:
        session.execute(text("SELECT pg_terminate_backend(:process)"), {"process": process})
    assert list(Keys(database).list()) == [key]
    check_sums(database)
