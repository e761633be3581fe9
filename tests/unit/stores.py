"""What tests of a server's storage share, on SQLite and PostgreSQL: sums that always hold, and work that races."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from sqlalchemy import Engine, event, func, select

from midstream.server.errors import BudgetError
from midstream.server.jobs_store import Jobs, NewJob
from midstream.server.keys import Keys
from midstream.server.ledger import Ledger, Usage
from midstream.server.storage import Database, sqlite_url
from midstream.server.storage.tables import HELD, SETTLED, ArtifactRow, FileRow, HoldRow, JobRow, KeyRow

PROCESSES, THREADS = 2, 8
MB = 1 << 20


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def opened(directory: Path) -> Database:
    return Database.open(sqlite_url(directory))


def check_sums(database: Database) -> None:
    """What keys hold, have spent and keep is what the rows say."""
    with database.reading() as session:

        def total(column: Any, *where: Any) -> int:
            return int(session.scalar(select(func.sum(column)).where(*where)) or 0)

        for key in session.scalars(select(KeyRow)):
            holds = HoldRow.key_id == key.id
            assert key.held == total(HoldRow.tokens, holds, HoldRow.state == HELD)
            assert key.spent == total(HoldRow.paid, holds, HoldRow.state == SETTLED)
            assert total(HoldRow.paid, holds, HoldRow.state != SETTLED) == 0
            assert key.artifact_bytes == total(ArtifactRow.bytes, ArtifactRow.key_id == key.id)
            assert key.file_bytes == total(FileRow.bytes, FileRow.key_id == key.id)
            assert key.result_bytes == total(JobRow.bytes, JobRow.key_id == key.id)
        texts = func.octet_length(JobRow.body) + func.octet_length(func.coalesce(JobRow.result, ""))
        if session.get_bind().dialect.name == "postgresql":
            assert session.scalar(select(func.count()).where(JobRow.bytes != texts)) == 0


# --- many at once


def in_processes(work: Callable[..., Any], *given: Any) -> list[Any]:
    """What `work(*given, seed)` gives in each of some processes, which run at the same time."""
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        return [one.result(timeout=120) for one in [pool.submit(work, *given, seed) for seed in range(PROCESSES)]]


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def spend(url: str, key_id: str, rounds: int, seed: int) -> tuple[int, int, int]:
    """Hold and settle in threads: what was paid, how often, and how often a hold was refused."""
    with Database.open(url) as database:
        ledger = Ledger(database)

        def one(thread: int) -> tuple[int, int, int]:
            draw, paid, settled, refused = Random(f"{seed}:{thread}"), 0, 0, 0
            for _ in range(rounds):
                tokens = draw.randint(1, 60)
                try:
                    hold = ledger.hold(key_id, tokens, "a race")
                except BudgetError as error:
                    assert error.needed == tokens  # noqa: PT017
                    refused += 1
                    continue
                now = ledger.budget(key_id)
                assert now.budget is not None
                assert now.held + now.spent <= now.budget
                if draw.random() < 0.3:
                    assert ledger.free(hold)
                    continue
                amount = draw.randint(0, tokens)
                assert ledger.settle(hold, amount, Usage(requests=1, completion_tokens=amount))
                paid, settled = paid + amount, settled + 1
            return paid, settled, refused

        found = in_threads(one)
    return tuple(map(sum, zip(*found, strict=True)))  # pyright: ignore[reportReturnType]


def check_spending(url: str, rounds: int = 20) -> None:
    """Many threads of several processes on one budget: it is never exceeded, and every payment is counted."""
    budget = 1500
    with Database.open(url) as database:
        key, _ = Keys(database).create("racer", budget=budget)
        found = in_processes(spend, url, key.id, rounds)
        paid, settled, refused = map(sum, zip(*found, strict=True))
        now, used = Ledger(database).budget(key.id), Ledger(database).usage(key.id)
        assert (now.held, now.spent, now.left) == (0, paid, budget - paid)
        assert 0 < paid <= budget
        assert refused > 0
        assert (used.requests, used.completion_tokens) == (settled, paid)
        check_sums(database)


def check_one_settles(database: Database) -> None:
    """Of many that settle, free or expire one hold at once, one does."""
    key, _ = Keys(database).create("racer", budget=100)
    for _ in range(10):
        before = Ledger(database).budget(key.id).spent
        hold = Ledger(database, lease_seconds=-1).hold(key.id, 5, "a race")
        ledger = Ledger(database)
        acts = [
            partial(ledger.settle, hold, 3),
            partial(ledger.free, hold),
            partial(ledger.expire, key.id),
            partial(ledger.settle, hold, 2),
        ] * 2
        with ThreadPoolExecutor(len(acts)) as pool:
            done = [int(one.result()) for one in [pool.submit(act) for act in acts]]
        assert sum(done) == 1
        now = ledger.budget(key.id)
        assert (now.held, now.spent - before) == (0, 3 * (done[0] + done[4]) + 2 * (done[3] + done[7]))
        check_sums(database)


LEASE = 0.5


def work(url: str, key_id: str, seed: int) -> tuple[int, int]:
    """Run jobs in threads until none is left; some claims are dropped. How many were finished, and claimed."""
    with Database.open(url) as database:
        ledger = Ledger(database)
        jobs = Jobs(database, ledger, MB, lease_seconds=LEASE)

        def one(thread: int) -> tuple[int, int]:
            draw, finished, claimed, idle_since = Random(f"{seed}:{thread}"), 0, 0, None
            while idle_since is None or time.time() - idle_since < 2 * LEASE:
                job = jobs.claim(f"{seed}:{thread}")
                if job is None:
                    idle_since = idle_since or time.time()
                    time.sleep(0.05)
                    continue
                idle_since, claimed = None, claimed + 1
                assert job.claim is not None
                if draw.random() < 0.15:  # as if it had died
                    continue
                hold = ledger.hold(key_id, 10, job.id)
                if draw.random() < 0.1:
                    time.sleep(1.5 * LEASE)  # too late, where another has taken it meanwhile
                finished += jobs.finish(job.id, job.claim, 200, f'"{job.attempts}"', hold, 7, Usage(requests=1))
            return finished, claimed

        found = in_threads(one, 4)
    return tuple(map(sum, zip(*found, strict=True)))  # pyright: ignore[reportReturnType]


def check_working(url: str, count: int = 60) -> None:
    """Threads of several processes that run jobs, and die: each job is done once and paid once."""
    with Database.open(url) as database:
        ledger = Ledger(database)
        key, _ = Keys(database).create("worker", budget=10_000)
        jobs = Jobs(database, ledger, MB)
        ids = jobs.add(key.id, [NewJob("/v1/completions", "{}", str(place)) for place in range(count)])
        found = in_processes(work, url, key.id)
        finished, claimed = map(sum, zip(*found, strict=True))
        done = [jobs.get(one) for one in ids]
        assert [job.state for job in done if job is not None] == ["done"] * count
        assert (finished, claimed) == (count, sum(job.attempts for job in done if job is not None))
        assert claimed > count
        now = ledger.budget(key.id)
        assert (now.held, now.spent, ledger.usage(key.id).requests) == (0, 7 * count, count)
        check_sums(database)


# --- deaths


def on_statements(engine: Engine, act: Callable[[], None]) -> None:
    """Have `act` called before each statement and each commit."""
    event.listen(engine, "before_cursor_execute", lambda *_: act())
    event.listen(engine, "commit", lambda _: act())


def killed_at(step: int, url: str, act: Callable[[Database], None]) -> bool:
    """Do `act` in a child that kills itself at its n-th statement or commit. Whether it came to that."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with Database.open(url) as database:
                left = [step]

                def count() -> None:
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)

                on_statements(database.engine, count)
                act(database)
            code = 0
        finally:
            os._exit(code)
    end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert end in (0, -signal.SIGKILL)
    return end != 0


