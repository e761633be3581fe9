"""The ledger against a plain model of it: two ledgers on one database, time, restarts, and deaths at any statement."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import event, select

from midstream.core.errors import MidstreamError
from midstream.server.errors import BudgetError
from midstream.server.keys import Keys
from midstream.server.ledger import Budget, Ledger, Usage
from midstream.server.storage import Database, sqlite_url
from midstream.server.storage.tables import HoldRow
from unit.stores import Clock, check_deaths, check_one_settles, check_spending, check_sums, on_statements, opened

LEASE = 60.0


class Died(BaseException):
    """The process is gone."""


@dataclass(frozen=True)
class Hold:
    """A hold as the model has it."""

    key: str
    tokens: int
    until: float
    state: str = "held"
    paid: int = 0


class LedgerMachine(RuleBasedStateMachine):
    """Each rule does one thing to a ledger and to the model; then the two are compared in full."""

    urls: ClassVar[Iterator[str]]
    """A fresh database for each run."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.url = next(self.urls)
        self.databases: list[Database] = []
        self.ledgers: list[Ledger] = []
        self.left: int | None = None
        self.start()
        keys = Keys(self.databases[0], self.clock)
        self.budgets: dict[str, int | None] = {
            keys.create("small", budget=100)[0].id: 100,
            keys.create("free")[0].id: None,
        }
        self.holds: dict[str, Hold] = {}
        self.used = dict.fromkeys(self.budgets, 0)

    def start(self) -> None:
        self.databases = [Database.open(self.url) for _ in range(2)]
        self.ledgers = [Ledger(one, self.clock, LEASE) for one in self.databases]
        for one in self.databases:
            on_statements(one.engine, self.step)

    def teardown(self) -> None:
        check_sums(self.databases[0])
        self.close()

    def close(self) -> None:
        for one in self.databases:
            one.close()

    def step(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Died

    @contextmanager
    def mortal(self, dies_at: int | None) -> Iterator[None]:
        """The process dies at a statement of the block, if it has so many; then only leases may have ended."""
        self.left = dies_at
        try:
            yield
        except Died:
            self.left = None
            self.ledgers = [Ledger(one, self.clock, LEASE) for one in self.databases]
            self.adopt_expired()
        finally:
            self.left = None

    def adopt_expired(self) -> None:
        found = self.rows()
        for hold_id, hold in self.holds.items():
            if found[hold_id].state == "expired" and hold.state == "held":
                assert hold.until <= self.clock.now
                self.holds[hold_id] = replace(hold, state="expired")

    def rows(self) -> dict[str, Hold]:
        with self.databases[0].reading() as session:
            rows = session.scalars(select(HoldRow)).all()
        return {row.id: Hold(row.key_id, row.tokens, row.lease_until, row.state, row.paid) for row in rows}

    def sums(self, key: str) -> tuple[int, int]:
        mine = [one for one in self.holds.values() if one.key == key]
        return sum(one.tokens for one in mine if one.state == "held"), sum(one.paid for one in mine)

    def fits(self, key: str, tokens: int) -> bool:
        budget = self.budgets[key]
        return budget is None or sum(self.sums(key)) + tokens <= budget

    def expire_in_model(self, key: str | None = None) -> int:
        late = [
            hold_id
            for hold_id, one in self.holds.items()
            if one.state == "held" and one.until <= self.clock.now and key in (None, one.key)
        ]
        for hold_id in late:
            self.holds[hold_id] = replace(self.holds[hold_id], state="expired")
        return len(late)

    # --- what is done

    which = st.integers(0, 1)
    death = st.none() | st.integers(0, 8)

    def key(self, data: Any) -> str:
        return data.draw(st.sampled_from(sorted(self.budgets)))

    def some_hold(self, data: Any) -> str:
        return data.draw(st.sampled_from(list(self.holds)))

    @rule(data=st.data(), which=which, tokens=st.integers(0, 70), death=death)
    def hold(self, data: Any, which: int, tokens: int, death: int | None) -> None:
        key = self.key(data)
        with self.mortal(death):
            try:
                hold_id = self.ledgers[which].hold(key, tokens, "a test")
            except BudgetError as error:
                assert not self.fits(key, tokens)
                self.expire_in_model(key)
                assert not self.fits(key, tokens)
                budget = self.budgets[key]
                assert budget is not None
                assert (error.needed, error.left) == (tokens, max(0, budget - sum(self.sums(key))))  # noqa: PT017
            else:
                if not self.fits(key, tokens):
                    self.expire_in_model(key)
                assert self.fits(key, tokens)
                assert hold_id not in self.holds
                self.holds[hold_id] = Hold(key, tokens, self.clock.now + LEASE)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), which=which, paid=st.integers(0, 80), death=death, within=st.sampled_from("ny!"))
    def settle(self, data: Any, which: int, paid: int, death: int | None, within: str) -> None:
        hold_id = self.some_hold(data)
        hold, usage = self.holds[hold_id], Usage(requests=1, prompt_tokens=paid)
        with self.mortal(death):
            if within == "n":
                settled = self.ledgers[which].settle(hold_id, paid, usage)
            else:
                try:
                    with self.databases[which].session() as session:
                        settled = self.ledgers[which].settle(hold_id, paid, usage, session)
                        if within == "!":
                            raise ValueError("the rest of the transaction fails")
                except ValueError:
                    return
            assert settled == (hold.state == "held")
            if settled:
                self.holds[hold_id] = replace(hold, state="settled", paid=min(paid, hold.tokens))
                self.used[hold.key] += paid

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), which=which, death=death)
    def free(self, data: Any, which: int, death: int | None) -> None:
        hold_id = self.some_hold(data)
        hold = self.holds[hold_id]
        with self.mortal(death):
            assert self.ledgers[which].free(hold_id) == (hold.state == "held")
            if hold.state == "held":
                self.holds[hold_id] = replace(hold, state="freed")

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), which=which, death=death)
    def renew(self, data: Any, which: int, death: int | None) -> None:
        wanted = data.draw(st.sets(st.sampled_from(list(self.holds)), max_size=4))
        open_ones = [one for one in wanted if self.holds[one].state == "held"]
        with self.mortal(death):
            assert self.ledgers[which].renew(wanted) == len(open_ones)
            for one in open_ones:
                self.holds[one] = replace(self.holds[one], until=self.clock.now + LEASE)

    @rule(which=which, death=death)
    def expire(self, which: int, death: int | None) -> None:
        with self.mortal(death):
            found = self.ledgers[which].expire()
            assert found == self.expire_in_model()

    @rule(data=st.data(), which=which, tokens=st.none() | st.integers(0, 200))
    def set_budget(self, data: Any, which: int, tokens: int | None) -> None:
        key = self.key(data)
        self.ledgers[which].set_budget(key, tokens)
        self.budgets[key] = tokens

    @rule(seconds=st.sampled_from([1.0, 30.0, 60.0, 90.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(expires=st.booleans())
    def restart(self, expires: bool) -> None:
        """Everything in memory is gone. expires: what a server does as it starts."""
        self.close()
        self.start()
        if expires:
            assert self.ledgers[0].expire() == self.expire_in_model()

    # --- what always holds

    @invariant()
    def the_database_is_the_model(self) -> None:
        assert self.rows() == self.holds
        for key, budget in self.budgets.items():
            held, spent = self.sums(key)
            left = None if budget is None else max(0, budget - held - spent)
            assert self.ledgers[1].budget(key) == Budget(budget, held, spent, left)
            assert self.ledgers[0].usage(key).prompt_tokens == self.used[key]


def run_machine(urls: Iterator[str], examples: int) -> None:
    machine = type("Machine", (LedgerMachine,), {"urls": urls})
    ids = count()
    # Ids by number: which of two late holds ends first before a death is by their ids, and must not be by chance.
    with mock.patch.object(secrets, "token_hex", lambda size: f"{next(ids):0{2 * size}x}"):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=25,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )


@contextmanager
def fresh_files() -> Iterator[Iterator[str]]:
    """Databases by copying one, which is quicker than to make each."""
    with TemporaryDirectory() as directory:
        first = Path(directory) / "first"
        opened(first).close()

        def made() -> Iterator[str]:
            for number in range(1_000_000):
                copy = Path(directory) / str(number)
                shutil.copytree(first, copy)
                yield sqlite_url(copy)
                shutil.rmtree(copy)

        yield made()


def test_it_does_what_the_model_does() -> None:
    with fresh_files() as urls:
        run_machine(urls, 12)


@pytest.mark.slow
def test_it_does_what_the_model_does_for_long() -> None:
    with fresh_files() as urls:
        run_machine(urls, 200)


def test_killed_at_each_statement(tmp_path: Path) -> None:
    check_deaths(sqlite_url(tmp_path))


def test_threads_of_two_processes_spend_one_budget(tmp_path: Path) -> None:
    check_spending(sqlite_url(tmp_path))


def test_one_of_many_settles(tmp_path: Path) -> None:
    with opened(tmp_path) as database:
        check_one_settles(database)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with opened(tmp_path) as database:
        yield database


def test_a_hold_whose_lease_has_ended_stands_in_nobodys_way(database: Database) -> None:
    clock = Clock()
    ledger = Ledger(database, clock, lease_seconds=10)
    key, _ = Keys(database).create("one", budget=100)
    lost = ledger.hold(key.id, 100, "lost")
    with pytest.raises(BudgetError, match="holds 1 tokens, and the key has 0 left"):
        ledger.hold(key.id, 1, "refused")
    clock.now += 10
    ledger.hold(key.id, 1, "found room")
    assert not ledger.settle(lost, 100)
    assert ledger.budget(key.id) == Budget(100, 1, 0, 99)


def test_a_late_hold_that_nobody_expired_can_still_pay(database: Database) -> None:
    clock = Clock()
    ledger = Ledger(database, clock, lease_seconds=10)
    key, _ = Keys(database).create("one", budget=100)
    hold = ledger.hold(key.id, 60, "late")
    clock.now += 11
    assert ledger.settle(hold, 50)
    assert ledger.budget(key.id) == Budget(100, 0, 50, 50)


def test_one_that_is_renewed_at_the_last_moment_stays(database: Database, tmp_path: Path) -> None:
    """Another renews it between the look for late holds and their end."""
    clock = Clock()
    ledger = Ledger(database, clock, lease_seconds=10)
    key, _ = Keys(database).create("one", budget=100)
    hold = ledger.hold(key.id, 60, "late")
    clock.now += 11
    with opened(tmp_path) as elsewhere:
        renewed: list[int] = []

        def renew(_: object) -> None:
            if not renewed:
                renewed.append(Ledger(elsewhere, clock, lease_seconds=10).renew([hold]))

        event.listen(database.engine, "commit", renew)  # of the transaction that looks
        assert ledger.expire() == 0
    assert renewed == [1]
    assert ledger.budget(key.id).held == 60
    clock.now += 11
    assert ledger.expire() == 1


def test_no_more_is_paid_than_was_held_and_all_that_was_used_is_counted(database: Database) -> None:
    ledger = Ledger(database)
    key, _ = Keys(database).create("one", budget=100)
    assert ledger.settle(ledger.hold(key.id, 10, "one"), 15, Usage(1, 5, 10, 20, 30))
    assert ledger.settle(ledger.hold(key.id, 10, "two"), 4, Usage(1, 2, 2))
    assert ledger.budget(key.id).spent == 14
    assert ledger.usage(key.id) == Usage(2, 7, 12, 20, 30)


def test_a_budget_that_is_lowered_keeps_what_is_held(database: Database) -> None:
    ledger = Ledger(database)
    key, _ = Keys(database).create("one")
    hold = ledger.hold(key.id, 80, "one")
    ledger.set_budget(key.id, 50)
    assert ledger.budget(key.id) == Budget(50, 80, 0, 0)
    assert ledger.settle(hold, 70)
    assert ledger.budget(key.id) == Budget(50, 0, 70, 0)


def test_what_is_refused(database: Database) -> None:
    ledger = Ledger(database)
    key, _ = Keys(database).create("one")
    with pytest.raises(ValueError, match="0 tokens or more"):
        ledger.hold(key.id, -1, "less than nothing")
    with pytest.raises(ValueError, match="0 tokens or more"):
        ledger.settle(ledger.hold(key.id, 1, "one"), -1)
    with pytest.raises(ValueError, match="0 tokens or more"):
        ledger.set_budget(key.id, -1)
    with pytest.raises(MidstreamError, match="no key key-none"):
        ledger.hold("key-none", 1, "nobody's")
    with pytest.raises(MidstreamError, match="no key key-none"):
        ledger.budget("key-none")
    assert ledger.usage("key-none") == Usage()
    assert not ledger.settle("hold-none", 1)
    assert not ledger.free("hold-none")
    assert ledger.renew([]) == 0
