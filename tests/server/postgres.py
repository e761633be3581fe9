"""A PostgreSQL of the tests' own: a cluster in a folder that is thrown away, reached by a socket in it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psycopg
import pytest

_SETTINGS = [
    "fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=150",
    "lock_timeout=20s",  # a test that waits for itself ends
]  # fmt: skip


@contextmanager
def running() -> Iterator[Callable[[], str]]:
    """While open, a server runs; each call gives the URL of a new, empty database."""
    binaries = _binaries()
    directory = Path(mkdtemp(prefix="midstream-pg-", dir="/tmp"))  # a socket's path has at most 107 characters
    owner = _owner()
    server = None
    try:
        if owner:
            shutil.chown(directory, owner["user"], owner["group"])
        data = directory / "data"
        made = subprocess.run(
            [
                binaries / "initdb", "-D", data, "-U", "midstream", "-A", "trust",
                "-E", "UTF8", "--locale=C", "--no-sync",
            ],
            capture_output=True, text=True, cwd=directory, **owner,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        settings = [word for setting in _SETTINGS for word in ("-c", setting)]
        with (directory / "log").open("wb") as log:
            server = subprocess.Popen(
                [binaries / "postgres", "-D", data, "-k", directory, "-h", "", *settings],
                stdout=log, stderr=log, cwd=directory, **owner,
            )  # fmt: skip
        admin = f"host={directory} user=midstream dbname=postgres"
        _wait(server, admin, directory / "log")
        count = 0

        def fresh() -> str:
            nonlocal count
            count += 1
            with psycopg.connect(admin, autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE t{count}".encode())
            return f"postgresql+psycopg://midstream@/t{count}?host={directory}"

        yield fresh
    finally:
        if server is not None:
            server.send_signal(signal.SIGQUIT)  # at once: nothing of it is kept
            server.wait(30)
        shutil.rmtree(directory, ignore_errors=True)


def _binaries() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[4]))
    if found:
        return found[-1].parent
    if Path("/etc/debian_version").exists():
        pytest.fail("no PostgreSQL here; type: apt-get install postgresql", pytrace=False)
    pytest.skip("no PostgreSQL in /usr/lib/postgresql")


def _owner() -> dict[str, Any]:
    """Whom the server runs as: it refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    pytest.fail("no user postgres or nobody here, and PostgreSQL does not run as root", pytrace=False)


def _wait(server: subprocess.Popen[Any], admin: str, log: Path) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            psycopg.connect(admin, connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            if server.poll() is not None or time.monotonic() > end:
                raise AssertionError(log.read_text()) from None
            time.sleep(0.05)