def check_deaths(url: str) -> None:
    """A process killed at each statement of a job's life leaves sums that agree, and nothing behind its lease."""
    start, end = 1000.0, 1061.0
    with Database.open(url) as database:
        key, _ = Keys(database).create("mortal", budget=100)
        ledger = Ledger(database, clock=lambda: end)
        jobs = Jobs(database, ledger, MB, clock=lambda: end)
        spent, kills = 0, 0
        while True:
            (job_id,) = jobs.add(key.id, [NewJob("/v1/completions", "{}")])

            def act(own: Database) -> None:
                mine = Ledger(own, clock=lambda: start)
                theirs = Jobs(own, mine, MB, clock=lambda: start)
                job = theirs.claim("mortal")
                assert job is not None
                assert job.claim is not None
                hold = mine.hold(key.id, 10, job.id)
                mine.renew([hold])
                assert theirs.finish(job.id, job.claim, 200, '"mine"', hold, 1, Usage(requests=1))

            killed = killed_at(kills, url, act)
            check_sums(database)
            job = jobs.get(job_id)
            assert job is not None
            spent += job.state == "done"
            assert job.state != "done" or jobs.result(job_id) == '"mine"'
            assert (job.state == "done") >= (not killed)
            ledger.expire()
            assert (ledger.budget(key.id).held, ledger.budget(key.id).spent) == (0, spent)
            assert ledger.usage(key.id).requests == spent
            if job.state != "done":  # another takes it over
                again = jobs.claim("heir")
                assert again is not None
                assert (again.id, again.claim is not None) == (job_id, True)
            assert jobs.delete(job_id)
            check_sums(database)
            if not killed:
                break
            kills += 1
        assert kills > 12
