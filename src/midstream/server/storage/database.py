"""The database of a server: SQLite in one file, or PostgreSQL; brought up to date as it is opened."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from midstream.core.errors import MidstreamError, spec_error

from .migrations import VERSION_TABLE

_PATIENCE: Final = 30
"""Seconds for which a transaction of SQLite waits for another that writes."""
_LOCK: Final = 0x6D69_6473
"""The advisory lock under which PostgreSQL is brought up to date, by one process at a time."""
_FORMS: Final = "sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"


class StorageError(MidstreamError):
    """A database that cannot be opened (none there, not ours, of a newer version), or that is away or full now."""


class Database:
    """An open database; threads may share it, and processes one file or server.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as directory, Database.open(sqlite_url(directory)) as database:
    ...     with database.session() as session:
    ...         session.execute(text("SELECT count(*) FROM keys")).scalar_one()
    0
    """

    def __init__(self, engine: Engine) -> None:
        self.engine: Final = engine
        # SQLite's own waiting is a sleep: of this process's threads, one writes and the others wait in line
        self._writing: Final[AbstractContextManager[Any]] = (
            threading.RLock() if engine.dialect.name == "sqlite" else nullcontext()
        )

    @classmethod
    def open(cls, url: str) -> Database:
        """The database at a URL, its tables made or brought up to date; a context manager.

        Raises StorageError, in one line and without the URL's password, when it cannot be.
        """
        parsed = _parsed(url)
        engine = _engine(parsed)
        try:
            _upgrade(engine)
        except DBAPIError as error:
            engine.dispose()
            raise StorageError(f"cannot open the database {_shown(parsed)}: {_words(error)}") from None
        except StorageError:
            engine.dispose()
            raise
        return cls(engine)

    @contextmanager
    def session(self, within: Session | None = None) -> Iterator[Session]:
        """A transaction: kept when the block ends, undone when it raises. within: one that is open, to be part of.

        StorageError: the database cannot be reached, or has no room; the same may go well later.
        """
        if within is not None:
            yield within
            return
        with _in_words(), self._writing, Session(self.engine, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A transaction that only reads, and waits for nobody who writes; StorageError as for `session`."""
        with (
            _in_words(),
            self.engine.connect().execution_options(midstream_reads=True) as connection,
            Session(connection, expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session

    def close(self) -> None:
        """Let go of its connections."""
        self.engine.dispose()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Database({_shown(self.engine.url)!r})"


def default_data_dir() -> Path:
    """Where a server keeps what is not named otherwise: XDG_DATA_HOME, else ~/.local/share; it may not be there yet."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "midstream"


def sqlite_url(data_dir: str | os.PathLike[str] | None = None) -> str:
    """The URL of the database in a data directory; the two are made if they are missing, for their owner alone."""
    file = Path(data_dir or default_data_dir()).absolute() / "midstream.db"
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.touch(mode=0o600)
    return URL.create("sqlite", database=str(file)).render_as_string()


def storable(value: str, path: str) -> str:
    """A text that each database keeps as it is; E_BAD_PARAM at `path` for one with a NUL or half a surrogate pair."""
    try:
        if b"\0" not in value.encode():
            return value
    except UnicodeEncodeError:
        pass
    raise spec_error("E_BAD_PARAM", path, "holds a NUL, or half a surrogate pair, which cannot be kept")


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except (OperationalError, PoolTimeoutError) as error:
        raise StorageError(f"the database cannot be used now: {_words(error)}") from error


def _words(error: Exception) -> str:
    """What its driver says, in one line."""
    return " ".join(str(getattr(error, "orig", None) or error).split())


def _shown(url: URL) -> str:
    return url.render_as_string(hide_password=True)


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # the text may hold a password
        raise StorageError(f"this is no URL of a database; type {_FORMS}") from None
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise StorageError(f"no database of the kind {parsed.drivername!r:.40}; type {_FORMS}")
    if parsed.drivername == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise StorageError(f"a database in memory is not kept, and not shared; type {_FORMS}")
    return parsed


def _engine(url: URL) -> Engine:
    options: dict[str, Any] = {"pool_size": 8, "max_overflow": 40, "hide_parameters": True}
    if url.drivername == "sqlite":
        engine = create_engine(url, connect_args={"timeout": _PATIENCE}, **options)
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    try:
        return create_engine(url, pool_pre_ping=True, **options)
    except (ImportError, NoSuchModuleError):
        raise StorageError("PostgreSQL needs psycopg; type: pip install 'midstream[postgres]'") from None


def _set_up_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions begin where we say so, not where its driver guesses
    for setting in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {setting}").close()


def _begin_sqlite(connection: Any) -> None:
    """One that may write takes the lock as it begins, for it could not get it later if another had written."""
    reads = connection.get_execution_options().get("midstream_reads", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _upgrade(engine: Engine) -> None:
    """All steps that are missing, in one transaction, by one process at a time."""
    config = Config()
    config.set_main_option("script_location", "midstream.server.storage:migrations")
    known = {step.revision for step in ScriptDirectory.from_config(config).walk_revisions()}
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        found = set(context.get_current_heads())
        if newer := found - known:
            raise StorageError(
                f"the database {_shown(engine.url)} is of version {min(newer)}, newer than this midstream knows "
                f"({max(known)}): install a newer midstream, or name another database"
            )
        if found != {max(known)}:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
