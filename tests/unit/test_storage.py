"""The database: made, brought up to date, refused; and whose artifacts and files are."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from midstream.core.errors import SpecError
from midstream.server.jobs_store import Jobs, NewJob
from midstream.server.keys import Keys
from midstream.server.ledger import Ledger
from midstream.server.owned import Owned
from midstream.server.quota import QuotaError
from midstream.server.storage import Database, StorageError, default_data_dir, sqlite_url
from midstream.server.storage.migrations import VERSION_TABLE
from midstream.server.storage.tables import Base, KeyRow, UsageRow
from unit.stores import MB, THREADS, check_sums, in_threads, opened


def differences(database: Database) -> list[object]:
    """What the tables of a database, made by the migrations, have other than the models."""
    with database.engine.connect() as connection:
        options = {"version_table": VERSION_TABLE, "compare_type": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with opened(tmp_path) as database:
        yield database


def test_migrations_and_models_agree(database: Database) -> None:
    assert differences(database) == []


def test_a_difference_would_be_seen(database: Database) -> None:
    with database.session() as session:
        session.execute(text("DROP INDEX ix_holds_key_id"))
        session.execute(text("ALTER TABLE keys ADD COLUMN more VARCHAR"))
    assert len(differences(database)) == 2


def test_how_sqlite_is_set_up(database: Database) -> None:
    with database.reading() as session:
        found = [
            session.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        ]
    assert found == ["wal", 1, 1, 30_000]


def test_foreign_keys_hold(database: Database) -> None:
    with pytest.raises(IntegrityError), database.session() as session:
        session.add(UsageRow(key_id="key-none"))


def test_opened_again_it_holds_what_it_held(tmp_path: Path) -> None:
    with opened(tmp_path / "deep" / "data") as database:
        key, _ = Keys(database).create("ada")
    with opened(tmp_path / "deep" / "data") as database:
        assert list(Keys(database).list()) == [key]
    modes = [
        stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "deep" / "data", *(tmp_path / "deep").rglob("*.db"))
    ]
    assert modes == [0o700, 0o600]


def test_opened_by_many_at_once_it_is_made_once(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path)
    together = threading.Barrier(4)

    def one(_: int) -> int:
        together.wait()
        with Database.open(url) as database, database.reading() as session:
            return len(session.scalars(select(KeyRow)).all())

    assert in_threads(one, 4) == [0] * 4


def test_a_newer_version_is_refused_in_one_line(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with sqlite3.connect(tmp_path / "midstream.db") as plain:
        plain.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(StorageError, match=r"midstream\.db is of version 9999, newer than this midstream") as caught:
        opened(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_step_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "midstream.db") as plain:
        plain.execute("CREATE TABLE jobs (mine TEXT)")  # another's, and the last of our tables
    with pytest.raises(StorageError, match=r"cannot open the database .*table jobs already exists"):
        opened(tmp_path)
    with sqlite3.connect(tmp_path / "midstream.db") as plain:
        assert plain.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall() == [("jobs",)]


def test_what_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "midstream.db").write_bytes(b"not a database, but as long as one would be" * 100)
    with pytest.raises(StorageError, match=r"cannot open the database .*not a database"):
        opened(tmp_path)
    with pytest.raises(StorageError, match=r"cannot open the database .*unable to open"):
        Database.open(f"sqlite:///{tmp_path}/nowhere/midstream.db")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense hunter2", "this is no URL of a database; type sqlite:///FILE or postgresql"),
        ("mysql://me:hunter2@host/name", "no database of the kind 'mysql'; type"),
        ("postgresql://me:hunter2@host/name", "no database of the kind 'postgresql'; type"),
        ("sqlite://", "a database in memory is not kept"),
        ("sqlite:///:memory:", "a database in memory is not kept"),
        ("postgresql+psycopg://me:hunter2@127.0.0.1:1/name", r"cannot open the database postgresql.*\*\*\*@"),
    ],
)
def test_urls_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(StorageError, match=message) as caught:
        Database.open(url)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_no_password_in_its_repr(database: Database) -> None:
    assert repr(database).startswith("Database('sqlite:////")


def test_a_transaction_is_kept_whole_or_not_at_all(database: Database) -> None:
    key, _ = Keys(database).create("ada")

    def half() -> None:
        with database.session() as session:
            with database.session(session) as same:
                assert same is session
                row = same.get(KeyRow, key.id)
                assert row is not None
                row.held = 5
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        half()
    with database.reading() as session:
        row = session.get(KeyRow, key.id)
        assert row is not None
        assert row.held == 0


def test_who_reads_waits_for_nobody_who_writes(database: Database) -> None:
    with database.session() as session:
        session.execute(text("UPDATE keys SET held = 0"))
        assert list(Keys(database).list()) == []


def test_a_database_that_is_away_for_a_while_is_one_line(database: Database, tmp_path: Path) -> None:
    (tmp_path / "midstream.db").rename(tmp_path / "away.db")
    (tmp_path / "midstream.db").mkdir()
    database.engine.dispose()
    for act in (Keys(database).list, lambda: Keys(database).create("ada")):
        with pytest.raises(StorageError, match="the database cannot be used now: unable to open database file"):
            act()
    (tmp_path / "midstream.db").rmdir()
    (tmp_path / "away.db").rename(tmp_path / "midstream.db")
    assert list(Keys(database).list()) == []


@pytest.mark.parametrize("text", ["a\0b", "half of \ud83d"])
def test_texts_that_not_each_database_keeps_are_refused(database: Database, text: str) -> None:
    key, _ = Keys(database).create("é\n\U0001f600")
    jobs, owned = Jobs(database, Ledger(database), MB), Owned(database, MB, MB)
    acts: list[Callable[[], object]] = [
        lambda: Keys(database).create(text),
        lambda: jobs.add(key.id, [NewJob("/v1/completions", "{}", text)]),
        lambda: jobs.add(key.id, [NewJob("/v1/completions", text)]),
        lambda: owned.add_file(key.id, text, "batch", 1, ""),
        lambda: owned.add_file(key.id, "a.jsonl", text, 1, ""),
    ]
    for act in acts:
        with pytest.raises(SpecError, match="holds a NUL, or half a surrogate pair"):
            act()
    check_sums(database)


def test_where_data_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / "midstream"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_data_dir() == tmp_path / "home" / ".local" / "share" / "midstream"
    Database.open(sqlite_url(tmp_path / "a b%?#")).close()
    assert (tmp_path / "a b%?#" / "midstream.db").is_file()


def test_import_midstream_imports_no_database() -> None:
    code = (
        "import sys, midstream, midstream.cli; print(sorted({'sqlalchemy', 'alembic', 'fastapi'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- whose things are

ID = "sha256:" + "0" * 64


def test_an_artifact_may_be_of_several_keys(database: Database) -> None:
    ada, bob = (Keys(database).create(name)[0].id for name in ("ada", "bob"))
    owned = Owned(database, artifact_bytes=100, file_bytes=100)
    assert owned.add_artifact(ada, ID, 60)
    assert not owned.add_artifact(ada, ID, 60)
    assert owned.artifact(bob, ID) is None
    assert owned.add_artifact(bob, ID, 60)
    assert [one.artifact_id for one in owned.artifacts(ada)] == [ID]
    assert owned.room(ada, owned.artifact_quota) == 40
    with pytest.raises(QuotaError, match="41 bytes, and the key may keep 40 more: delete artifacts") as caught:
        owned.add_artifact(ada, "sha256:" + "1" * 64, 41)
    assert (caught.value.needed, caught.value.left, caught.value.status) == (41, 40, 413)
    check_sums(database)
    assert owned.drop_artifact(ada, ID) == 1
    assert owned.drop_artifact(ada, ID) is None
    assert owned.drop_artifact(bob, ID) == 0
    assert owned.artifacts(bob) == []
    check_sums(database)


def test_a_file_is_of_one_key(database: Database) -> None:
    ada, bob = (Keys(database).create(name)[0].id for name in ("ada", "bob"))
    owned = Owned(database, artifact_bytes=100, file_bytes=100)
    file = owned.add_file(ada, "prompts.jsonl", "batch", 70, "0" * 64)
    assert file.id.startswith("file-")
    assert owned.file(ada, file.id) == file
    assert owned.files(ada) == [file]
    assert owned.file(bob, file.id) is None
    assert owned.files(bob) == []
    assert not owned.drop_file(bob, file.id)
    with pytest.raises(QuotaError, match="delete files"):
        owned.add_file(ada, "more.jsonl", "batch", 31, "0" * 64)
    assert owned.room(ada, owned.file_quota) == 30
    assert owned.drop_file(ada, file.id)
    assert not owned.drop_file(ada, file.id)
    assert owned.room(ada, owned.file_quota) == 100
    check_sums(database)


def check_quota(database: Database) -> None:
    """Threads that bring and take away the same artifacts never keep more than the quota."""
    key = Keys(database).create("ada")[0].id
    owned = Owned(database, artifact_bytes=100, file_bytes=100)

    def one(thread: int) -> None:
        for turn in range(10):
            artifact_id = f"sha256:{(thread + turn) % 5:064x}"
            try:
                owned.add_artifact(key, artifact_id, 30)
            except QuotaError:
                owned.drop_artifact(key, artifact_id)
            assert owned.room(key, owned.artifact_quota) >= 0

    in_threads(one)
    assert 1 <= len(owned.artifacts(key)) <= 3
    check_sums(database)
    for number in range(10):
        artifact_id, together = f"sha256:{number:064x}", threading.Barrier(THREADS)
        owned.drop_artifact(key, artifact_id)

        def add(_: int, artifact_id: str = artifact_id, together: threading.Barrier = together) -> bool:
            together.wait()
            return owned.add_artifact(key, artifact_id, 1)

        assert sum(in_threads(add)) == 1
        assert owned.drop_artifact(key, artifact_id) == 0
    check_sums(database)


def test_a_quota_holds_among_threads(database: Database) -> None:
    check_quota(database)
