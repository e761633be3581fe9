"""Keys: what is shown, what is kept, and what opens nothing."""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.core.errors import SpecError
from midstream.server import keys as module
from midstream.server.keys import SCOPES, USUAL, Keys
from midstream.server.ledger import Budget, Ledger
from midstream.server.storage import Database
from unit.stores import Clock, in_threads, opened


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with opened(tmp_path) as database:
        yield database


def test_a_key_opens_what_it_was_made_for(database: Database) -> None:
    clock = Clock()
    keys = Keys(database, clock)
    key, secret = keys.create("ada", ["steer", "complete", "steer"], 500)
    assert re.fullmatch(r"ms-[0-9a-f]{12}-[\w-]{43}", secret)
    assert secret.startswith(key.prefix)
    assert (key.name, key.scopes, key.created, key.revoked_at, key.budget) == (
        "ada", {"complete", "steer"}, 1000.0, None, 500,
    )  # fmt: skip
    assert keys.find(secret) == keys.get(key.id) == key
    assert key.may("steer")
    assert not key.may("admin")
    assert Ledger(database).budget(key.id) == Budget(500, 0, 0, 500)


def test_what_a_key_may_do_if_nobody_says(database: Database) -> None:
    key, _ = Keys(database).create("ada")
    assert key.scopes == set(USUAL) == set(SCOPES) - {"admin"}
    assert key.budget is None


def test_what_opens_nothing(database: Database) -> None:
    keys = Keys(database)
    key, secret = keys.create("ada")
    _, other = keys.create("bob")
    swapped = secret[: len(key.prefix)] + other[len(key.prefix) :]
    wrong = [
        "",
        "ms-",
        key.prefix,
        key.id,
        "anonymous",
        secret[:-1],
        secret + "A",
        secret.upper(),
        swapped,
        f" {secret}",
    ]
    for one in [*wrong, "ms-000000000000-" + "A" * 43, "\0", "é" * 60, "\ud800", "x" * 100_000]:
        assert keys.find(one) is None


def test_secrets_are_compared_in_constant_time_also_where_there_is_no_key(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def compared(a: str, b: str) -> bool:
        seen.append((a, b))
        return a == b

    keys = Keys(database)
    _, secret = keys.create("ada")
    monkeypatch.setattr(module.hmac, "compare_digest", compared)
    keys.find(secret)
    keys.find("ms-000000000000-" + "A" * 43)
    assert [len(one) for pair in seen for one in pair] == [64] * 4


def test_a_revoked_key_opens_nothing_and_stays_in_the_list(database: Database) -> None:
    clock = Clock()
    keys = Keys(database, clock)
    key, secret = keys.create("ada")
    clock.now += 5
    revoked = keys.revoke(key.id)
    clock.now += 5
    assert revoked is not None
    assert revoked.revoked_at == 1005.0
    assert keys.revoke(key.id) == revoked
    assert keys.find(secret) is None
    assert keys.list() == [revoked]
    assert keys.any()  # or the last key's end would open the server to all
    assert keys.revoke("key-none") is None


def test_the_list_is_in_order(database: Database) -> None:
    clock = Clock()
    keys = Keys(database, clock)
    assert (list(keys.list()), keys.any()) == ([], False)
    for name in ("c", "a", "b"):
        keys.create(name)
        clock.now += 1
    assert [key.name for key in keys.list()] == ["c", "a", "b"]


def test_who_owns_things_where_there_are_no_keys(database: Database) -> None:
    found = in_threads(lambda _: Keys(database, Clock()).anonymous())
    assert len(set(found)) == 1
    anonymous, keys = found[0], Keys(database)
    assert (anonymous.id, anonymous.scopes, anonymous.budget) == ("anonymous", set(SCOPES), None)
    assert not keys.any()
    assert list(keys.list()) == []
    assert keys.revoke("anonymous") is None
    ledger = Ledger(database)
    assert ledger.settle(ledger.hold(anonymous.id, 10**12, "anything"), 10**12)


def test_no_secret_is_kept_shown_or_logged(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(database)
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("sqlalchemy.engine").setLevel(logging.DEBUG)
        try:
            key, secret = keys.create("ada")
            found = keys.find(secret)
        finally:
            logging.getLogger("sqlalchemy.engine").setLevel(logging.NOTSET)
    hidden = secret[len(key.prefix) + 1 :]
    with sqlite3.connect(tmp_path / "midstream.db") as plain:
        row = plain.execute("SELECT * FROM keys").fetchone()
    kept = next(one for one in row if isinstance(one, str) and len(one) == 64)
    assert hidden not in repr(row)
    assert all(hidden not in file.read_bytes().decode("latin-1") for file in tmp_path.iterdir())
    for text in (repr(key), repr(found), repr(keys), str(key.__dict__)):
        assert hidden not in text
        assert kept not in text
    # what SQLAlchemy itself writes when it is asked for everything names statements, and no values of ours
    assert hidden not in caplog.text


@pytest.mark.parametrize(
    ("scopes", "budget", "message"),
    [
        (["complete", "root"], None, "E_BAD_PARAM at scopes: no scope 'root'; there are: complete, capture, steer"),
        ([], None, "E_BAD_PARAM at scopes: a key has one scope or more"),
        (["complete"], -1, "E_BAD_PARAM at budget: must be 0 tokens or more, got -1"),
    ],
)
def test_what_is_refused(database: Database, scopes: list[str], budget: int | None, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        Keys(database).create("ada", scopes, budget)
    assert list(Keys(database).list()) == []
